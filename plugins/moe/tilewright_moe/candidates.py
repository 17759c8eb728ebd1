"""Kernels for a problem, reasons against others, and their times: GEMM's, for experts with a typical number of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilewright_arch import ArchSpec
from tilewright_gemm.fusion import (
    PIPELINE,
    GemmConfig,
    GemmProblem,
    Shape,
    gemm_candidates,
    gemm_mismatches,
    predict_gemm,
)
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Candidates, Prediction
from tilewright_kit.selection.candidates import Verdicts, shortlist
from tilewright_kit.tiles.footprint.workgroup import is_specialised, shared_bytes, stages_of
from tilewright_moe.config import RULES, MoeConfig, algorithm, fused_results, fused_with
from tilewright_moe.plan import beside_bytes, most_tiles
from tilewright_moe.problem import MoeProblem

__all__ = ["MOST_EXPERTS", "moe_candidates", "moe_mismatches", "predict_moe", "with_room"]

MOST = 32
"""Candidates of a GPU."""
_FEW_REGISTERS, _STAGED_REGISTERS = 256, 32
"""Registers of a lane of RDNA, and those that a step may take of them; half where the vector unit multiplies."""
_TALL, _SIDE = 96, 128
"""Rows of transposed tiles with factors of blocks, and sides of others for fewer rows than two tiles."""
_FLAT, _HALF_HIGH, _SHORT = Shape((64, 256), (1, 2)), (80, 256), 4096
"""The cut of products of 8-bit floats with factors for about 128 rows, a transposed one that is as fast, and faster
where K is no more than so many elements.
"""
_BLOCK_SUMS = 32
"""Sums of a thread that leave room for as many of a block, beside the state of experts."""
MOST_EXPERTS = 1024
"""Experts whose rows the warp-specialised kernels keep in shared memory."""
_LARGEST = 2**31 - 1
_HEIGHTS = (8, 16, 32, 64, 96, 128, 160, 192, 256)
"""Rows of transposed tiles of the warp-specialised pipeline."""
_DEEP = 64
"""Rows up to which tiles of 256 columns leave room for a ring that is deep enough."""
_RANGED = (8, 16, 32, 64)
"""Rows of transposed tiles whose consumers find ranges of blocks."""
_IN_PLACE_BYTES = 1 << 20
"""Packed rows of one thread of a CPU's pipeline for small products, at most."""

_verdicts = Verdicts(RULES)


def _plain(problem: MoeProblem, config: MoeConfig) -> GemmConfig:
    """GEMM's kernel of the same algorithm for the typical batch."""
    fields = {name: getattr(config, name) for name in GemmConfig.field_names()}
    return GemmConfig(**{**fields, "batched": problem.busy_experts > 1})


def moe_candidates(problem: MoeProblem, device: DeviceInfo) -> Candidates[MoeConfig]:
    """GEMM's kernels for experts with a typical number of rows, or with somewhat more."""
    steps = (fused_with(problem, config, device.arch) for config in _algorithms(problem, device))
    made = (config for config in steps if _suits(problem, config, device.arch))
    asked = list(dict.fromkeys(with_room(problem, config, device.arch) for config in made))
    found = Candidates(asked)
    if device.arch.kind != "cpu":
        found = shortlist(asked, MOST, lambda config: predict_moe(problem, config, device))
    return found.kept(lambda config: _verdicts.allows(config, device) and not moe_mismatches(problem, config, device))


def _algorithms(problem: MoeProblem, device: DeviceInfo) -> Iterator[MoeConfig]:
    kinds = [replace(problem.typical, split_k=1)]
    if device.arch.kind != "cpu":
        yield from _tall_shapes(problem, device)
        kinds.append(replace(_uneven(problem, 2), split_k=1))
        # Where the copy engine reaches the operands GEMM proposes few of the kernels that need none.
        kinds += [replace(kind, alignment=max(item.desc.dtype.bytes for item in kind.tensors)) for kind in kinds]
    for kind in kinds:
        yield from _of(kind, device)


def with_room(problem: MoeProblem, config: MoeConfig, arch: ArchSpec) -> MoeConfig:
    """The kernel, with a stage less where the table of experts would not fit beside all that there are."""
    if not is_specialised(config, arch) or config.stages or _fits(problem, config, arch):
        return config
    return config.replace(stages=stages_of(config, arch) - 1)


def _fits(problem: MoeProblem, config: MoeConfig, arch: ArchSpec) -> bool:
    return shared_bytes(config, arch) + beside_bytes(problem, config) <= arch.lds_bytes


def _uneven(problem: MoeProblem, deviations: int) -> GemmProblem:
    """The typical batch with more rows: those that are routed at random spread by the root of their number."""
    rows = problem.typical_rows
    return problem.product(max(min(rows + deviations * math.isqrt(rows), problem.rows), 1), problem.busy_experts)


def _tall_shapes(problem: MoeProblem, device: DeviceInfo) -> Iterator[MoeConfig]:
    """Transposed tiles of Hopper with room for all rows of most experts, so that weights are read once."""
    if PIPELINE not in device.arch.pipelines:
        return
    kind = problem.typical
    for deviations in (0, 1, 2):
        rows = _uneven(problem, deviations).m
        heights = _RANGED if problem.quantised else _HEIGHTS
        height = next((height for height in heights if height >= rows), heights[-1])
        cuts = [
            Shape((height, columns), (1, 2), swapped=True) for columns in ((128, 256) if height <= _DEEP else (128,))
        ]
        if kind.block_scaled and rows > _TALL:
            cuts += [_FLAT, Shape(_HALF_HIGH, (1, 2), swapped=True)]
        for cut in cuts:
            shape = cut.fields(kind.dtype_a)
            promote = shape["tile"][2] // shape["warp_tile"][2] if kind.dtype_a.bytes == 1 else 0
            plain = kind.fast_accumulation or kind.block_scaled
            yield MoeConfig(
                dtype_a=kind.dtype_a,
                dtype_b=kind.dtype_b.value,
                dtype_c=kind.dtype_c.value,
                layout=kind.layout,
                scale_a=kind.scale_a,
                scale_b=kind.scale_b,
                promote=0 if plain else promote,
                **shape,
            )


def _of(kind: GemmProblem, device: DeviceInfo) -> Iterator[MoeConfig]:
    stays = device.arch.kind != "cpu"
    for config in gemm_candidates(kind, device):
        made = algorithm(config).replace(cluster=(1, 1, 1))
        if _is_crowded(made, device.arch):
            continue
        yield made.replace(persistent=True) if stays else made


def _suits(problem: MoeProblem, config: MoeConfig, arch: ArchSpec) -> bool:
    """True if the pipeline computes the steps behind the sums, and neither scales for long nor spills: two steps of a
    main loop beside 32 sums of a thread, as many of a block and results in fp8 leave no registers, and transposed tiles
    of 48 rows spill 4 bytes.
    """
    if any(fused_results(config, arch)):
        return False
    if is_specialised(config, arch):
        ranged = config.tile[0] in _RANGED or not config.transpose_c
        return (ranged or not config.quantised) and not _scales_long(problem.typical, config, arch)
    return not (config.block_scaled and config.quantised and config.pipeline == "compv3" and arch.kind == "cuda")


def _scales_long(kind: GemmProblem, config: MoeConfig, arch: ArchSpec) -> bool:
    """True for tiles of ``ws`` whose consumers scale for longer than the model says. Measured on one H200, 256 experts
    with 128 rows each, K of 7168 and 2048, over the least: 1.19 and 1.23 with 64x256, 1.22 and 1.21 with transposed
    80x256, 1.30 and 1.33 with 128x128, 1.3 to 1.4 with 160x128 transposed, 1.4 to 2.2 with others.
    """
    if not (kind.block_scaled and is_specialised(config, arch)) or kind.m <= _TALL:
        return False
    cut = config.tile[:2]
    if config.transpose_c:
        return cut != _HALF_HIGH or kind.k > _SHORT
    return kind.m < 2 * _SIDE and max(cut) >= _SIDE and cut != _FLAT.tile


def _is_crowded(config: MoeConfig, arch: ArchSpec) -> bool:
    """True for kernels that hold several steps in registers beside the state of experts, and spill: measured with clang
    22 for gfx1100 and gfx1201, fp32 64x64x64 (25 registers) and bf16 32x128x128 (32). Halves as long do not. Likewise
    those of CUDA devices with 64 sums of a thread and as many of a block: 64x128 by four warps spills 24 bytes.
    """
    threads = config.waves * arch.wave_size
    if config.block_scaled and arch.kind == "cuda" and not is_specialised(config, arch):
        return config.tile[0] * config.tile[1] // threads > _BLOCK_SUMS
    if arch.kind != "hip" or config.pipeline != "mem" or arch.registers_per_thread(threads) > _FEW_REGISTERS:
        return False
    m, n, k = config.tile
    staged = (m + n) * k * config.dtype_a.bytes // 4 // threads
    return staged > _STAGED_REGISTERS // (2 if config.dtype_a.value == "fp32" else 1)


def moe_mismatches(problem: MoeProblem, config: MoeConfig, device: DeviceInfo) -> Sequence[Violation]:
    """Reasons why a kernel cannot compute a problem."""
    return [*gemm_mismatches(problem.typical, _plain(problem, config), device), *_mismatches(problem, config, device)]


def _mismatches(problem: MoeProblem, config: MoeConfig, device: DeviceInfo) -> Iterator[Violation]:
    wanted = fused_with(problem, config, device.arch)
    if (config.gated, config.result) != (wanted.gated, wanted.result):
        fix = {"gated": wanted.gated, "result": wanted.result}
        yield Violation("signature", "result", config.result, "the problem asks for other steps behind the sums", fix)
    if device.arch.kind == "cpu":
        nbytes = problem.rows * problem.k * 4
        if config.pipeline == "compv1" and nbytes > _IN_PLACE_BYTES:
            reason = f"an expert may have {problem.rows} rows, whose copy for each thread is {nbytes} bytes"
            yield Violation("small_products", "pipeline", config.pipeline, reason)
        return
    tiles = most_tiles(problem, config)
    if max(problem.all_rows, tiles) > _LARGEST:
        yield Violation("index_range", "tile", config.tile, f"{tiles} tiles are more than 32 bits count")
    if is_specialised(config, device.arch) and device.arch.bulk_copy:
        yield from _copies(problem, config, device.arch.bulk_copy.alignment)
        if not _fits(problem, config, device.arch):
            reason = f"the table of {problem.experts} experts does not fit shared memory beside the stages"
            fewer = stages_of(config, device.arch) - 1
            yield Violation("expert_table", "stages", config.stages, reason, {"stages": fewer})


def _copies(problem: MoeProblem, config: MoeConfig, unit: int) -> Iterator[Violation]:
    """Wants of the copy engine as to the result, and of the table of experts in shared memory."""
    if problem.experts > MOST_EXPERTS:
        reason = f"rows of at most {MOST_EXPERTS} experts are kept in shared memory"
        yield Violation("expert_table", "pipeline", config.pipeline, reason)
    (product,) = problem.product(1, problem.experts).products
    if problem.fused:  # which threads store
        return
    line = problem.n * (2 if config.c != "fp32" else 4)
    if line % unit:
        reason = f"rows of the result have {line} bytes, not a multiple of {unit}"
        yield Violation("copy_strides", "pipeline", config.pipeline, reason)
    elif problem.masked and product.out.batch_stride % max(product.out.row_stride, 1):
        reason = "experts of the result do not begin at multiples of its rows"
        yield Violation("copy_strides", "pipeline", config.pipeline, reason)


def predict_moe(problem: MoeProblem, config: MoeConfig, device: DeviceInfo) -> Prediction:
    """GEMM's estimate of the typical batch; on GPUs, where a row too many costs a tile, with rows somewhat uneven."""
    kind = problem.typical if device.arch.kind == "cpu" else _uneven(problem, 1)
    return predict_gemm(kind, _plain(problem, config), device)
