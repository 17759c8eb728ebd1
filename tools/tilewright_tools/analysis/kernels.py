"""The analysis of a kernel by its configuration: built here, with the launch that the operation itself plans."""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.abilities import Analyzable
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.plan import Geometry
from tilewright_kit.types.errors import NotFoundError, UnsupportedError
from tilewright_server.build.toolchains.toolchain import Toolchain
from tilewright_tools.analysis.disassembly import Disassembler
from tilewright_tools.analysis.roofline import Analysis, Problem, ProblemBound, analyze, bound_of

__all__ = ["Finding", "analyze_config", "named_config", "summary"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A kernel and what was found of it."""

    config: KernelConfig
    analysis: Analysis
    problem: Problem
    bound: ProblemBound


def named_config(operation: Operation[Any, Any], arch: ArchSpec, name: str) -> KernelConfig:
    """The configuration of that name in any of the operation's sets for the arch. Raises ``NotFoundError``."""
    for kernel_set in operation.kernel_sets.values():
        for config in kernel_set.iterate(arch, operation.rules):
            if config.name == name:
                return config  # type: ignore[no-any-return]
    raise NotFoundError(
        f"no kernel set has a kernel of that name for {arch.id}",
        field="name",
        value=name,
        rule="kernel_name",
        fix=f"`tilewright kernels list --arch {arch.id}` has them all; --config takes any other configuration",
    )


def analyze_config(
    operation: Operation[Any, Any],
    config: KernelConfig,
    arch: ArchSpec,
    toolchain: Toolchain,
    *,
    shape: str = "",
    resident: int = 0,
    disassembler: Disassembler | None = None,
) -> Finding:
    """Build a configuration and analyse it for a problem, in the words that the operation has for shapes; empty is a
    usual one.

    Raises what building and ``analyze`` raise, ``UnsupportedError`` for an operation that has no products.
    """
    if arch.kind != "hip":
        raise UnsupportedError(
            f"kernels for {arch.id} cannot be analysed: only those of AMD GPUs can",
            field="arch",
            value=arch.id,
            rule="arch_rates",
            fix="choose an AMD GPU's arch, for example --arch gfx942",
        )
    problem, geometry = launch_of(operation, config, arch, shape)
    unit = operation.generate(config, arch)
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        image = toolchain.compile(unit, Path(folder), arch).binary.read_bytes()
    found = analyze(
        image,
        arch,
        waves=math.prod(geometry.block) // arch.wave_size,
        lds_bytes=geometry.shared_bytes,
        name=unit.entries["main"],
        resident=resident,
        turn_flops=problem.share.turn_flops,
        disassembler=disassembler,
    )
    return Finding(config, found, problem, bound_of(found, problem))


def launch_of(
    operation: Operation[Any, Any], config: KernelConfig, arch: ArchSpec, shape: str = ""
) -> tuple[Problem, Geometry]:
    """The problem as the kernel divides it among workgroups, and the kernel's launch, of a plan of several kernels its
    own. A fused step changes nothing of its geometry. Raises ``UnsupportedError`` for an operation without products.
    """
    if not isinstance(operation, Analyzable):
        raise UnsupportedError(
            f"{operation.name} does not say which product its kernels compute",
            field="operation",
            value=operation.name,
            rule="analysis",
            fix="analyse kernels of another operation",
        )
    problem = operation.parse(operation.analysis_request(config, shape or operation.analysis_shape(config)))
    device = DeviceInfo("hip:0", "hip", arch.description, arch, arch.throughput.units, 0)
    stages = operation.plan(problem, config, device).stages
    own = [stage for stage in stages if stage.config == config]
    main = own or [stage for stage in stages if stage.config.operation == operation.name]
    main = [stage for stage in main if stage.role == "main"] or own  # what adds its sums is a launch of its own
    geometry = (main or stages)[-1].geometry
    workgroups = math.prod(geometry.grid)
    share = operation.share_of(problem, config, workgroups)
    return Problem(operation.product_of(problem), share, workgroups), geometry


def summary(finding: Finding) -> dict[str, Any]:
    """All of it as JSON can hold it: cycles of an iteration by limit, instructions, resources, the bound."""
    found, bound = finding.analysis, finding.bound
    cost = found.cost
    return {
        "kernel": finding.config.name,
        "arch": found.arch.id,
        "resources": {
            "vgprs": found.kernel.vgprs,
            "agprs": found.kernel.agprs,
            "sgprs": found.kernel.sgprs,
            "lds_bytes": found.lds_bytes,
            "workgroups_per_unit": found.occupancy.workgroups,
            "waves_per_simd": found.occupancy.waves_per_simd,
            "occupancy_limit": found.occupancy.limit,
        },
        "loop": {
            "address": found.loop.header,
            "instructions": dict(cost.counts),
            "matrix_instructions": dict(cost.matrix_mnemonics),
            "branches": found.loop.branches,
            "workgroups": found.resident,
            "cycles": {name: round(value, 1) for name, value in found.cycles.items()},
            "in_step": round(found.in_step, 1),
            "limit": found.limit,
            "matrix_share": round(found.matrix_share, 4),
        },
        "problem": _described(finding.problem),
        "bound": {
            "seconds": bound.seconds,
            "parts": dict(bound.parts),
            "tflops": round(bound.flops_per_second / 1e12, 2),
            "peak_tflops": round(bound.peak_flops_per_second / 1e12, 2),
            "share_of_peak": round(bound.share_of_peak, 4),
            "units_used": round(bound.units_used, 4),
            "edge": round(bound.edge, 4),
        },
    }


def _described(problem: Problem) -> dict[str, Any]:
    product = asdict(problem.product) | {name: getattr(problem.product, name).value for name in ("dtype", "dtype_out")}
    return {**product, "workgroups": problem.workgroups, "share": asdict(problem.share)}
