"""Order of kernels by how their rows suit the longest sequence: what the ``first_fit`` strategy goes by."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright_fmha.config.config import FmhaConfig
from tilewright_kit.types.arithmetic import padded

__all__ = ["category", "tile_order"]


def tile_order(configs: Iterable[FmhaConfig], max_sq: int) -> list[FmhaConfig]:
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
