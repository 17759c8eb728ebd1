"""An oracle: every kernel of the wide space on a problem, and a verdict on the server's choice that stands by itself.

Each kernel is timed once, briefly; the fastest tenth (at least 24) then in interleaved draws, so that a drift of the
clock meets all of them alike, of which the median counts. The winner and the server's choice are timed once more: that
timing decided nothing, so its ratio does not favour whoever was lucky before.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright_kit.commands.cases import Case
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import Problem
from tilewright_kit.selection.strategies import Selector, Strategy
from tilewright_kit.types.errors import TilewrightError
from tilewright_server.engine.engine import Engine
from tilewright_tools.tuning.measure.process import WorkerProcess
from tilewright_tools.tuning.measure.setup import Setup
from tilewright_tools.tuning.measure.timing import HEAT
from tilewright_tools.tuning.results import Result
from tilewright_tools.tuning.sweep import Event, Job, PeerTime, Sweep, SweepOptions, Task

__all__ = ["DRAWS", "DRIFT", "Oracle", "Score", "score"]

DRAWS = 5
DRIFT = 1.1
_MADE_AGAIN = 1
"""How often as many rounds as were asked for may be thrown away."""
_LEAST_FINALISTS, _SHARE = 24, 0.1
_DRAW_SAMPLES = 5
_NEXT_BEST = 8
"""Kernels of each chooser's ranking that take part where the wide space is sampled."""


class Oracle(Sweep):
    """A sweep whose final is made of draws."""

    def __init__(
        self,
        engine: Engine,
        setup: Setup,
        options: SweepOptions,
        choosers: Sequence[Strategy],
        worker: WorkerProcess | None = None,
        *,
        draws: int = DRAWS,
        drift: float = DRIFT,
    ) -> None:
        """``choosers`` are the strategies that are judged: their choices are the first kernels of every problem, in
        their order, the server's own first. Rounds in which one kernel's time grows by more than the factor ``drift``
        do not count.
        """
        super().__init__(engine, setup, options, worker)
        self._choosers, self._draws, self._drift = tuple(choosers), draws, drift
        self._peers: dict[Case, PeerTime | None] = {}

    def _configs(self, operation: Operation[Any, Any], problem: Problem) -> list[KernelConfig]:
        found = super()._configs(operation, problem)
        try:
            ranked = [Selector(item).rank(operation, problem, self.device) for item in self._choosers]
        except TilewrightError:  # told by whoever measures the kernels
            return found
        chosen = [items[0].config for items in ranked]
        next_best = [item.config for items in ranked for item in items[1:_NEXT_BEST]]
        return list(dict.fromkeys((*chosen, *next_best, *found)))

    def _final(self, task: Task, total: int) -> Iterator[Result]:
        rows = {**{item.kernel: item for item in task.known}, **{item.kernel: item for item in task.results.values()}}
        good = sorted((item for item in rows.values() if item.status == "ok"), key=lambda item: item.median_ns)
        if not good or not task.results:
            return  # an earlier run has done it all
        kind = self._engine.operations[good[0].stamp.operation].config_type
        configs = {item.kernel: kind.from_dict(item.config) for item in good}
        finalists = good[: max(_LEAST_FINALISTS, math.ceil(_SHARE * len(good)))]
        finalists += [item for item in good[len(finalists) :] if 1 <= item.place <= len(self._choosers)]
        draws = self._drawn(task, finalists, configs)
        found: dict[str, Result] = {}
        for item in finalists:
            times = draws[item.kernel]
            if times:
                text = json.dumps([round(value, 1) for value in times])
                found[item.kernel] = item.replace(
                    median_ns=statistics.median(times), samples=_DRAW_SAMPLES * len(times), draws=text, cut=False,
                )  # fmt: skip
        if not found:
            return
        best = min(found.values(), key=lambda item: (item.median_ns, item.kernel))
        judged = [item for item in found.values() if 1 <= item.place <= len(self._choosers)]
        for item in {item.kernel: item for item in (best, *judged)}.values():
            timed = self._once_more(task, configs[item.kernel], item, 2 * _DRAW_SAMPLES)
            found[item.kernel] = item.replace(again_ns=timed or 0.0)
        peer = self._peer(task)
        if peer is not None:
            found = {name: item.replace(peer_ns=peer.median_ns) for name, item in found.items()}
        for done, item in enumerate(found.values(), 1):
            task.results[configs[item.kernel]] = item
            yield item
            self._tell(Event("final", task.case, task.place, total, done, len(found), item))

    def _drawn(
        self, task: Task, finalists: Sequence[Result], configs: Mapping[str, KernelConfig]
    ) -> dict[str, list[float]]:
        """Times of the rounds by kernel. The first finalist is timed before and after each as well: a round in which
        it took longer than in another, as it does while clocks are held down, is thrown away and made again.
        """
        anchor, fastest = finalists[0], math.inf
        rounds: list[tuple[float, dict[str, float]]] = []
        for draw in range(self._draws * (1 + _MADE_AGAIN)):
            ends = [self._once_more(task, configs[anchor.kernel], anchor, _DRAW_SAMPLES)]
            times: dict[str, float] = {}
            for item in finalists if draw % 2 == 0 else finalists[::-1]:
                timed = self._once_more(task, configs[item.kernel], item, _DRAW_SAMPLES)
                if timed is not None:
                    times[item.kernel] = timed
            ends += [times.get(anchor.kernel), self._once_more(task, configs[anchor.kernel], anchor, _DRAW_SAMPLES)]
            steady = [value for value in ends if value is not None]
            fastest = min([fastest, *steady])
            rounds.append((max(steady, default=math.inf), times))
            kept = [found for slowest, found in rounds if slowest <= self._drift * fastest]
            if len(kept) == self._draws:
                break
        return {item.kernel: [found[item.kernel] for found in kept if item.kernel in found] for item in finalists}

    def _peer(self, task: Task) -> PeerTime | None:
        if task.case not in self._peers:
            self._peers = {task.case: super()._peer(task)}
        return self._peers[task.case]

    def _once_more(self, task: Task, config: KernelConfig, item: Result, samples: int) -> float | None:
        job = Job(task, config, item.place, toolchain=item.toolchain)
        timed = self._measured(job, max(HEAT, samples), check=False, limit_ns=0.0)
        return timed.median_ns if timed.status == "ok" else None


@dataclass(frozen=True, slots=True)
class Score:
    """The efficiencies of the server's choice over the problems of an oracle, sorted, by the second timing."""

    efficiencies: tuple[float, ...]
    repeatability: float
    """Median over problems of the winner's second timing over its first, as a distance from one."""

    @property
    def mean(self) -> float:
        return math.fsum(self.efficiencies) / len(self.efficiencies)

    def __str__(self) -> str:
        found = self.efficiencies
        p10 = found[max(0, math.ceil(len(found) / 10) - 1)]
        return (
            f"chosen against the oracle: {len(found)} problems   mean {self.mean:.3f}   median "
            f"{statistics.median(found):.3f}   10th percentile {p10:.3f}   worst {found[0]:.3f}   "
            f"repeatability {self.repeatability:.3f}"
        )


def score(results: Sequence[Result]) -> Score | None:
    """Judges the choices of an oracle's rows; None if no problem has both timings."""
    problems: dict[Any, Mapping[str, Result]] = {}
    for item in results:
        if item.again_ns:
            problems[item.case] = {**problems.get(item.case, {}), item.kernel: item}
    found, moved = [], []
    for rows in problems.values():
        best = min(rows.values(), key=lambda item: item.median_ns)
        chosen = next((item for item in rows.values() if item.place == 1), None)
        if chosen is not None:
            # A choice that the second timing finds faster than the winner is as good as it, not better.
            found.append(min(1.0, best.again_ns / chosen.again_ns))
            moved.append(abs(best.again_ns / best.median_ns - 1.0))
    return Score(tuple(sorted(found)), statistics.median(moved)) if found else None
