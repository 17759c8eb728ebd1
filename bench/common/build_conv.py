"""Builds of convolution kernels: how several scale with the workers, beside what the predecessor reports."""

from __future__ import annotations

import os
from collections.abc import Callable

from suites.base import Options, Table

import tilewright_arch
from tilewright_grouped_conv.commands.cases import DIRECTIONS, ConvCase
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.loading.loader import PluginManager

__all__ = ["chosen", "measure_conv_pool"]

SEEDS = {1: (7.7, 15.9, 33.4, 52.3), 8: (7.7, 8.2, 9.7, 10.2)}
"""Seconds that the project's predecessor reports for its kernels (for an AMD GPU, on a larger machine), by workers."""
COUNTS = (1, 2, 4, 6)

BuildAll = Callable[[list[SourceUnit], tilewright_arch.ArchSpec, int], float]


def chosen(manager: PluginManager, arch: tilewright_arch.ArchSpec, options: Options) -> list[SourceUnit]:
    """Six kernels: what the server would build for a layer in three directions and two types. A check has one."""
    (info,) = manager.devices["cpu"].discover()
    found = []
    for dtype in ("fp32",) if options.quick else ("fp32", "bf16"):
        for direction, name in list(DIRECTIONS.items())[: 1 if options.quick else None]:
            case = ConvCase(8, 64, 64, "56x56", "3", padding="1", direction=direction, dtype=dtype)
            operation = manager.operations[name]
            problem = operation.parse(case.request())
            best = min(
                operation.candidates(problem, info),
                key=lambda config, op=operation, asked=problem: op.predict(asked, config, info).seconds,  # type: ignore[misc]
            )
            found.append(operation.generate(best, arch))
    return found


def measure_conv_pool(
    units: list[SourceUnit], arch: tilewright_arch.ArchSpec, options: Options, build_all: BuildAll
) -> Table:
    """The table that the predecessor shows, with our figures beside its own."""
    cores, counts = len(os.sched_getaffinity(0)), COUNTS[:1] if options.quick else COUNTS
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
