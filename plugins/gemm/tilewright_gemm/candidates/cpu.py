"""Candidates of CPUs."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_gemm.config.choices import cpu_tiles, cpu_warp_tiles
from tilewright_gemm.config.config import GemmConfig, Triple
from tilewright_gemm.config.packing import format_of
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Epilogue
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.selection.candidates import teams_for

__all__ = ["cpu_algorithms", "packed_cuts"]

SKINNY = 8
"""Rows or columns up to which the streaming pipeline is worth considering; it is the kernel's own register block."""
_STREAM_UP_TO = 4 * SKINNY
_SMALL_FLOPS = 2 * 256**3


def cpu_algorithms(problem: GemmProblem, device: DeviceInfo, few: bool) -> Iterator[GemmConfig]:  # noqa: ARG001
    """Configurations with the algorithm set, the signature not; the most general last."""
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
    """Cuts that suit the problem; near the square, and where every thread packs for itself, both are worth a look."""
    if problem.packing:
        return packed_cuts(problem.m, problem.n, cuts)
    if scheduler == "interwave" or (problem.m < 2 * problem.n and problem.n < 2 * problem.m):
        return cuts
    return cuts[:1] if problem.m >= problem.n else cuts[1:]


def packed_cuts(m: int, n: int, cuts: tuple[tuple[Triple, Triple], ...]) -> tuple[tuple[Triple, Triple], ...]:
    """A pre-shuffled B is read where it lies, and few rows go through longer blocks of it."""
    if m <= _STREAM_UP_TO:
        return cuts[2:]
    return cuts[:2] if m > n else cuts[1:2]
