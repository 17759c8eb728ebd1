"""A circuit breaker: what fails again and again is left alone for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Breaker"]

FAILURES = 3
"""So many in a row open it."""
REST_S = 30.0


class Breaker:
    """Closed at first. After ``failures`` in a row it is open for ``rest_s`` seconds; then one try at a time is let
    through, of which one success closes it. Thread-safe."""

    def __init__(
        self, failures: int = FAILURES, rest_s: float = REST_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.opened = 0
        """How often it opened."""
        self._failures, self._rest_s, self._clock = failures, rest_s, clock
        self._in_a_row = 0
        self._until = 0.0
        self._trying = False
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        return self._in_a_row >= self._failures

    def left_s(self) -> float:
        """Seconds until a try is let through again."""
        return max(0.0, self._until - self._clock()) if self.is_open else 0.0

    def allows(self) -> bool:
        """True if a try may be made, which must then be followed by ``succeeded`` or ``failed``."""
        with self._lock:
            if not self.is_open:
                return True
            if self._trying or self._clock() < self._until:
                return False
            self._trying = True
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._in_a_row, self._trying = 0, False

    def failed(self) -> bool:
        """Count a failure; True if it opened the breaker."""
        with self._lock:
            self._in_a_row += 1
            self._trying = False
            if not self.is_open:
                return False
            self._until = self._clock() + self._rest_s
            opens = self._in_a_row == self._failures
            self.opened += opens
            return opens
