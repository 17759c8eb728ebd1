"""Visibility of keys: one statement of the mask, in four numbers.

Query ``i`` sees key ``j`` exactly if ``j < keys``, and ``right < 0 or j <= i + off + right``, and ``left < 0 or
j >= i + off - left or j < sink``. ``off`` is ``keys - queries`` of the sequence if the diagonal ends at the bottom
right, else 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_fmha.vocabulary import MaskKind

__all__ = ["Mask"]


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask. ``left`` and ``right`` are unbounded below zero; ``right`` 0 is causal."""

    left: int = -1
    right: int = -1
    bottom_right: bool = False
    sink: int = 0
    """First keys that the left bound never hides."""

    @property
    def kind(self) -> MaskKind:
        if self.left < 0 and self.right < 0:
            return MaskKind.NONE
        return MaskKind.CAUSAL if self.left < 0 and self.sink == 0 else MaskKind.WINDOW

    def offset(self, queries: int, keys: int) -> int:
        """How far the diagonal begins to the right of the first key."""
        return keys - queries if self.bottom_right else 0

    def visible(self, queries: int, keys: int) -> npt.NDArray[np.bool_]:
        """[queries, keys]: which key each query sees."""
        i = np.arange(queries)[:, None] + self.offset(queries, keys)
        j = np.arange(keys)[None, :]
        seen: npt.NDArray[Any] = np.ones((queries, keys), bool)
        if self.right >= 0:
            seen &= j <= i + self.right
        if self.left >= 0:
            seen &= (j >= i - self.left) | (j < self.sink)
        return seen

    def pairs(self, queries: int, keys: int) -> int:
        """Number of visible pairs, exactly."""
        off = self.offset(queries, keys)
        total = queries * keys if self.right < 0 else _sum_clipped(off + self.right + 1, keys, queries)
        if self.left < 0:
            return total
        hidden = _sum_clipped(off - self.left, keys, queries)
        return total - hidden + _sum_clipped(off - self.left, min(self.sink, keys), queries)


def _sum_clipped(first: int, most: int, count: int) -> int:
    """The sum of ``min(max(first + i, 0), most)`` over ``i`` from 0 to ``count - 1``."""

    def below(end: int) -> int:
        """The sum of ``min(x, most)`` over ``x`` from 0 to ``end - 1``."""
        rising = min(max(end, 0), most)
        return rising * (rising - 1) // 2 + most * (max(end, 0) - rising)

    return below(first + count) - below(first)
