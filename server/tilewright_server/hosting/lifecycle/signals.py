"""Signals of the process, taken without a Python handler."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["OTHERS", "end_when_idle", "process_signals"]

log = logging.getLogger("tilewright")

ENDS = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask for an end."""
OTHERS = (signal.SIGHUP, signal.SIGUSR2)
"""Signals that ask for a reload of the settings, and for a successor."""


@contextlib.contextmanager
def process_signals() -> Iterator[queue.SimpleQueue[int]]:
    """Signals of ``ENDS`` and ``OTHERS``, as they come; the second that asks for an end ends the process.

    They are taken from a pipe that the C handler writes to. A Python handler runs only when the main thread next runs
    Python: a signal that comes just before it starts to wait would be noticed at the end of the wait, which is never.
    """
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(reader, True)

    def forward() -> None:
        while number := os.read(reader, 1):
            if number[0] in OTHERS:
                received.put(number[0])
            if number[0] not in ENDS:
                continue
            if taken:
                os._exit(128 + number[0])
            taken.append(number[0])
            received.put(number[0])
        os.close(reader)

    taken: list[int] = []
    previous = {number: signal.signal(number, lambda *_: None) for number in (*ENDS, *OTHERS)}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=forward, name="signals", daemon=True).start()
    try:
        yield received
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(writer)


def end_when_idle(sessions: Callable[[], int], limit_s: float, ended: threading.Event) -> None:
    """Ask for the end, as a signal would, when no session has been open for ``limit_s`` seconds; until it has
    ``ended``."""
    seen = time.monotonic()
    while not ended.wait(min(limit_s / 4, 10.0)):
        if sessions():
            seen = time.monotonic()
        elif time.monotonic() - seen >= limit_s:
            log.info("no client for %g s", limit_s)
            os.kill(os.getpid(), signal.SIGTERM)
            return
