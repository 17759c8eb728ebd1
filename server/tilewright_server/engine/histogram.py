"""Histograms of times, cheap enough for every execution."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BOUNDS_NS", "Histogram"]

FIRST_BITS = 10
BOUNDS_NS = tuple(1 << (FIRST_BITS + index) for index in range(28))
"""Upper bounds of the buckets in nanoseconds: 1 microsecond to 2 minutes, each twice the one before."""
_LAST = len(BOUNDS_NS)


@dataclass(slots=True)
class Histogram:
    """Times by powers of two. Whoever observes holds a lock of his own."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_NS) + 1))
    """Times in each bucket; the last is of those above all bounds."""
    sum_ns: int = 0

    def observe(self, ns: int) -> None:
        """Count one time in nanoseconds."""
        index = ((ns - 1) >> FIRST_BITS).bit_length() if ns > 0 else 0
        self.counts[index if index < _LAST else _LAST] += 1
        self.sum_ns += ns

    def copy(self) -> Histogram:
        return Histogram(list(self.counts), self.sum_ns)
