"""Rules on how a kernel computes: the kit's on tiles and their resources, and those on pre-shuffled B."""

# ruff: noqa: ARG001  (all rules have the same signature)
from __future__ import annotations

import math
from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig, Triple
from tilewright_gemm.rules.cuda import wave_groups
from tilewright_kit.config.rules import Violation, rule_of
from tilewright_kit.tiles.footprint.workgroup import (
    fits_registers,
    least_tile,
    size_of,
    staging_bytes,
    staging_limit,
    step,
)
from tilewright_kit.tiles.rules.resources import accumulators_fit_registers, shared_block, staging_budget
from tilewright_kit.tiles.rules.tiling import (
    buffering,
    is_positive,
    pipeline,
    positive_sizes,
    tile_divisibility,
    tile_minimum,
    trait,
    warp_tile_table,
    wave_table,
    workgroup_threads,
)

__all__ = ["RESOURCE_RULES", "SHAPE_RULES", "WORKGROUP_RULES"]

VECTOR_LOAD_BYTES = 16


@rule_of("cuda", "hip")
def preshuffle_layout(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU: pre-shuffled B was column-major and A is row-major."""
    packs = config.operation != GemmConfig.operation  # which reads a plain B
    if config.preshuffle and not packs and config.layout != "rcr":
        reason = "the pre-shuffle pipeline reads layout rcr only"
        yield Violation("preshuffle_layout", "layout", config.layout, reason, {"layout": "rcr"})


@rule_of("cuda", "hip")
def preshuffle_loads(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU: every thread of the pre-shuffle pipeline loads whole vectors of 16 bytes of A, and the waves' loads tile the
    block.
    """
    if not config.preshuffle or not is_positive(config):
        return
    reason = _load_fault(config, arch, config.tile)
    if reason:
        yield Violation("preshuffle_loads", "tile", config.tile, reason, _loading(config, arch))


def _loading(config: GemmConfig, arch: ArchSpec) -> dict[str, object]:
    """Another tile, if need be for fewer waves, which have more registers each."""
    fewer = sorted((wave for wave in arch.waves if math.prod(wave) < config.waves), key=math.prod, reverse=True)
    for wave in (config.wave, *fewer):
        tile = _loadable(config.replace(wave=wave), arch)
        if tile:
            return {"tile": tile} if wave == config.wave else {"wave": wave, "tile": tile}
    return {}


def _loadable(config: GemmConfig, arch: ArchSpec) -> Triple | None:
    """The nearest tile whose loads are whole vectors and that fits; None if there is none within reach."""
    m, n, k = config.tile
    unit, limit = least_tile(config, arch), staging_limit(config, arch)
    shapes = [(rows * unit[0], depth * unit[2]) for rows in range(1, 33) for depth in range(1, 9)]
    shapes.sort(key=lambda shape: (abs(math.log2(shape[0] / m)) + abs(math.log2(shape[1] / k)), shape))
    for columns in dict.fromkeys((n, max(n // 2 // unit[1], 1) * unit[1], unit[1])):
        for rows, depth in shapes:
            tile = (rows, columns, depth)
            if staging_bytes(config, arch, tile) > limit or _load_fault(config, arch, tile):
                continue
            if config.pipeline not in arch.pipelines or fits_registers(config.replace(tile=tile), arch):
                return tile
    return None


def _load_fault(config: GemmConfig, arch: ArchSpec, tile: Triple) -> str:
    element, wave_size = size_of(config.a), arch.wave_size
    repeat = tile[0] // step(config)[0]
    loaded = config.warp_tile[0] * config.warp_tile[2] * element * repeat
    if loaded // wave_size % VECTOR_LOAD_BYTES or loaded % wave_size:
        return f"a thread would load {loaded / wave_size:g} bytes of A, not a multiple of {VECTOR_LOAD_BYTES}"
    vector = VECTOR_LOAD_BYTES // element
    if tile[2] % vector:
        return f"tile_k {tile[2]} is not a multiple of the {vector} elements of a vector load"
    across = tile[2] // vector
    if wave_size % across:
        return f"{across} vector loads along k do not divide a wave of {wave_size}"
    rows = wave_size // across * config.waves
    return f"the waves load {rows} rows at a time, which does not divide tile_m {tile[0]}" if tile[0] % rows else ""


def double_buffer(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Double buffering of LDS follows from the pipeline."""
    return buffering("double_buffer", config.double_buffer, config, arch)


SHAPE_RULES = (
    positive_sizes,
    pipeline,
    trait,
    wave_table,
    warp_tile_table,
)

WORKGROUP_RULES = (wave_groups, workgroup_threads)

RESOURCE_RULES = (
    accumulators_fit_registers,
    tile_minimum,
    tile_divisibility,
    preshuffle_layout,
    preshuffle_loads,
    staging_budget,
    shared_block,
    double_buffer,
)
