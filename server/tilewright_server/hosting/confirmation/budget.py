"""The part of a device's time that confirmation may take, and how many kernels it may have compiled."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Budget"]

_SAVED_S = 0.05
"""Time of the device that may be saved up: no more than that is taken at once."""
_HOUR_S = 3600.0


class Budget:
    """For one thread that spends, and one that ends it.

    Time of the device comes in at ``share`` of the time that passes. What one step takes is known only when it is over:
    whoever has overdrawn waits until it is paid back.
    """

    def __init__(self, share: float, builds: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``builds`` is the number of kernels compiled in any hour."""
        self._share = share
        self._builds = builds
        self._clock = clock
        self._saved_s = 0.0
        self._since = clock()
        self._built: deque[float] = deque()
        self._ended = threading.Event()
        self.spent_s = 0.0
        """Time of devices that was taken so far."""

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self) -> None:
        """Have whoever waits go on at once: ``wait`` is false from now on."""
        self._ended.set()

    def pause(self, seconds: float) -> bool:
        """Wait. False if it has ended."""
        return not self._ended.wait(seconds)

    def wait(self) -> bool:
        """Wait until nothing is owed. False if it has ended."""
        while not self._ended.is_set():
            now = self._clock()
            self._saved_s = min(_SAVED_S, self._saved_s + self._share * (now - self._since))
            self._since = now
            if self._saved_s >= 0:
                return True
            self._ended.wait(min(1.0, -self._saved_s / self._share))
        return False

    def spend(self, seconds: float) -> None:
        """Pay for time of the device that was taken."""
        self._saved_s -= seconds
        self.spent_s += seconds

    def may_build(self) -> bool:
        """True if one more kernel may be compiled now; it counts then."""
        now = self._clock()
        while self._built and self._built[0] <= now - _HOUR_S:
            self._built.popleft()
        if len(self._built) >= self._builds:
            return False
        self._built.append(now)
        return True
