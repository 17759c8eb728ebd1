"""Readiness: whether clients should be sent here, and why not."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Readiness"]


class Readiness:
    """Not ready from the start until ``set("")``, and never again after ``end``. Thread-safe."""

    def __init__(self, changed: Callable[[bool], None]) -> None:
        """``changed`` is told of every change, under a lock."""
        self._changed = changed
        self._lock = threading.Lock()
        self._ended = False
        self.reason = "the server is starting"
        """Empty if it is ready."""

    def set(self, reason: str) -> None:
        """Become ready, or not for a ``reason``."""
        with self._lock:
            if self._ended:
                return
            self.reason = reason
            self._changed(not reason)

    def end(self) -> None:
        """The server drains."""
        with self._lock:
            self._ended = True
            self.reason = "the server is shutting down"
            self._changed(False)
