"""The conformance test of operations, for authors of plugins and for our own.

    from tilewright_kit.conformance.check_plugin import check_plugin

    def test_my_operation_conforms():
        check_plugin(MyOperation()).raise_if_failed()

Nothing here needs a device or a compiler unless ``build`` or ``run`` is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.conformance.declarations import check_declarations
from tilewright_kit.conformance.execution import Build, Execute, check_execution, draw_inputs
from tilewright_kit.conformance.fields import Pool, check_fields, naming_findings, source_findings, variants
from tilewright_kit.conformance.problems import check_problems, plan_findings
from tilewright_kit.conformance.report import Check, CheckFailed, CheckReport, Status
from tilewright_kit.conformance.rules import check_rules
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.loading.check_operation import check_operation

__all__ = [
    "Build",
    "Check",
    "CheckFailed",
    "CheckReport",
    "Execute",
    "Pool",
    "Status",
    "check_plugin",
    "device_of",
    "draw_inputs",
    "naming_findings",
    "plan_findings",
    "source_findings",
    "variants",
]


def check_plugin(
    operation: Operation[Any, Any],
    device: DeviceInfo | None = None,
    build: Build | None = None,
    run: Execute | None = None,
    *,
    archs: Sequence[ArchSpec] | None = None,
    examples: Sequence[KernelConfig] = (),
    per_arch: int = 48,
    seed: int = 0,
) -> CheckReport:
    """Check every promise of the ``Operation`` contract and report which were kept. Never raises for the operation.

    Kernel sets and rules are tried on ``archs`` (default: all that have a spec), with up to ``per_arch`` kernels each
    and the ``examples``: configurations that no set has, for fields that the report would otherwise skip.
    Plans are made for ``device`` or, without one, for an imagined device of each arch that has kernels. ``build``
    compiles the kernels of the samples and ``run`` computes them, both for ``device`` (else the first imagined one).
    """
    report = CheckReport(str(getattr(operation, "name", operation)))
    specs = [tilewright_arch.load(name) for name in tilewright_arch.names()] if archs is None else list(archs)
    if device is not None and device.arch not in specs:
        specs.append(device.arch)
    if not report.run("contract", check_operation, operation, specs, True):
        return report  # the rest would only repeat it in other words
    pools: list[Pool] = []

    def expand() -> tuple[str, ...]:
        pools.append(Pool.of(operation, specs, per_arch, examples))
        return ()

    if not report.run("sets.expand", expand):
        return report
    pool = pools[0]
    check_fields(report, operation, pool)
    check_rules(report, operation, pool)
    devices = [device_of(arch) for arch in pool.configs] if device is None else [device]
    check_problems(report, operation, devices)
    check_declarations(report, operation, devices)
    if devices:
        check_execution(report, operation, devices[0], build, run, seed)
    return report


def device_of(arch: ArchSpec, units: int = 0) -> DeviceInfo:
    """An imagined device of an arch, for planning where there is none."""
    known = units or arch.throughput.units or 4
    return DeviceInfo(f"{arch.kind}:0", arch.kind, f"imagined {arch.name}", arch, known, 16 * 2**30)
