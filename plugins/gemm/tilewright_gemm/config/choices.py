"""Algorithms worth considering on an arch: values of ``ANY`` in declarations, and where candidates
come from.

Few and good: a plan that is not cached predicts every candidate. Everything is derived from the arch's own tables and
capacities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import Triple
from tilewright_gemm.vocabulary import LAYOUTS
from tilewright_kit.tiles.choices import cpu_teams, cpu_tiles, cpu_warp_tiles, offered_dtypes, offered_traits, table_key
from tilewright_kit.types.dtypes import DType

__all__ = ["cpu_teams", "cpu_tiles", "cpu_warp_tiles", "offered", "table_key"]

_SET_TEAMS = (1, 2, 4, 8, 16, 32, 64)
"""Teams that kernel sets list; plans use whatever size fits the device."""
_GPU_TILES = (64, 128, 192, 256)


def offered(field: str, arch: ArchSpec, partial: Mapping[str, Any]) -> Iterable[Any] | None:
    """Values that ``ANY`` stands for in declarations of GEMM kernels."""
    if field == "dtype_a":
        return offered_dtypes(arch)
    if field == "layout":
        return LAYOUTS
    if field == "pipeline":
        shuffled = bool(partial.get("preshuffle"))
        return [name for name in arch.pipelines if (name in arch.preshuffle_pipelines) == shuffled]
    if field in ("epilogue", "scheduler"):
        return offered_traits(field, arch, str(partial.get("pipeline", "")))
    if field in ("tile", "wave", "warp_tile"):
        return _cpu_shapes(field, arch, partial) if arch.kind == "cpu" else _gpu_shapes(field, arch, partial)
    return None


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
