"""Rules on kernels with block scales (``config.block_scales`` has the contract)."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_gemm.config.block_scales import (
    DTYPES,
    SCALES,
    block_of,
    block_word,
    columns_of_block,
    has_exponents,
    takes_exponents,
)
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.vocabulary import ScaleA, ScaleB, ScaleBlock
from tilewright_kit.config.rules import Violation
from tilewright_kit.tiles.footprint.hip import hip_crowding
from tilewright_kit.tiles.footprint.workgroup import (
    accumulator_limit,
    accumulators_per_thread,
    is_specialised,
    least_tile,
)
from tilewright_kit.tiles.tables import columns_of, with_extent

__all__ = ["block_registers", "block_scales", "block_steps", "factor_registers"]

_CPU_PIPELINE = "compv3"
_MOST_SUMS, _CROWDED = 192, 192
"""Sums of a lane from beyond which exponents have no room beside them, and what then counts for them."""
_CHUNK, _COLUMN_REGISTERS = 32, 8
"""Columns whose factors a thread holds one of, and registers for those that it needs of them at a time."""
_WHOLE = {ScaleA.BLOCK_1X128: ScaleB.BLOCK_128X128, ScaleA.BLOCK_1X32: ScaleB.BLOCK_1X32}
_PLAIN: dict[str, object] = {"scale_a": ScaleA.NONE, "scale_b": ScaleB.NONE}


def block_scales(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:  # noqa: ARG001
    """Scales of blocks are for both operands, which are 8-bit floats and not packed ahead of time."""
    if not config.block_scaled:
        return
    if config.dtype_a not in DTYPES or config.b not in DTYPES:
        reason = f"blocks have scales in products of {' and '.join(DTYPES)}"
        yield Violation("block_scales", "scale_b", config.scale_b.value, reason, _PLAIN)
    elif config.preshuffle:
        yield Violation("block_scales", "preshuffle", True, "a pre-shuffled B has no block scales", _PLAIN)
    elif block_word(config.scale_a, config.scale_b) is ScaleBlock.NONE:
        whole = config.scale_b if columns_of_block(config.scale_b) else _WHOLE.get(config.scale_a, ScaleB.BLOCK_1X32)
        reason = f"scale_a {config.scale_a} does not go together with scale_b {config.scale_b}"
        own = next((a for a, b in SCALES.values() if b is whole), ScaleA.BLOCK_1X32)
        fix: dict[str, object] = {"scale_a": own, "scale_b": whole}
        yield Violation("block_scales", "scale_b", config.scale_b.value, reason, fix)


def block_steps(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Sums end where a block of k ends. On CPUs values are scaled when they are packed, to fp32."""
    if not config.block_scaled or config.pipeline not in arch.pipelines or config.warp_tile[2] < 1:
        return
    k = config.tile[2]
    if arch.kind == "cpu":
        if config.pipeline != _CPU_PIPELINE and _CPU_PIPELINE in arch.pipelines:
            reason = f"values are scaled when they are packed, in pipeline {_CPU_PIPELINE}"
            fix: dict[str, object] = {
                "pipeline": _CPU_PIPELINE, "scheduler": arch.pipeline(_CPU_PIPELINE).schedulers[0],
            }  # fmt: skip
            yield Violation("block_steps", "pipeline", config.pipeline, reason, fix)
        elif config.warp_tile[2] != 1:
            m, n, _ = config.warp_tile
            reason = "scaled values are multiplied in fp32"
            yield Violation("block_steps", "warp_tile", config.warp_tile, reason, {"warp_tile": (m, n, 1)})
        return
    if has_exponents(config.scale_b):
        yield from _exponent_steps(config, arch)
        return
    specialised, block = is_specialised(config, arch), block_of(ScaleB.BLOCK_1X128).k
    if config.scheduler == "pingpong":
        reason = "consumers that take turns would leave the matrix unit idle while they scale"
        fix = {"scheduler": arch.pipeline(config.pipeline).schedulers[0], "num_wave_groups": 1}
        yield Violation("block_steps", "scheduler", config.scheduler, reason, fix)
    elif k != block if specialised else k < 1 or block % k:
        reason = f"a block of {block} along k is {'one step' if specialised else 'whole steps'}"
        yield Violation("block_steps", "tile", config.tile, reason, {"tile": with_extent(config.tile, 2, block)})


def _exponent_steps(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Blocks of 32 are steps of the portable pipelines, but for instructions that take their factors."""
    k, block = config.tile[2], block_of(ScaleB.BLOCK_1X32).k
    if is_specialised(config, arch):
        reason = f"pipeline {config.pipeline} scales blocks of 128 along k"
        fix: dict[str, object] = {"scale_a": ScaleA.BLOCK_1X128, "scale_b": ScaleB.BLOCK_1X128}
        yield Violation("block_steps", "scale_b", config.scale_b.value, reason, fix)
    elif (k < 1 or block % k) and not takes_exponents(config, arch):
        tile = with_extent(config.tile, 2, block)
        reason = f"a block of {block} along k is whole steps, where no instruction takes its factors"
        fix = {"tile": tile}
        if block % config.warp_tile[2]:
            depths = [item for item in arch.warp_tiles_for(config.table_key, config.pipeline) if block % item[2] == 0]
            fix |= {"warp_tile": depths[0]} if depths else _PLAIN
        yield Violation("block_steps", "tile", config.tile, reason, fix)


def block_registers(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """GPU: the sums of a block fit registers beside those of all blocks; in ``ws`` those of one instruction."""
    known = config.pipeline in arch.pipelines and arch.instruction(config.table_key, config.warp_tile) is not None
    if not config.block_scaled or arch.kind == "cpu" or not known or min(*config.tile, *config.wave) < 1:
        return
    own, block, limit = _registers(config, arch)
    if own + block > limit:
        reason = f"a thread would hold {own} sums and {block} values of a block; it has room for {limit}"
        yield Violation("block_registers", "tile", config.tile, reason, _fitting(config, arch))


def _registers(config: GemmConfig, arch: ArchSpec) -> tuple[int, int, int]:
    """Registers of a thread for the tile's sums, for those of a block and their factors, and the room for both."""
    own, columns = accumulators_per_thread(config, arch), config.warp_tile[columns_of(config)]
    block = own + factor_registers(own, arch)
    if has_exponents(config.scale_b) and takes_exponents(config, arch):
        block = _exponent_registers(config, own)
    if is_specialised(config, arch):
        each = config.transpose_c or config.scale_b is ScaleB.BLOCK_1X128
        block = columns // 2 + (_COLUMN_REGISTERS + 2 * -(-columns // _CHUNK) if each else 0)
    return own, block, accumulator_limit(config, arch) - hip_crowding(config, arch)


def _exponent_registers(config: GemmConfig, sums: int) -> int:
    """For exponents and where they lie: measured with clang 22. More than 192 sums are crowded (``amd/step.hpp``): the
    compiler orders their products as it likes, and spills up to 161 registers beside exponents.
    """
    lines = sum(config.tile[axis] // config.wave[axis] // config.warp_tile[axis] for axis in (0, 1))
    return (_CROWDED if sums > _MOST_SUMS else 0) + (8 * lines if config.layout.startswith("rc") else 4 * lines + 64)


def factor_registers(sums: int, arch: ArchSpec) -> int:
    """For factors and their addresses on AMD GPUs, beside so many sums of a block. Clang 22 fetches all of them ahead:
    without this, kernels with 64 sums a lane spill up to 41 registers of RDNA, with 128 up to 48 of CDNA, with 192 180.
    """
    return sums + 40 if arch.kind == "hip" else 0


def _fitting(config: GemmConfig, arch: ArchSpec) -> dict[str, object]:
    """A smaller tile, of smaller warp tiles if need be; no scales where there is none."""
    smaller: GemmConfig | None = config
    while smaller is not None:
        own, block, limit = _registers(smaller, arch)
        if own + block <= limit:
            return {"tile": smaller.tile, "warp_tile": smaller.warp_tile}
        smaller = _halved(smaller, arch)
    return dict(_PLAIN)


def _halved(config: GemmConfig, arch: ArchSpec) -> GemmConfig | None:
    """Half of the tile along the side of more warp tiles, or half of the instruction's flexible side."""
    unit, columns = least_tile(config, arch), columns_of(config)
    for axis in sorted((0, 1), key=lambda axis: -(config.tile[axis] // unit[axis])):
        half = config.tile[axis] // 2 // unit[axis] * unit[axis]
        if half:
            return config.replace(tile=with_extent(config.tile, axis, half))
    half = config.warp_tile[columns] // 2
    warp = with_extent(config.warp_tile, columns, half)
    if is_specialised(config, arch) and arch.instruction(config.table_key, warp) is not None:
        return config.replace(warp_tile=warp, tile=with_extent(config.tile, columns, half * config.wave[columns]))
    return None
