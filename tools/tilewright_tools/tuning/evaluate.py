"""How well strategies choose, by the results of a sweep: ``python -m tilewright_tools.tuning.evaluate RESULTS``.

The efficiency of a choice is the time of the fastest kernel of a problem over the time of the chosen one, among the
kernels that were measured. ``measured`` is asked with everything but the problem at hand (and, as it ships, with the
fastest three kernels of every other problem), so the figure is that of problems that nobody measured.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tilewright_arch
from tilewright_kit.commands.cases import Case
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Candidates, Operation
from tilewright_kit.contract.problem import Problem
from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.selection.measured import Measured
from tilewright_kit.selection.measurements import Measurement
from tilewright_kit.selection.strategies import Heuristic, Strategy
from tilewright_kit.types.errors import NotFoundError, TilewrightError
from tilewright_server.engine.measurements.database import best_rows
from tilewright_tools.tuning.export import TOP
from tilewright_tools.tuning.measure.timing import percentile
from tilewright_tools.tuning.results import Result, read_results

__all__ = ["Score", "evaluate", "main"]


@dataclass(frozen=True, slots=True)
class Score:
    """Efficiencies of a strategy's choices, sorted."""

    strategy: str
    efficiencies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.efficiencies) / len(self.efficiencies)

    @property
    def p10(self) -> float:
        return percentile(self.efficiencies, 10)

    def __str__(self) -> str:
        return (
            f"{self.strategy:16} {len(self.efficiencies):5} problems   mean {self.mean:.3f}   "
            f"10th percentile {self.p10:.3f}   worst {self.efficiencies[0]:.3f}"
        )


class _Without:
    """Measurements of all problems but one."""

    def __init__(self, rows: Sequence[Measurement]) -> None:
        self._rows = rows

    def generation(self) -> object:
        return 0

    def rows(self, operation: str, arch: str) -> Sequence[Measurement]:
        return [row for row in self._rows if (row.operation, row.arch) == (operation, arch)]


def evaluate(results: Sequence[Result], operation: Operation[Any, Any], device: DeviceInfo) -> list[Score]:
    """Scores of ``heuristic``, ``measured`` and ``measured (shipped)`` on the problems of a sweep that have two right
    kernels or more. Raises ``NotFoundError`` if there are none."""
    times: dict[Case, dict[KernelConfig, float]] = {}
    rows: dict[Case, list[Measurement]] = {}
    for result in results:
        row = result.measurement()
        if row is not None:
            times.setdefault(result.case, {})[operation.config_type.from_dict(result.config)] = result.median_ns
            rows.setdefault(result.case, []).append(row)
    usable = [case for case, found in times.items() if len(found) > 1]
    if not usable:
        raise NotFoundError(
            "no problem has two right kernels", field="results", rule="evaluate", fix="sweep more kernels of each"
        )
    scores: dict[str, list[float]] = {}
    for case in usable:
        problem = operation.parse(case.request())
        kernels = Candidates(times[case], (operation.predict(problem, config, device) for config in times[case]))
        others = [row for other, found in rows.items() if other != case for row in found]
        shipped = [row for group in best_rows(others, TOP) for row in group]
        strategies: Mapping[str, Strategy] = {
            "heuristic": Heuristic(),
            "measured": Measured([_Without(others)]),
            "measured, shipped": Measured([_Without(shipped)]),
        }
        for name, strategy in strategies.items():
            scores.setdefault(name, []).append(_efficiency(strategy, operation, problem, kernels, times[case], device))
    return [Score(name, tuple(sorted(found))) for name, found in scores.items()]


def _efficiency(
    strategy: Strategy,
    operation: Operation[Any, Any],
    problem: Problem,
    kernels: Candidates[KernelConfig],
    times: Mapping[KernelConfig, float],
    device: DeviceInfo,
) -> float:
    ranked = strategy.rank(operation, problem, kernels, device)
    # A strategy may add kernels that were not measured here; then its first measured one counts.
    chosen = next(times[item.config] for item in ranked if item.config in times)
    return min(times.values()) / chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each strategy; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tilewright_tools.tuning.evaluate", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="outputs of `tilewright bench`")
    parser.add_argument("--units", type=int, default=0, help="cores, SMs or CUs of the device; default: its arch's")
    given = parser.parse_args(arguments)
    try:
        results = [result for path in given.results for result in read_results(path)]
        if not results:
            raise NotFoundError(
                "the files have no results", field="results", rule="evaluate", fix="name files that a sweep has filled"
            )
        stamp = results[0].stamp
        plugins = PluginManager()
        plugins.load_entry_points()
        arch = tilewright_arch.load(stamp.arch)
        units = given.units or arch.throughput.units or 1
        device = DeviceInfo(f"{arch.kind}:0", arch.kind, stamp.device, arch, units, 0)
        groups: dict[str, list[Result]] = {}
        for result in results:
            groups.setdefault(result.stamp.operation, []).append(result)
        scores = {name: evaluate(found, plugins.operations[name], device) for name, found in groups.items()}
    except (TilewrightError, tilewright_arch.ArchError, KeyError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    for name, found in scores.items():
        sys.stdout.write(f"{name}:\n" * (len(scores) > 1) + "".join(f"{score}\n" for score in found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
