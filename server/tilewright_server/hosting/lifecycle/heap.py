"""The heap of the server's process: how much of it may stay when what it held is gone.

By default, glibc gives every thread a heap (up to eight for each core) and raises its thresholds with the largest block
that was ever freed, up to 32 MiB. After a flood of large messages, hundreds of MiB then stay with the process that
nothing uses. With another C library these functions do nothing.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from typing import Any

__all__ = ["HeapTrimmer", "bound_heap", "trim_heap"]

log = logging.getLogger("tilewright.heap")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of ``mallopt`` (malloc.h). Each threshold that is set stays as it is."""
LARGE_BYTES = 4 << 20
"""Blocks from this size on are mappings of their own, which end with them; as much may stay at the end of a heap."""
MAX_ARENAS = 16
INTERVAL_S = 5.0
SLACK_BYTES = 32 << 20
"""Free bytes more than before after which the heaps are looked through for pages without a block."""


class _HeapSizes(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h: bytes of all heaps together."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _libc() -> Any:
    """The C library, if it is glibc 2.33 or later."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallinfo2") and hasattr(libc, "malloc_trim") else None


def bound_heap() -> None:
    """Give large blocks back to the system when they are freed, have few heaps, and trim them from now on. For a
    process of its own, before it has threads."""
    libc = _libc()
    if libc is None:
        return
    libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)
    libc.mallopt(M_ARENA_MAX, min(MAX_ARENAS, 8 * (os.cpu_count() or 1)))
    try:
        HeapTrimmer().start()
    except RuntimeError as error:  # no thread: it serves without
        log.warning("free pages stay with the process: %s", error)


def trim_heap() -> None:
    """Give free pages back now: after work that is not done again."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


class HeapTrimmer:
    """Gives free pages in the middle of the heaps back to the system: looks every few seconds whether more has become
    free, from ``start`` on."""

    def __init__(self, interval_s: float = INTERVAL_S, slack_bytes: int = SLACK_BYTES) -> None:
        self._interval_s = interval_s
        self._slack_bytes = slack_bytes
        self._libc = _libc()
        self._thread = threading.Thread(target=self._run, name="heap", daemon=True)

    def start(self) -> None:
        """Raises ``RuntimeError`` if the system refuses a thread."""
        if self._libc is not None:
            self._libc.mallinfo2.restype = _HeapSizes
            self._thread.start()

    def _run(self) -> None:
        floor = 0  # free bytes that have no pages, or had none last time
        while True:
            time.sleep(self._interval_s)
            free = self._libc.mallinfo2().fordblks
            if free - floor > self._slack_bytes:
                self._libc.malloc_trim(0)
                log.debug("heaps trimmed: %d MiB were free", free >> 20)
                floor = free
            floor = min(floor, free)
