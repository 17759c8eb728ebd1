"""Workspace of blocked products on a CPU: the Python mirror of ``tilewright/cpu/blocks/blocking.hpp`` and ``pack.hpp``.

Every kernel exports its own figure (role ``workspace``); tests of the operations compare the two over many
configurations and problems.
"""

from __future__ import annotations

from typing import Protocol

from tilewright_kit.tiles.tiled import GROUP_BYTES, Tiled
from tilewright_kit.types.arithmetic import ceil_div, padded
from tilewright_kit.types.vocabulary import Binary

__all__ = [
    "ALIGNMENT",
    "SHARED_BYTES",
    "block_bytes",
    "packed_bytes",
    "packs_unsigned",
    "slice_length",
    "slices",
    "sums_in_c",
]

ALIGNMENT = 64
"""Every piece of scratch memory is a multiple of so many bytes: a line of a cache."""

SHARED_BYTES = 16 << 20
"""``kSharedBytes``: bytes that the packed operand of a team may fill; a deeper K makes its tile narrower."""


class _Steps(Protocol):
    @property
    def fused(self) -> bool: ...
    @property
    def binary(self) -> Binary: ...
    @property
    def c(self) -> str: ...
    @property
    def acc(self) -> str: ...


def slice_length(k: int, split: int, tile_k: int) -> int:
    """k covered by one slice of split-K: a multiple of tile_k."""
    return k if split <= 1 else padded(ceil_div(k, split), tile_k)


def slices(k: int, split: int, tile_k: int) -> int:
    """Slices that are not empty: at most ``split``, fewer if k is short."""
    return ceil_div(k, slice_length(k, split, tile_k)) if k and split > 1 else 1


def packed_bytes(extent: int, k: int, rows: int, depth: int, with_sums: bool) -> int:
    """Bytes of a packed operand of ``extent`` rows (A) or columns (B), as in ``tilewright/cpu/blocks/pack.hpp``."""
    groups = ceil_div(k, depth) + with_sums
    return padded(padded(extent, rows) * GROUP_BYTES * groups, ALIGNMENT)


def packs_unsigned(config: Tiled) -> bool:
    """True if A is packed unsigned, so that B carries column sums."""
    return config.a == "int8" and config.warp_tile[2] == 4


def sums_in_c(config: _Steps) -> bool:
    """True if C can hold partial sums: it has the accumulator's type, and nothing but alpha follows."""
    return not config.fused and config.binary is Binary.NONE and config.c == config.acc


def block_bytes(config: Tiled, m: int, n: int, k: int, in_c: bool) -> tuple[int, int, int, int]:
    """``Blocking::sizes`` of one product: bytes of the shared packed operand, and of one member's slab, column sums and
    unfinished tiles, which there are none of if partial sums are kept ``in_c``.
    """
    mr, nr, depth = config.warp_tile
    shares_b = config.tile[1] >= config.tile[0]
    shared_r, slab_r = (nr, mr) if shares_b else (mr, nr)
    extent, tile = (n, config.tile[1]) if shares_b else (m, config.tile[0])
    slab_extent, slab_tile = (m, config.tile[0]) if shares_b else (n, config.tile[1])
    groups, block = ceil_div(k, depth), ceil_div(config.tile[2], depth)
    fitting = max(SHARED_BYTES // (GROUP_BYTES * max(groups, 1)) // shared_r, 1) * shared_r
    length = min(padded(extent, shared_r), max(tile, shared_r) // shared_r * shared_r, fitting)
    slab = min(padded(slab_extent, slab_r), padded(slab_tile, slab_r))
    of_team = own = sums = unfinished = 0
    if not (shares_b and config.preshuffle):
        of_team = packed_bytes(length, k, shared_r, depth, shares_b and packs_unsigned(config))
    if shares_b or not config.preshuffle:
        own = padded(slab * min(groups, block) * GROUP_BYTES, ALIGNMENT)
        if not shares_b and packs_unsigned(config):
            sums = padded(slab * GROUP_BYTES, ALIGNMENT)
    if not in_c and groups > block:
        unfinished = padded(slab * length * GROUP_BYTES, ALIGNMENT)
    return of_team, own, sums, unfinished
