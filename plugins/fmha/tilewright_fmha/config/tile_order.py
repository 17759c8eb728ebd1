"""The order of kernels by how their rows suit the longest sequence: what ``first_fit`` goes by.

The system that Tilewright rebuilds has five categories (``seeds_category``). Its first was meant for the smallest tile
that holds a short sequence, but asks that the length be a multiple of the tile and not above it: only a length that
equals the tile's rows ever gets there. Its second, tiles of 64 rows whatever the length, then comes before larger tiles
that divide the length. Both are mended here.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright_fmha.config.config import FmhaConfig
from tilewright_kit.types.arithmetic import padded

__all__ = ["category", "seeds_category", "seeds_order", "seqtune_order"]

_FALLBACK = 64


def seqtune_order(configs: Iterable[FmhaConfig], max_sq: int) -> list[FmhaConfig]:
    """First tiles that hold the whole sequence, the smallest first; then those that divide it, the largest first; then
    the rest, by the rows that are computed for nothing, by rank, and the smallest first.
    """
    return sorted(configs, key=lambda config: (*_order(config, max_sq), config.name))


def category(m0: int, max_sq: int) -> int:
    """0: the tile holds the whole sequence. 1: it divides it. 2: the rest."""
    if m0 >= max_sq:
        return 0
    return 1 if max_sq % m0 == 0 else 2


def _order(config: FmhaConfig, max_sq: int) -> tuple[int, int, int, int]:
    m0 = max(config.m0, 1)
    kind = category(m0, max_sq)
    if kind == 2:
        return (2, padded(max_sq, m0) - max_sq, config.selection_rank, m0)
    return (kind, m0 if kind == 0 else -m0, config.selection_rank, m0)


def seeds_category(m0: int, max_sq: int, largest_m0: int) -> int:
    """The category as it was, flaw included: kept to compare with."""
    if max_sq <= m0 and max_sq % m0 == 0:
        return 0
    if m0 == _FALLBACK:
        return 1
    if m0 == largest_m0:
        return 2
    return 3 if max_sq % m0 == 0 else 4


def seeds_order(configs: Iterable[FmhaConfig], max_sq: int) -> list[FmhaConfig]:
    """The order as it was: category, rank, rows; equal ones as they came."""
    every = list(configs)
    largest = max((config.m0 for config in every), default=0)
    return sorted(
        every, key=lambda config: (seeds_category(config.m0, max_sq, largest), config.selection_rank, config.m0)
    )
