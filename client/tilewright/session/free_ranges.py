"""Which parts of a segment are free: first fit in address order, neighbours joined again. No I/O, no threads, no
clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["GRAIN", "FreeList", "round_up"]

GRAIN = 64
"""Sizes and offsets are multiples of this: a cache line, and enough for any vector load."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class FreeList:
    """Allocates ranges of ``[0, size)``. Not thread-safe: the pool holds its lock."""

    __slots__ = ("_lengths", "_starts", "_taken", "peak", "size", "used")

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self.peak = 0
        """One past the highest byte that was ever allocated."""
        self._starts = [0]
        self._lengths = {0: size}
        self._taken: dict[int, int] = {}

    def allocate(self, nbytes: int, align: int = GRAIN) -> int | None:
        """Offset of a free range of ``nbytes`` (rounded up to ``GRAIN``), a multiple of ``align``; ``None`` if there
        is none.
        """
        need = round_up(max(nbytes, 1), GRAIN)
        for index, start in enumerate(self._starts):
            length = self._lengths[start]
            offset = round_up(start, align)
            slack = offset - start
            if slack + need > length:
                continue
            del self._starts[index]
            del self._lengths[start]
            if slack:
                self._insert(start, slack)
            if length > slack + need:
                self._insert(offset + need, length - slack - need)
            self._taken[offset] = need
            self.used += need
            self.peak = max(self.peak, offset + need)
            return offset
        return None

    def free(self, offset: int) -> None:
        """Give a range back. ``KeyError`` if it is not allocated."""
        length = self._taken.pop(offset)
        self.used -= length
        index = bisect_left(self._starts, offset)
        if index < len(self._starts) and self._starts[index] == offset + length:
            length += self._lengths.pop(self._starts.pop(index))
        if index:
            before = self._starts[index - 1]
            if before + self._lengths[before] == offset:
                self._lengths[before] += length
                return
        self._insert(offset, length)

    def _insert(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._lengths[start] = length
