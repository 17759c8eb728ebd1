"""Rules on kernels with packed 4-bit weights (``config.int4`` has the contract)."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_gemm.config.block_scales import is_block_scaled
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.int4 import DTYPES, GROUP_K, INT4_PIPELINE, INT4_RING
from tilewright_gemm.rules.block_scales import factor_registers
from tilewright_gemm.vocabulary import ScaleA, ScaleB
from tilewright_kit.config.rules import Violation
from tilewright_kit.tiles.footprint.hip import hip_crowding
from tilewright_kit.tiles.footprint.workgroup import accumulator_limit, accumulators_per_thread, least_tile
from tilewright_kit.tiles.tables import with_extent

__all__ = ["int4_operands", "int4_registers", "int4_steps"]

_SUMS_OF_FP8, _COLUMNS = 48, 16
_PLAIN: dict[str, object] = {"scale_b": ScaleB.NONE}


def int4_operands(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:  # noqa: ARG001
    """Packed weights are columns beside an A of a type that holds them; no other packing or scale goes with them."""
    if not config.int4:
        return
    value = config.scale_b.value
    if config.dtype_a not in DTYPES:
        reason = f"4-bit weights are multiplied with {', '.join(DTYPES)}"
        yield Violation("int4_operands", "scale_b", value, reason, _PLAIN)
    elif config.b != config.a:
        reason = "4-bit weights are multiplied in the type of A"
        yield Violation("int4_operands", "dtype_b", config.b, reason, {"dtype_b": ""})
    elif config.c == "int32":
        reason = "scaled sums are no integers"
        yield Violation("int4_operands", "dtype_c", config.c, reason, {"dtype_c": "fp16"})
    elif config.layout[1:2] != "c":
        reason = "the columns of 4-bit weights are contiguous"
        fix: dict[str, object] = {"layout": f"{config.layout[:1]}c{config.layout[2:]}"}
        yield Violation("int4_operands", "layout", config.layout, reason, fix)
    elif config.preshuffle:
        reason = "4-bit weights are not packed a second time"
        yield Violation("int4_operands", "preshuffle", True, reason, {"preshuffle": False})
    elif is_block_scaled(config.scale_a, ScaleB.NONE):
        reason = "4-bit weights go with factors of tensors and rows of A"
        yield Violation("int4_operands", "scale_a", config.scale_a.value, reason, {"scale_a": ScaleA.ROW})


def int4_steps(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Sums of GPUs end where a group ends, and values are unpacked in the pipelines that do so."""
    if not config.int4 or config.pipeline not in arch.pipelines or config.warp_tile[2] < 1:
        return
    if config.pipeline != INT4_PIPELINE and not (config.pipeline == INT4_RING and arch.kind == "cuda"):
        reason = f"4-bit weights are not unpacked in pipeline {config.pipeline} of {arch.id}"
        fix: dict[str, object] = {
            "pipeline": INT4_PIPELINE, "scheduler": arch.pipeline(INT4_PIPELINE).schedulers[0], "stages": 0,
            "cluster": (1, 1, 1), "transpose_c": False, "num_wave_groups": 1,
        }  # fmt: skip
        yield Violation("int4_steps", "pipeline", config.pipeline, reason, fix)
    elif arch.kind == "cpu":
        return
    elif config.pipeline == INT4_RING:
        yield from _ring(config)
    elif config.tile[2] < 1 or GROUP_K % config.tile[2]:
        reason = f"a group of {GROUP_K} along k is whole steps"
        yield Violation("int4_steps", "tile", config.tile, reason, {"tile": with_extent(config.tile, 2, GROUP_K)})


def _ring(config: GemmConfig) -> Iterator[Violation]:
    if config.layout[:1] != "r":
        reason = f"pipeline {INT4_RING} reads lines of A along k"
        fix: dict[str, object] = {"pipeline": INT4_PIPELINE, "stages": 0}
        yield Violation("int4_steps", "pipeline", config.pipeline, reason, fix)
    elif config.tile[2] not in (GROUP_K, 2 * GROUP_K):
        reason = f"a step of pipeline {INT4_RING} is one or two groups of {GROUP_K} along k"
        k = GROUP_K if config.tile[2] < 2 * GROUP_K else 2 * GROUP_K
        yield Violation("int4_steps", "tile", config.tile, reason, {"tile": with_extent(config.tile, 2, k)})
    elif config.tile[1] % max(config.wave[1] * _COLUMNS, 1):
        reason = f"a wave of pipeline {INT4_RING} has whole {_COLUMNS} columns"
        unit = config.wave[1] * _COLUMNS
        n = max(config.tile[1] // unit, 1) * unit
        yield Violation("int4_steps", "tile", config.tile, reason, {"tile": with_extent(config.tile, 1, n)})


def int4_registers(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU: the sums of a group fit registers beside those of all groups."""
    known = config.pipeline in arch.pipelines and arch.instruction(config.table_key, config.warp_tile) is not None
    if not config.int4 or arch.kind == "cpu" or not known or min(*config.tile, *config.wave) < 1:
        return
    own, limit = _registers(config, arch)
    if 2 * own > limit:
        reason = f"a thread would hold {own} sums and as many of a group; it has room for {limit}"
        yield Violation("int4_registers", "tile", config.tile, reason, _fitting(config, arch))


def _registers(config: GemmConfig, arch: ArchSpec) -> tuple[int, int]:
    limit = accumulator_limit(config, arch) - hip_crowding(config, arch)
    if arch.kind == "cuda" and config.a == "fp8":  # whose products are made of wider ones
        limit = min(limit, 2 * _SUMS_OF_FP8)
    own = accumulators_per_thread(config, arch)
    return own, limit - factor_registers(own, arch)


def _fitting(config: GemmConfig, arch: ArchSpec) -> dict[str, object]:
    """A smaller tile; plain weights where there is none."""
    smaller: GemmConfig | None = config
    while smaller is not None:
        own, limit = _registers(smaller, arch)
        if 2 * own <= limit:
            return {"tile": smaller.tile}
        smaller = _halved(smaller, arch)
    return dict(_PLAIN)


def _halved(config: GemmConfig, arch: ArchSpec) -> GemmConfig | None:
    """Half of the tile along the side of more warp tiles."""
    unit = least_tile(config, arch)
    for axis in sorted((0, 1), key=lambda axis: -(config.tile[axis] // unit[axis])):
        half = config.tile[axis] // 2 // unit[axis] * unit[axis]
        if half:
            return config.replace(tile=with_extent(config.tile, axis, half))
    return None
