"""A pipe by which processes that this one starts notice its end, however it ended.

``PR_SET_PDEATHSIG`` would not do: it is sent at the end of the thread that started a process, is not inherited by that
process' children, and asks for code of ours between fork and exec.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading

__all__ = ["end_with", "lifeline"]

_lock = threading.Lock()
_ends: list[int] = []


def lifeline() -> int:
    """The reading end of a pipe that nobody writes to, for processes to inherit. It ends with this process, which alone
    has the other end."""
    with _lock:
        if not _ends:
            _ends.extend(os.pipe2(os.O_CLOEXEC))
        return _ends[0]


def end_with(inherited: int) -> None:
    """Have the kernel end this process, whatever it is doing, when the process that ``lifeline`` is of has ended."""
    # Opened anew: whom the kernel tells belongs to an open file, and the inherited one is shared with others.
    own = os.open(f"/proc/self/fd/{inherited}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.close(inherited)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    if select.select([own], [], [], 0)[0]:  # it ended before the kernel had been asked
        raise SystemExit(128 + signal.SIGIO)
