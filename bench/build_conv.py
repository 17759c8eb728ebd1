"""Builds of convolution kernels: how long one takes, and how several scale with the workers."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from suite import Options, Table

import tilewright_arch
from tilewright_kit.errors import BuildFailedError, ToolchainMissingError
from tilewright_kit.plugins import PluginManager
from tilewright_kit.source import SourceUnit
from tilewright_native import include_dir
from tilewright_server.build.nvrtc import NvrtcToolchain
from tilewright_server.build.toolchain import CpuToolchain
from tilewright_server.tuning.families.conv import DIRECTIONS, ConvCase

__all__ = ["chosen", "compiled", "measure_conv_compile", "measure_conv_pool"]

SEEDS = {1: (7.7, 15.9, 33.4, 52.3), 8: (7.7, 8.2, 9.7, 10.2)}
"""Seconds that the project's predecessor reports for its kernels (for an AMD GPU, on a larger machine), by workers."""
COUNTS = (1, 2, 4, 6)
GPU = "sm_90a"

BuildAll = Callable[[list[SourceUnit], tilewright_arch.ArchSpec, int], float]


def chosen(manager: PluginManager, arch: tilewright_arch.ArchSpec, options: Options) -> list[SourceUnit]:
    """Six kernels: what the server would build for a layer in three directions and two types. A check has two."""
    (info,) = manager.devices["cpu"].discover()
    found = []
    for dtype in ("fp32", "bf16"):
        for direction, name in DIRECTIONS.items():
            case = ConvCase(8, 64, 64, "56x56", "3", padding="1", direction=direction, dtype=dtype)
            operation = manager.operations[name]
            problem = operation.parse(case.request())
            best = min(
                operation.candidates(problem, info),
                key=lambda config, op=operation, asked=problem: op.predict(asked, config, info).seconds,  # type: ignore[misc]
            )
            found.append(operation.generate(best, arch))
    return found[:2] if options.quick else found


def measure_conv_pool(
    units: list[SourceUnit], arch: tilewright_arch.ArchSpec, options: Options, build_all: BuildAll
) -> Table:
    """The table that the predecessor shows, with our figures beside its own."""
    cores, counts = len(os.sched_getaffinity(0)), COUNTS[:2] if options.quick else COUNTS
    table = Table(
        f"Building convolution kernels on {cores} cores (seconds), and what the predecessor reports for its own",
        [
            "workers",
            "",
            *(f"{count} kernel{'s' * (count > 1)}" for count in counts),
            f"{counts[-1]} kernels / 1 kernel",
        ],
    )
    for workers, theirs in SEEDS.items():
        ours = []
        for count in counts:
            turns = [build_all(units[:count], arch, workers) for _ in range(1 if options.quick else 3)]
            ours.append(min(turns))
        table.rows.append([workers, "ours", *ours, ours[-1] / ours[0]])
        table.rows.append([workers, "predecessor", *theirs[: len(counts)], theirs[len(counts) - 1] / theirs[0]])
    return table


def measure_conv_compile(manager: PluginManager, arch: tilewright_arch.ArchSpec, options: Options) -> Table:
    """One kernel at a time, from the sets that candidates come from."""
    columns = ["arch", "direction", "median", "slowest", "processor's median", "processor's most", "kernels", "which"]
    table = Table("Compiling one convolution kernel (seconds)", columns)
    gpu = tilewright_arch.load(GPU)
    for target, toolchain in ((arch, CpuToolchain([include_dir()])), (gpu, NvrtcToolchain([include_dir()]))):
        try:
            toolchain.identity()
        except ToolchainMissingError:
            continue
        for direction, name in DIRECTIONS.items():
            operation = manager.operations[name]
            configs = list(operation.kernel_sets["default"].iterate(target, operation.rules))
            step = max(1, len(configs) if options.quick else len(configs) // 10)
            timed: dict[str, tuple[float, float]] = {}
            for config in configs[::step]:
                try:
                    timed[config.name] = compiled(operation, toolchain, config, target)
                except BuildFailedError as error:  # noqa: PERF203  (it must not hide the others)
                    table.notes.append(f"- {target.id}: {error}")
            seconds, busy = zip(*timed.values(), strict=True)
            slowest = max(timed, key=lambda name, found=timed: found[name][1])  # type: ignore[misc]
            spread = [statistics.median(seconds), max(seconds), statistics.median(busy), max(busy)]
            row = [target.id, direction, *spread, len(seconds)]
            table.rows.append([*row, slowest])
        if isinstance(toolchain, NvrtcToolchain):
            toolchain.close()
    return table


def compiled(operation: Any, toolchain: Any, config: Any, arch: tilewright_arch.ArchSpec) -> tuple[float, float]:
    """Seconds by the clock, and of the compiler's processes."""
    with tempfile.TemporaryDirectory() as scratch:
        before = processor_time()
        seconds = toolchain.compile(operation.generate(config, arch), Path(scratch), arch).seconds
        return seconds, processor_time() - before


def processor_time() -> float:
    """Of all children of this process: those that ended, and helpers that stay."""
    total = sum(os.times()[2:4])
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == os.getpid():
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total
