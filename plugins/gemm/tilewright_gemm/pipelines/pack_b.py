"""Candidates of packing B: one for each format that serves the products to come."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_gemm.candidates.cpu import packed_cuts
from tilewright_gemm.candidates.hip import HIP_SHAPES, hip_config
from tilewright_gemm.config.choices import cpu_teams, cpu_tiles, cpu_warp_tiles, table_key
from tilewright_gemm.config.config import GemmConfig, Triple
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.config.packing import VectorFormat, format_of, packing_of
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.problem.problem import PackBProblem
from tilewright_gemm.vocabulary import Epilogue
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.selection.applicability import team_too_large

__all__ = ["pack_b_candidates", "pack_b_mismatches", "pack_b_refusal"]

_LEAST_COLUMNS = 16
"""Panels of fewer columns serve instructions of few columns, which only those who ask for them want."""
_LINE_BYTES = 128


def _hip_candidates(problem: PackBProblem, arch: ArchSpec) -> Iterator[PackBConfig]:
    """A kernel for every format that the arch reads, or for the one that is asked for."""
    key = table_key(problem.dtype_a.value, problem.dtype_b.value)
    for pipeline in arch.preshuffle_pipelines:
        tiles = arch.warp_tiles_for(key, pipeline)
        for columns in sorted({tile[1] for tile in tiles}, reverse=True):
            wanted = problem.packing
            if wanted is None and columns < _LEAST_COLUMNS:
                continue
            if wanted is not None and wanted != VectorFormat(problem.dtype_b.value, columns):
                continue
            found = _kernel(problem, arch, pipeline, [tile for tile in tiles if tile[1] == columns])
            if found:
                yield found


def _kernel(problem: PackBProblem, arch: ArchSpec, pipeline: str, tiles: list[Triple]) -> PackBConfig | None:
    """A pre-shuffle kernel of one of these warp tiles: which one does not matter to the packing."""
    key = table_key(problem.dtype_a.value, problem.dtype_b.value)
    for shape in HIP_SHAPES:
        config = hip_config(arch, problem.dtype_a, key, shape, pipeline, _LINE_BYTES, tiles)
        if config is None:
            continue
        fields = {name: getattr(config, name) for name in ("tile", "wave", "warp_tile", "epilogue", "scheduler")}
        packs = PackBConfig(
            dtype_a=problem.dtype_a,
            dtype_b=problem.dtype_b.value,
            layout=problem.layout,
            pipeline=pipeline,
            preshuffle=True,
            **fields,
        )
        if RULES.allows(packs, arch):
            return packs
    return None


def pack_b_candidates(problem: PackBProblem, device: DeviceInfo) -> tuple[PackBConfig, ...]:
    """Pre-shuffle kernels whose format serves the products to come, as these will be cut; one for each format."""
    arch, key = device.arch, f"{problem.dtype_a}_{problem.dtype_b}_{'int32' if problem.dtype_a == 'int8' else 'fp32'}"
    if arch.kind != "cpu":
        packs = _hip_candidates(problem, arch)
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
                for tile, wave in packed_cuts(problem.m, problem.n, cpu_tiles(arch, pipeline, warp_tile, team))
            ]
    seen: dict[str, PackBConfig] = {}
    for config in found:
        if RULES.allows(config, arch) and not pack_b_mismatches(problem, config, device):
            seen.setdefault(str(format_of(config.dtype_a, config.warp_tile)), config)
    return tuple(seen.values())


def pack_b_refusal(problem: PackBProblem, device: DeviceInfo) -> Violation | None:
    """Reason why there is nothing that packs for a device of this kind."""
    if device.arch.preshuffle_pipelines:
        return _beyond(problem, device.arch)
    reason = f"kernels of {device.arch.id} read a plain B as fast: there is nothing to gain by packing it"
    return Violation("packing", "b", str(problem.layout[1]), reason)


def _beyond(problem: PackBProblem, arch: ArchSpec) -> Violation | None:
    """Reason why kernels could not read what packing would make; None if they can. All formats are as large, but for
    columns that fill the last panel.
    """
    if arch.kind == "cpu":
        return None
    reason = VectorFormat(problem.dtype_b.value, _LEAST_COLUMNS).beyond(problem.k, problem.n)
    return Violation("packed_range", "b", problem.n, f"{reason}: pack ranges of its columns") if reason else None


def pack_b_mismatches(problem: PackBProblem, config: GemmConfig, device: DeviceInfo) -> tuple[Violation, ...]:
    """Reasons why this kernel cannot pack for this problem."""
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
    packing = packing_of(config, device.arch)
    if isinstance(packing, VectorFormat) and (reason := packing.beyond(problem.k, problem.n)):
        found.append(Violation("packed_range", "b", problem.n, f"{reason}: pack ranges of its columns"))
    return (*found, *team_too_large(config, device))
