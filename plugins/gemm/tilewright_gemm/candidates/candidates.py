"""Which kernels could compute a problem, and why another cannot."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_gemm.candidates.applicability import gpu_mismatches
from tilewright_gemm.candidates.cuda import gpu_algorithms
from tilewright_gemm.candidates.hip import hip_algorithms
from tilewright_gemm.candidates.pack_b import hip_pack_candidates
from tilewright_gemm.config.choices import cpu_teams, cpu_tiles, cpu_warp_tiles
from tilewright_gemm.config.config import GemmConfig, Triple
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.config.packing import format_of, packing_of
from tilewright_gemm.cost.cuda import predict_gpu
from tilewright_gemm.cost.hip import predict_hip
from tilewright_gemm.problem.problem import GemmProblem, PackBProblem
from tilewright_gemm.rules.rulebook import RULES
from tilewright_gemm.vocabulary import Epilogue, Reduction
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Candidates
from tilewright_kit.selection.applicability import (
    canonical,
    other_signature,
    slices_asked,
    team_too_large,
    unpadded_sizes,
)
from tilewright_kit.selection.candidates import Verdicts, shortlist, teams_for

__all__ = [
    "gemm_candidates",
    "gemm_mismatches",
    "pack_b_candidates",
    "pack_b_mismatches",
    "pack_b_refusal",
    "with_signature",
]

MOST = 32
"""Candidates of a GPU."""
SKINNY = 8
"""Rows or columns up to which the streaming pipeline is worth considering; it is the kernel's own register block."""
_STREAM_UP_TO = 4 * SKINNY
_SMALL_FLOPS = 2 * 256**3

_verdicts = Verdicts(RULES)


def with_signature(problem: GemmProblem, config: GemmConfig) -> GemmConfig:
    """``config``'s algorithm for what ``problem`` asks. Slices of K are the algorithm's, unless the caller asked."""
    return config.replace(
        dtype_a=problem.dtype_a,
        dtype_b=problem.dtype_b.value,
        dtype_c=problem.dtype_c.value,
        layout=problem.layout,
        binary=problem.binary,
        unary=problem.unary,
        num_d_tensors=problem.num_d,
        dtype_d=tuple(dtype.value for dtype in problem.dtype_d),
        bias=problem.dtype_bias.value if problem.dtype_bias else "",
        scale_a=problem.scale_a,
        scale_b=problem.scale_b,
        grouped=problem.grouped,
        batched=problem.is_batched and not problem.grouped,
        split_k=1 if problem.grouped else problem.split_k or config.split_k,
        preshuffle=problem.packing is not None,
    )


def gemm_candidates(problem: GemmProblem, device: DeviceInfo) -> Candidates[GemmConfig]:
    """Valid kernels for the problem, the preferred first, the most general last."""
    if device.arch.kind == "cpu":
        algorithms = _cpu_algorithms(problem, device)
    elif device.arch.kind == "cuda":
        algorithms = gpu_algorithms(problem, device)
    else:
        algorithms = hip_algorithms(problem, device)
    asked = list(dict.fromkeys(with_signature(problem, algorithm) for algorithm in algorithms))
    found = Candidates(asked)
    if device.arch.kind != "cpu":
        # Rules take longer than the model, so what has no chance need not be judged.
        predict = predict_gpu if device.arch.kind == "cuda" else predict_hip
        found = shortlist(asked, MOST, lambda config: predict(problem, config, device))
    return found.kept(lambda config: _verdicts.allows(config, device) and not gemm_mismatches(problem, config, device))


def _cpu_algorithms(problem: GemmProblem, device: DeviceInfo) -> Iterator[GemmConfig]:
    arch, key = device.arch, f"{problem.dtype_a}_{problem.dtype_b}_{problem.dtype_acc}"
    m, n = problem.m, problem.n
    teams = teams_for(problem, device)
    if problem.packing:
        pipelines = [name for name in arch.preshuffle_pipelines if name in arch.pipelines]
    else:
        pipelines = [name for name in ("mem", "compv1", "compv3") if name in arch.pipelines]
        if min(m, n) > _STREAM_UP_TO and "mem" in pipelines:
            pipelines.remove("mem")
        if problem.largest.flops > _SMALL_FLOPS and "compv1" in pipelines:
            pipelines.remove("compv1")
        if min(m, n) <= 1 and "mem" in pipelines:
            pipelines = ["mem", "compv3"]
    for pipeline in pipelines:
        tiles = cpu_warp_tiles(arch, key, pipeline, 1 if pipeline == "mem" else 3)
        if problem.packing:
            all_tiles = arch.warp_tiles_for(key, pipeline)
            tiles = tuple(tile for tile in all_tiles if format_of(problem.dtype_a, tile) == problem.packing)
        for warp_tile in tiles:
            for team in teams:
                schedulers = _schedulers(problem, arch.pipeline(pipeline).schedulers, pipeline, team)
                for scheduler in schedulers:
                    for tile, wave in _cuts(problem, cpu_tiles(arch, pipeline, warp_tile, team), scheduler):
                        yield GemmConfig(
                            dtype_a=problem.dtype_a,
                            pipeline=pipeline,
                            epilogue=Epilogue.DEFAULT,
                            scheduler=scheduler,
                            persistent=team > 1,
                            tile=tile,
                            wave=wave,
                            warp_tile=warp_tile,
                        )


def _schedulers(problem: GemmProblem, schedulers: tuple[str, ...], pipeline: str, team: int) -> tuple[str, ...]:
    """Working apart pays when there are products enough for everybody, or when a barrier would cost too much."""
    apart = len(problem.products) > 1 or problem.is_batched or problem.largest.flops < _SMALL_FLOPS
    return schedulers if apart and team > 1 and pipeline not in ("mem", "compv1") else schedulers[:1]


def _cuts(
    problem: GemmProblem, cuts: tuple[tuple[Triple, Triple], ...], scheduler: str
) -> tuple[tuple[Triple, Triple], ...]:
    """What suits the problem; near the square, and where every thread packs for itself, both are worth a look."""
    if problem.packing:
        return _packed_cuts(problem.m, problem.n, cuts)
    if scheduler == "interwave" or (problem.m < 2 * problem.n and problem.n < 2 * problem.m):
        return cuts
    return cuts[:1] if problem.m >= problem.n else cuts[1:]


def _packed_cuts(m: int, n: int, cuts: tuple[tuple[Triple, Triple], ...]) -> tuple[tuple[Triple, Triple], ...]:
    """A pre-shuffled B is read where it lies, and few rows go through longer blocks of it."""
    if m <= _STREAM_UP_TO:
        return cuts[2:]
    return cuts[:2] if m > n else cuts[1:2]


def gemm_mismatches(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> tuple[Violation, ...]:
    """Why this kernel cannot compute this problem on this device; empty if it can."""
    return tuple(_mismatches(problem, config, device))


def _mismatches(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> Iterator[Violation]:
    wanted: dict[str, tuple[object, object]] = {
        "dtype_a": (config.a, problem.dtype_a.value),
        "dtype_b": (config.b, problem.dtype_b.value),
        "dtype_c": (config.c, problem.dtype_c.value),
        "layout": (config.layout, problem.layout),
        "binary": (canonical(config.binary), canonical(problem.binary)),
        "dtype_d": (config.d, tuple(dtype.value for dtype in problem.dtype_d)),
        "unary": (config.unary, problem.unary),
        "bias": (config.bias, problem.dtype_bias.value if problem.dtype_bias else ""),
        "scale_a": (config.scale_a, problem.scale_a),
        "scale_b": (config.scale_b, problem.scale_b),
    }
    if device.arch.kind != "cuda":  # which refuses a packed B with a reason of its own
        wanted["preshuffle"] = (config.preshuffle, problem.packing is not None)
    yield from other_signature(wanted, unmendable=("dtype_d",))
    if problem.grouped and not config.grouped:
        yield Violation("variant", "grouped", False, "the problem has several products", {"grouped": True})
    elif problem.is_batched and not (config.batched or config.grouped):
        yield Violation("variant", "batched", False, "the problem is batched", {"batched": True})
    if not problem.grouped:
        yield from slices_asked(problem.split_k, config.split_k, "K")
    if config.reduction is not Reduction.NONE and problem.grouped:
        yield Violation("variant", "reduction", config.reduction.value, "Stream-K takes one product")
    reads = packing_of(config, device.arch)
    if problem.packing and device.arch.kind != "cuda" and reads != problem.packing:
        reason = f"B is packed as {problem.packing}, the kernel reads {reads}"
        yield Violation("packing", "warp_tile", config.warp_tile, reason)
    yield from unpadded_sizes(config, problem.products)
    yield from team_too_large(config, device)
    if device.arch.kind != "cpu":
        yield from gpu_mismatches(problem, config, device.arch)


# ---- packing ----


def pack_b_candidates(problem: PackBProblem, device: DeviceInfo) -> tuple[PackBConfig, ...]:
    """Pre-shuffle kernels whose format serves the products to come, as these will be cut; one for each format."""
    arch, key = device.arch, f"{problem.dtype_a}_{problem.dtype_b}_{'int32' if problem.dtype_a == 'int8' else 'fp32'}"
    if arch.kind != "cpu":
        packs = hip_pack_candidates(problem, arch)
        return tuple(item for item in packs if not pack_b_mismatches(problem, item, device))
    found: list[PackBConfig] = []
    team = cpu_teams(arch, device.units)[-1] if problem.k * problem.n > 1 << 16 else 1
    for pipeline in arch.preshuffle_pipelines:
        preferred = cpu_warp_tiles(arch, key, pipeline)
        tiles = arch.warp_tiles_for(key, pipeline) if problem.packing else preferred
        for warp_tile in tiles:
            offer = arch.pipeline(pipeline)
            found += [
                PackBConfig(
                    dtype_a=problem.dtype_a,
                    dtype_b=problem.dtype_b.value,
                    layout=problem.layout,
                    pipeline=pipeline,
                    epilogue=Epilogue.DEFAULT,
                    scheduler=offer.schedulers[0],
                    persistent=team > 1,
                    tile=tile,
                    wave=wave,
                    warp_tile=warp_tile,
                    preshuffle=True,
                )
                for tile, wave in _packed_cuts(problem.m, problem.n, cpu_tiles(arch, pipeline, warp_tile, team))
            ]
    seen: dict[str, PackBConfig] = {}
    for config in found:
        if RULES.allows(config, arch) and not pack_b_mismatches(problem, config, device):
            seen.setdefault(str(format_of(config.dtype_a, config.warp_tile)), config)
    return tuple(seen.values())


def pack_b_refusal(problem: PackBProblem, device: DeviceInfo) -> Violation | None:
    """Why there is nothing that packs for a device of this kind."""
    if device.arch.preshuffle_pipelines:
        return None
    reason = f"kernels of {device.arch.id} read a plain B as fast: there is nothing to gain by packing it"
    return Violation("packing", "b", str(problem.layout[1]), reason)


def pack_b_mismatches(problem: PackBProblem, config: GemmConfig, device: DeviceInfo) -> tuple[Violation, ...]:
    """Why this kernel cannot pack for this problem."""
    found = [
        Violation("signature", field, have, f"the problem has {field} {want}, the kernel {have}", {field: want})
        for field, have, want in (
            ("dtype_a", config.a, problem.dtype_a.value),
            ("dtype_b", config.b, problem.dtype_b.value),
            ("layout", config.layout[1], problem.layout[1]),
        )
        if have != want
    ]
    if not config.preshuffle:
        found.append(Violation("signature", "preshuffle", False, "only pre-shuffle kernels pack", {"preshuffle": True}))
    if problem.packing and packing_of(config, device.arch) != problem.packing:
        found.append(Violation("packing", "warp_tile", config.warp_tile, f"the format asked for is {problem.packing}"))
    return (*found, *team_too_large(config, device))
