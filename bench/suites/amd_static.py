"""Kernels for AMD GPUs: what their instructions allow at the most. Static analysis; nothing runs, nothing is measured.

For every arch, every kernel of the essential set on a product of 4096 cubed, and the tiles that divide best among the
compute units. docs/analysis.md says what the columns mean and what the model leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tilewright_arch
from suites.base import Options, Table, main
from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.operation import Operation
from tilewright_kit.types.errors import TilewrightError
from tilewright_native import include_dir
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_server.build.workers.process import Limits
from tilewright_tools.analysis.disassembly import Disassembler
from tilewright_tools.analysis.kernels import Finding, analyze_config
from tilewright_tools.cli.problems.loading import load_operation

ARCHS = ("gfx942", "gfx950", "gfx90a", "gfx1100", "gfx1201")
SHAPE = (4096, 4096, 4096)
TEXT = ",".join(map(str, SHAPE))
COLUMNS = [
    "kernel", "registers", "LDS KiB", "resident", "matrix of", "limit", "busy %", "in step %", "TFLOP/s", "% of peak",
]  # fmt: skip


def row(finding: Finding, name: str) -> list[Any]:
    found, bound = finding.analysis, finding.bound
    in_step = found.cycles["matrix"] / found.in_step
    return [
        name,
        found.kernel.vgprs,
        found.lds_bytes / 1024,
        found.occupancy.workgroups,
        f"{found.cost.counts.get('matrix', 0)} / {sum(found.cost.counts.values())}",
        found.limit,
        100 * found.matrix_share,
        100 * in_step,
        bound.flops_per_second / 1e12,
        100 * bound.share_of_peak,
    ]


def configs_of(operation: Operation[Any, Any], arch: ArchSpec, quick: bool) -> Iterator[KernelConfig]:
    found = list(operation.kernel_sets["essential"].iterate(arch, operation.rules))
    yield from found[:3] if quick else found


def analyse(arch: ArchSpec, options: Options) -> Table:
    operation, disassembler = load_operation("gemm"), Disassembler()
    # Nothing else is to have the machine meanwhile.
    toolchain = HipToolchain([include_dir()], limits=Limits(niceness=0))
    table = Table(f"{arch.name}: bounds of the essential set, 4096 x 4096 x 4096", COLUMNS)
    failures: list[str] = []

    def one(config: KernelConfig) -> tuple[KernelConfig, Finding | str]:
        try:
            return config, analyze_config(operation, config, arch, toolchain, shape=TEXT, disassembler=disassembler)
        except TilewrightError as error:
            return config, error.reason

    with ThreadPoolExecutor(max(options.threads, 1)) as threads:
        for config, found in threads.map(one, list(configs_of(operation, arch, options.quick))):
            if isinstance(found, Finding):
                table.rows.append(row(found, config.name.removeprefix("gemm_")))
            else:
                failures.append(f"{config.name}: {found}")
    toolchain.close()
    table.rows.sort(key=lambda cells: -cells[-1])
    peak = ", ".join(
        f"{name} {(arch.throughput.peak_flops(name) or 0) / 1e12:.0f}" for name in ("fp32", "fp16", "int8")
    )
    table.notes.append(f"Peak TFLOP/s of {arch.throughput.units} units at {arch.throughput.clock_mhz} MHz: {peak}.")
    table.notes += [f"Not analysed: {failure}." for failure in failures]
    return table


def measure(options: Options) -> list[Table]:
    return [analyse(tilewright_arch.load(name), options) for name in ARCHS]


if __name__ == "__main__":
    raise SystemExit(main(measure))
