"""Which algorithms are worth considering on an arch: what ``ANY`` in a declaration stands for, and where candidates
come from.

Few and good: a plan that is not cached predicts every candidate. Everything is derived from the arch's own tables and
capacities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_gemm.config import Triple
from tilewright_gemm.words import LAYOUTS, Epilogue, accumulator
from tilewright_kit.dtypes import DType
from tilewright_kit.tiles.tiled import GROUP_BYTES

__all__ = ["cpu_teams", "cpu_tiles", "cpu_warp_tiles", "offered", "table_key"]

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
_SET_TEAMS = (1, 2, 4, 8, 16, 32, 64)
"""Teams that kernel sets list; plans use whatever size fits the device."""
_GPU_TILES = (64, 128, 192, 256)


def table_key(a: str, b: str = "") -> str:
    """The key of arch tables for A of dtype ``a`` and B of ``b`` (default: the same)."""
    return f"{a}_{b or a}_{accumulator(DType(a))}"


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


def offered(field: str, arch: ArchSpec, partial: Mapping[str, Any]) -> Iterable[Any] | None:
    """What ``ANY`` stands for in declarations of GEMM kernels."""
    if field == "dtype_a":
        return [dtype for dtype in DType if dtype != DType.INT32 and arch.acc_dtype(dtype.value, dtype.value)]
    if field == "layout":
        return LAYOUTS
    if field == "pipeline":
        shuffled = bool(partial.get("preshuffle"))
        return [name for name in arch.pipelines if (name in arch.preshuffle_pipelines) == shuffled]
    if field in ("epilogue", "scheduler"):
        return _traits(field, arch, str(partial.get("pipeline", "")))
    if field in ("tile", "wave", "warp_tile"):
        return _cpu_shapes(field, arch, partial) if arch.kind == "cpu" else _gpu_shapes(field, arch, partial)
    return None


def _traits(field: str, arch: ArchSpec, pipeline: str) -> list[Any]:
    if pipeline not in arch.pipelines:
        return []
    found = arch.pipeline(pipeline)
    return list(found.schedulers) if field == "scheduler" else [Epilogue(name) for name in found.epilogues]


def _gpu_shapes(field: str, arch: ArchSpec, partial: Mapping[str, Any]) -> Iterable[Triple]:
    if field == "wave":
        return arch.waves
    if field == "tile":
        return [(m, n, k) for m in _GPU_TILES for n in _GPU_TILES for k in _GPU_TILES]
    pipeline = str(partial.get("pipeline", ""))
    return arch.warp_tiles_for(_key_of(partial), pipeline) if pipeline in arch.pipelines else ()


def _cpu_shapes(field: str, arch: ArchSpec, partial: Mapping[str, Any]) -> Iterator[Triple]:
    # Tile and wave come before the warp tile in a configuration, so each offers what suits any of the preferred warp
    # tiles; rules drop the rest.
    pipeline, key = str(partial.get("pipeline", "")), _key_of(partial)
    if pipeline not in arch.pipelines:
        return
    warp_tiles = cpu_warp_tiles(arch, key, pipeline)
    if field == "warp_tile":
        yield from warp_tiles[:1] if pipeline in ("mem", "compv1") else warp_tiles
    elif field == "wave":
        yield from (wave for wave in arch.waves if wave[0] == 1 and wave[1] in _SET_TEAMS)
    else:
        for warp_tile in warp_tiles[:1] if pipeline in ("mem", "compv1") else warp_tiles:
            yield from (tile for tile, _ in cpu_tiles(arch, pipeline, warp_tile))


def _key_of(partial: Mapping[str, Any]) -> str:
    dtype = partial.get("dtype_a", DType.FP16)
    return table_key(DType(dtype).value, str(partial.get("dtype_b", "")))
