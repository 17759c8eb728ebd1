"""Choices of strategies side by side: what each would run on a problem, and how long that takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import Problem
from tilewright_kit.selection.strategies import Selector, Strategy
from tilewright_server.engine.engine import Engine
from tilewright_tools.tuning.measure.setup import Setup
from tilewright_tools.tuning.results import Result
from tilewright_tools.tuning.sweep import Sweep, SweepOptions

__all__ = ["Choices"]


class Choices(Sweep):
    """A sweep of the first kernels of some strategies, which are timed again in the final."""

    def __init__(self, engine: Engine, setup: Setup, options: SweepOptions, strategies: Mapping[str, Strategy]) -> None:
        super().__init__(engine, setup, options)
        self._strategies = dict(strategies)
        self._chosen: dict[tuple[str, str], dict[str, str]] = {}

    def _configs(self, operation: Operation[Any, Any], problem: Problem) -> list[KernelConfig]:
        """Raises what a strategy raises that has no kernel for the problem."""
        found = {
            name: Selector(strategy).rank(operation, problem, self.device)[0].config
            for name, strategy in self._strategies.items()
        }
        kernels = {name: config.name for name, config in found.items()}
        self._chosen[operation.name, str(problem.describe())] = kernels
        return list(dict.fromkeys(found.values()))

    def told(self, results: Sequence[Result]) -> list[str]:
        """A line for each strategy but the first: its time over the first one's, by the geometric mean, and at worst,
        over the problems of which both were timed.
        """
        times: dict[tuple[str, str], dict[str, float]] = {}
        for item in results:
            if item.status == "ok":
                problem = self._engine.operations[item.stamp.operation].parse(item.case.request())
                key = (item.stamp.operation, str(problem.describe()))
                times.setdefault(key, {})[item.kernel] = item.median_ns
        first, *others = self._strategies
        lines = []
        for name in others:
            ratios = [
                of[chosen[name]] / of[chosen[first]]
                for key, of in times.items()
                if (chosen := self._chosen.get(key)) and {chosen[name], chosen[first]} <= set(of)
            ]
            if ratios:
                mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
                lines.append(
                    f"{name} takes {mean:.3f} of the time of {first} (geometric mean of {len(ratios)} problems), at "
                    f"worst {max(ratios):.3f}"
                )
        return lines
