"""Signals of the process, taken without a Python handler."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Iterator

__all__ = ["process_signals"]

ENDS = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask for an end; SIGHUP asks for a reload of the settings."""


@contextlib.contextmanager
def process_signals() -> Iterator[queue.SimpleQueue[int]]:
    """Signals that ask for an end or a reload, as they come; the second that asks for an end ends the process.

    They are taken from a pipe that the C handler writes to. A Python handler runs only when the main thread next runs
    Python: a signal that comes just before it starts to wait would be noticed at the end of the wait, which is never.
    """
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(reader, True)

    def forward() -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGHUP:
                received.put(number[0])
            if number[0] not in ENDS:
                continue
            if taken:
                os._exit(128 + number[0])
            taken.append(number[0])
            received.put(number[0])
        os.close(reader)

    taken: list[int] = []
    previous = {number: signal.signal(number, lambda *_: None) for number in (*ENDS, signal.SIGHUP)}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=forward, name="signals", daemon=True).start()
    try:
        yield received
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(writer)
