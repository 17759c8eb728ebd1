"""Choices that ``ANY`` stands for in declarations of convolution kernels: values that suit the arch, from its own
tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.candidates.shapes import shape_warp_tiles
from tilewright_grouped_conv.config.config import Triple
from tilewright_grouped_conv.config.pipelines import offered_pipelines
from tilewright_grouped_conv.vocabulary import CHANNELS_LAST
from tilewright_kit.tiles.choices import (
    cpu_tiles,
    cpu_warp_tiles,
    offered_dtypes,
    offered_traits,
    table_key,
    warp_tile_for,
)
from tilewright_kit.types.dtypes import DType

__all__ = ["first_offered", "offered"]


def offered(field: str, arch: ArchSpec, partial: Mapping[str, Any]) -> Iterable[Any] | None:
    """Values for a field, given those that are known. None: flags and enumerations take all their values."""
    pipeline = str(partial.get("pipeline", ""))
    if field == "dtype_in":
        return offered_dtypes(arch)
    if field == "layout":
        return CHANNELS_LAST
    if field == "ndim":
        return (1, 2, 3)
    if field == "pipeline":
        return offered_pipelines(arch)
    if field in ("epilogue", "scheduler"):
        return offered_traits(field, arch, pipeline)
    if field == "wave":
        return arch.waves
    if field in ("tile", "warp_tile") and arch.kind == "cpu":
        return _cpu_shapes(field, arch, partial, pipeline)
    return _warp_tiles(arch, partial, pipeline) if field == "warp_tile" else None


def first_offered(field: str, arch: ArchSpec, partial: Mapping[str, Any]) -> Iterable[Any] | None:
    """Only the preferred of these values."""
    values = offered(field, arch, partial)
    return None if values is None else tuple(values)[:1]


def _cpu_shapes(field: str, arch: ArchSpec, partial: Mapping[str, Any], pipeline: str) -> Iterable[Triple]:
    """Tiles come before warp tiles in a configuration, so each offers what suits any of the preferred warp tiles."""
    if pipeline not in arch.pipelines:
        return ()
    preferred = cpu_warp_tiles(arch, _key_of(partial), pipeline)
    # Images that are read in place want few rows, each of which has a pointer.
    warps = list(dict.fromkeys((*preferred[:1], *sorted(preferred, key=lambda tile: tile[1])[-1:])))
    if field == "tile":
        return [cpu_tiles(arch, pipeline, warp)[0][0] for warp in warps]
    tile = partial.get("tile")
    return [warp for warp in warps if tile is None or cpu_tiles(arch, pipeline, warp)[0][0] == tile]


def _warp_tiles(arch: ArchSpec, partial: Mapping[str, Any], pipeline: str) -> Iterable[Triple]:
    """The one that suits a tile and its waves best."""
    if pipeline not in arch.pipelines:
        return ()
    tile, wave = partial["tile"], partial["wave"]
    part = (tile[0] // max(wave[0], 1), tile[1] // max(wave[1], 1))
    found = warp_tile_for(shape_warp_tiles(arch, _key_of(partial), pipeline), part, tile[2])
    return () if found is None else (found,)


def _key_of(partial: Mapping[str, Any]) -> str:
    dtype = DType(partial.get("dtype_in", DType.FP16))
    return table_key(dtype.value, str(partial.get("dtype_wei", "")))
