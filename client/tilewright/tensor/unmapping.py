"""Unmapping of a server's device memory that no array of this process uses any more, by a thread of its own.

To unmap memory is to wait until the GPU has done all that may still use it. Arrays are collected in whatever thread
happens to run the collector, which may be the one that is about to launch what a stream waits for.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from functools import cache

from tilewright.errors import TilewrightError
from tilewright.gpu.driver import GpuDriver

__all__ = ["Unmapper", "unmapper"]

Mapped = tuple[GpuDriver, int, int, object]


class Unmapper:
    """The thread, from the first array on, and what waits for it. Forked processes have none: GPUs are not theirs."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Mapped] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._owner = 0
        """Process that the thread is in."""

    def start(self) -> None:
        """Start the thread, if this process has none. Not for finalizers."""
        if self._owner != os.getpid():
            with self._starting:
                if self._owner != os.getpid():
                    threading.Thread(target=self._serve, name="tilewright-unmapping", daemon=True).start()
                    self._owner = os.getpid()

    def put(self, gpu: GpuDriver, ordinal: int, base: int, owner: object) -> None:
        """Unmap memory soon. ``owner`` is kept until then: the server must not free it before. Never waits."""
        self._waiting.put((gpu, ordinal, base, owner))

    def _serve(self) -> None:
        while True:
            self._unmap(*self._waiting.get())

    @staticmethod
    def _unmap(gpu: GpuDriver, ordinal: int, base: int, _owner: object) -> None:
        with contextlib.suppress(TilewrightError):  # the process may be on its way out
            gpu.close_legacy(ordinal, base)  # behind whatever still uses it


@cache
def unmapper() -> Unmapper:
    """The one of this process."""
    return Unmapper()
