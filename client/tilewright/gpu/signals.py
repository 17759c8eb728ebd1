"""Numbers in a page of shared memory that order a stream of this process and one of the server: each side's stream
writes its own behind its work, and waits for the other's.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
import weakref
from contextlib import AbstractContextManager
from typing import Protocol

from tilewright.errors import TilewrightError

__all__ = ["PAGE_BYTES", "SignalCalls", "SignalPage", "signal_problem"]

PAGE_BYTES = 4096
PRODUCER, COMPLETION = 0, 64
"""Bytes from the page's beginning to this process' number and to the server's."""
_STEP_S = 5.0
"""A wait that has not returned by then blocks."""
_LOOK_S = 0.002


class SignalCalls(Protocol):
    """Calls of a driver for numbers of 64 bits in memory of the host."""

    def lock_page(self, ordinal: int, address: int, nbytes: int) -> int:
        """Lock memory of the host for the device; its address there."""
        ...

    def unlock_page(self, ordinal: int, address: int) -> None:
        """Undo it; waits for the whole device."""
        ...

    def write_value(self, ordinal: int, stream: int, address: int, value: int) -> None:
        """Write a number behind what is on the stream."""
        ...

    def wait_value(self, ordinal: int, stream: int, address: int, value: int) -> None:
        """Let the stream wait until a number is at least ``value``."""
        ...

    def own_stream(self, ordinal: int) -> AbstractContextManager[int]:
        """A stream for a while, which is idle at its end."""
        ...

    def idle(self, ordinal: int, stream: int) -> bool:
        """True if all work of a stream is over."""
        ...


class SignalPage:
    """See above."""

    def __init__(self, calls: SignalCalls, ordinal: int, file: int) -> None:
        """Map a page of a memory file (-1: one of this process alone); the caller closes it. Raises ``OSError``,
        ``TilewrightError``."""
        self._calls, self._ordinal = calls, ordinal
        self._map = mmap.mmap(file, PAGE_BYTES)
        self._numbers = memoryview(self._map).cast("Q")
        self._place = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._address = calls.lock_page(ordinal, self._place, PAGE_BYTES)

    @property
    def completed(self) -> int:
        """The server's number now."""
        return self._numbers[COMPLETION // 8]

    def produce(self, value: int) -> None:
        """Write this process' number at once."""
        self._numbers[PRODUCER // 8] = value

    def write(self, stream: int, value: int, place: int = PRODUCER) -> None:
        """Write a number behind what is on a stream."""
        self._calls.write_value(self._ordinal, stream, self._address + place, value)

    def wait(self, stream: int, value: int, place: int = COMPLETION) -> None:
        """Let a stream wait until a number is at least ``value``."""
        self._calls.wait_value(self._ordinal, stream, self._address + place, value)

    def close(self) -> None:
        """Unlock it. No stream may use it any more."""
        with contextlib.suppress(TilewrightError):  # the device may be gone
            self._calls.unlock_page(self._ordinal, self._place)


_found: weakref.WeakKeyDictionary[SignalCalls, dict[int, str]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def signal_problem(calls: SignalCalls, ordinal: int) -> str:
    """Why streams of this process cannot be tied by signals, or nothing: tried once on each device, with a stream of
    its own. (Frameworks bring runtimes of their own, which are not the server's.)"""
    with _lock:
        found = _found.setdefault(calls, {})
        if ordinal not in found:
            try:
                found[ordinal] = _tried(calls, ordinal)
            except (TilewrightError, OSError) as error:
                found[ordinal] = str(error)
        return found[ordinal]


def _tried(calls: SignalCalls, ordinal: int) -> str:
    page = SignalPage(calls, ordinal, -1)
    with calls.own_stream(ordinal) as stream:
        problem: list[str] = []

        def wait() -> None:
            try:
                page.wait(stream, 1, PRODUCER)
            except TilewrightError as error:
                problem.append(str(error))

        caller = threading.Thread(target=wait, daemon=True)
        caller.start()
        caller.join(_STEP_S)
        if caller.is_alive():
            problem.append("a wait for a number blocks the caller")
        elif not problem and calls.idle(ordinal, stream):
            problem.append("a stream does not wait for a number")
        page.produce(1)
        caller.join()
        if not problem:
            page.write(stream, 2, COMPLETION)
        end = time.monotonic() + _STEP_S
        while not calls.idle(ordinal, stream) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        if not problem and page.completed != 2:
            problem.append("a stream does not write a number that it waited for")
    if not problem:
        page.close()
    return "; ".join(problem)
