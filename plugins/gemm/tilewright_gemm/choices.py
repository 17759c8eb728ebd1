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
from tilewright_gemm.packing import GROUP_BYTES
from tilewright_gemm.words import LAYOUTS, Epilogue, accumulator
from tilewright_kit.dtypes import DType

__all__ = ["cpu_teams", "cpu_tiles", "cpu_warp_tiles", "offered", "table_key"]

_BLOCK_GROUPS = 512
"""Groups of 32 bits along k that a cache block holds: long enough to amortise C, short enough for a panel of B to stay
in L1.
"""
_SHARED_COLUMNS = 2048
_SLAB_SHARE = 0.5
"""Part of the staging budget that a slab fills; the rest is for the panel that passes by, and C."""
_GPU_TILES = (64, 128, 192, 256)


def table_key(a: str, b: str = "") -> str:
    """The key of arch tables for A of dtype ``a`` and B of ``b`` (default: the same)."""
    return f"{a}_{b or a}_{accumulator(DType(a))}"


def cpu_warp_tiles(arch: ArchSpec, key: str, pipeline: str, count: int = 4) -> tuple[Triple, ...]:
    """The deepest dot product that the arch has for ``key``, in its ``count`` preferred shapes (table order)."""
    tiles = arch.warp_tiles_for(key, pipeline)
    deepest = max((tile[2] for tile in tiles), default=1)
    return tuple(tile for tile in tiles if tile[2] == deepest)[:count]


def cpu_tiles(arch: ArchSpec, pipeline: str, warp_tile: Triple, team: int = 1) -> tuple[Triple, ...]:
    """Cache blocks for a register tile: one that shares B among rows of slabs (tall problems), one that shares A (wide
    ones).

    Slabs fill half of the staging budget, the shared side 2048 rows or columns.
    """
    mr, nr, depth = warp_tile
    k = _BLOCK_GROUPS * depth
    if pipeline in ("mem", "compv1"):
        return ((mr * team, nr * team, k),)
    rows = int(arch.lds_budget(pipeline) * _SLAB_SHARE) // (_BLOCK_GROUPS * GROUP_BYTES)
    last = max(arch.caches.l3_bytes, arch.caches.l2_bytes)
    shared = min(_SHARED_COLUMNS, max(last // (_BLOCK_GROUPS * GROUP_BYTES), 1)) if last else _SHARED_COLUMNS
    across, along = mr * team, nr * team
    tall = (max(rows // across, 1) * across, max(shared // along, 1) * along, k)
    wide = (max(shared // across, 1) * across, max(rows // along, 1) * along, k)
    return (tall, wide)


def cpu_teams(arch: ArchSpec, units: int) -> tuple[int, ...]:
    """Sizes of teams worth trying: one thread, and the largest power of two that the device has units for."""
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
        yield from (wave for wave in arch.waves if wave[0] == 1)
    else:
        for warp_tile in warp_tiles[:1] if pipeline in ("mem", "compv1") else warp_tiles:
            yield from cpu_tiles(arch, pipeline, warp_tile)


def _key_of(partial: Mapping[str, Any]) -> str:
    dtype = partial.get("dtype_a", DType.FP16)
    return table_key(DType(dtype).value, str(partial.get("dtype_b", "")))
