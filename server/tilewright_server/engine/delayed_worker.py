"""A thread for what nobody waits for."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Later"]

log = logging.getLogger(__name__)


class Later:
    """Runs work at or after the time it is wanted, one piece after the other, in a thread that starts with the first.

    Thread-safe.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, work: Callable[[], object], delay_s: float = 0.0) -> None:
        """Have ``work`` run in ``delay_s`` seconds, or as soon after as the thread is free; never after ``close``."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._waiting, (time.monotonic() + delay_s, next(self._order), work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Forget what waits and return when what runs has ended. Idempotent."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:
                log.exception("work of %s failed", self._name)
            del work  # what it holds is not to live until the next

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            while not self._closed:
                left = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._waiting)[2]
                self._changed.wait(left)
        return None
