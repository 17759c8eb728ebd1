"""Cuts of products into tiles: few and good, from the arch's own tables and capacities."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.tiles.tiled import GROUP_BYTES, Triple
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Epilogue, accumulator

__all__ = [
    "cpu_teams",
    "cpu_tiles",
    "cpu_warp_tiles",
    "offered_dtypes",
    "offered_traits",
    "table_key",
    "warp_tile_for",
]

_BLOCK_GROUPS = 512
"""Groups of 32 bits along k that a cache block holds: long enough to amortise C, short enough for a panel of B to stay
in L1.
"""
_SHARED_EXTENT = 2048
_STREAM_EXTENT = 512
_SLAB_ROWS = 168
"""Rows (columns) of a slab, where the staging budget allows: more would push the panels that pass by out of L2."""
_SLAB_SHARE = 0.5
"""Part of the staging budget that a slab may fill; the rest is for the panel that passes by, and C."""


def table_key(a: str, b: str = "") -> str:
    """The key of arch tables for A of dtype ``a`` and B of ``b`` (default: the same)."""
    return f"{a}_{b or a}_{accumulator(DType(a))}"


def offered_dtypes(arch: ArchSpec) -> list[DType]:
    """Element types of which the arch multiplies equal ones: what ``ANY`` stands for in declarations."""
    return [dtype for dtype in DType if dtype != DType.INT32 and arch.acc_dtype(dtype.value, dtype.value)]


def offered_traits(field: str, arch: ArchSpec, pipeline: str) -> list[Any]:
    """Likewise what the arch has of ``scheduler`` and ``epilogue`` for a pipeline; nothing if it lacks the pipeline."""
    if pipeline not in arch.pipelines:
        return []
    offer = arch.pipeline(pipeline)
    return list(offer.schedulers) if field == "scheduler" else [Epilogue(name) for name in offer.epilogues]


def cpu_warp_tiles(arch: ArchSpec, key: str, pipeline: str, count: int = 4) -> tuple[Triple, ...]:
    """The deepest dot product that the arch has for ``key``, in its ``count`` preferred shapes (table order)."""
    tiles = arch.warp_tiles_for(key, pipeline)
    deepest = max((tile[2] for tile in tiles), default=1)
    return tuple(tile for tile in tiles if tile[2] == deepest)[:count]


def cpu_tiles(arch: ArchSpec, pipeline: str, warp_tile: Triple, team: int = 1) -> tuple[tuple[Triple, Triple], ...]:
    """Cache blocks for a register tile, with the waves of ``team`` threads: first what suits tall problems, then what
    suits wide ones.

    The blocked pipelines share B among slabs of rows, or A among slabs of columns. ``mem`` streams A, or B. ``compv1``
    deals out rows, or columns. The waves of the first two lie along the side with the larger tile, which has room for
    them whatever their number.
    """
    mr, nr, depth = warp_tile
    k = _BLOCK_GROUPS * depth
    across, along = (team, 1, 1), (1, team, 1)
    if pipeline == "compv1":
        return (((mr * team, nr, k), across), ((mr, nr * team, k), along))
    if pipeline == "mem":
        return (((_down(_STREAM_EXTENT, mr * team), nr, k), across), ((mr, _down(_STREAM_EXTENT, nr * team), k), along))
    last = max(arch.caches.l3_bytes, arch.caches.l2_bytes)
    shared = min(_SHARED_EXTENT, max(last // (_BLOCK_GROUPS * GROUP_BYTES), 1)) if last else _SHARED_EXTENT
    budget = int(arch.lds_budget(pipeline)) // (_BLOCK_GROUPS * GROUP_BYTES)
    rows = min(int(budget * _SLAB_SHARE), _SLAB_ROWS)
    tall, wide = _down(shared, nr * team), _down(shared, mr * team)
    if pipeline not in arch.preshuffle_pipelines:
        return (((_down(rows, mr), tall, k), along), ((wide, _down(rows, nr), k), across))
    # Slabs of a pre-shuffled B lie ready: they need no staging, and with few rows of A fewer and longer blocks along k.
    wider, deeper = _down(budget - mr, nr), _down(budget // 2 - mr, nr)
    return (
        ((_down(rows, mr), tall, k), along),
        ((wide, wider, k), across),
        ((_down(wide // 2, mr * team), deeper, 2 * k), across),
    )


def _down(value: int, unit: int) -> int:
    """The largest multiple of ``unit`` up to ``value``, but at least one unit."""
    return max(value // unit, 1) * unit


def cpu_teams(arch: ArchSpec, units: int) -> tuple[int, ...]:
    """Sizes of teams worth trying: one thread, and the largest that the device has units for."""
    largest = max((wave[0] * wave[1] for wave in arch.waves if wave[0] * wave[1] <= max(units, 1)), default=1)
    return (1, largest) if largest > 1 else (1,)


def warp_tile_for(tiles: Iterable[Triple], part: tuple[int, int], depth: int) -> Triple | None:
    """The squarest and largest of the warp tiles that divide a wave's part of the output and the depth of the tile, and
    of its depths the greatest, which reads the longest vectors.
    """
    fitting = [tile for tile in tiles if not (part[0] % tile[0] or part[1] % tile[1] or depth % tile[2])]
    return max(fitting, key=lambda tile: (min(tile[:2]), tile[0] * tile[1], tile[2]), default=None)
