"""Choosing among the entries of an arch's tables."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tilewright_arch import ArchSpec
from tilewright_kit.tiles.footprint.workgroup import is_specialised
from tilewright_kit.tiles.tiled import Tiled, Triple
from tilewright_kit.types.vocabulary import size_of

__all__ = [
    "SIDE",
    "columns_of",
    "nearest",
    "preferred_pipeline",
    "rows_of",
    "text_of",
    "usable_warp_tiles",
    "with_extent",
]

SIDE = 64
"""The fixed side of a warpgroup's matrix instruction."""


def nearest(wanted: Triple, table: Iterable[Triple]) -> Triple:
    """The entry of most nearly the same area, then the same shape; the earlier one of equals."""

    def distance(entry: Triple) -> tuple[float, float]:
        logs = [math.log2(max(have, 1) / max(want, 1)) for have, want in zip(entry, wanted, strict=True)]
        return round(abs(sum(logs)), 6), round(sum(log * log for log in logs), 6)

    return min(table, key=distance)


def rows_of(config: Tiled) -> int:
    """The axis of the tile along which the instruction's fixed side lies: 0 for m, 1 for n."""
    return 1 if config.transpose_c else 0


def columns_of(config: Tiled) -> int:
    """The axis along which its flexible side lies."""
    return 1 - rows_of(config)


def usable_warp_tiles(config: Tiled, arch: ArchSpec) -> list[Triple]:
    """Warp tiles of the arch for this pipeline; if it is specialised, those in this orientation that suit the layout:
    an operand that does not lie along k is read in panels as wide as the swizzle.
    """
    tiles = arch.warp_tiles_for(config.table_key, config.pipeline)
    if not is_specialised(config, arch) or arch.bulk_copy is None:
        return list(tiles)
    axis = columns_of(config)
    along_k = config.letters[axis : axis + 1] == "rc"[axis] or size_of(config.a) == 1
    unit = 1 if along_k else arch.bulk_copy.swizzle_bytes // size_of(config.a)
    return [tile for tile in tiles if tile[1 - axis] == SIDE and tile[axis] % unit == 0]


def preferred_pipeline(names: Iterable[str]) -> str:
    """The general-purpose pipeline among ``names``."""
    known = list(names)
    return next((name for name in ("compv3", "mem") if name in known), known[0])


def text_of(sizes: Triple) -> str:
    return "x".join(map(str, sizes))


def with_extent(tile: Triple, axis: int, value: int) -> Triple:
    sizes = list(tile)
    sizes[axis] = value
    return sizes[0], sizes[1], sizes[2]
