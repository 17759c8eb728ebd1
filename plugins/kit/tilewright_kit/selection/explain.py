"""Reasons why a kernel was chosen, and every other was not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import KernelKey
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Candidates, Operation, Prediction, predictions_of
from tilewright_kit.contract.problem import Problem
from tilewright_kit.selection.strategies import LEARNED, MEASURED, NEIGHBOURS, Ranked, Strategy
from tilewright_kit.types.errors import TilewrightError

__all__ = ["Candidate", "Explanation", "Refusal", "explain"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that can compute the problem. ``place`` counts from 1; 0 if the strategy did not rank it."""

    key: KernelKey
    config: KernelConfig
    place: int
    reason: str
    prediction: Prediction
    source: str = ""
    spread: tuple[float, float] | None = None
    modelled: Prediction | None = None
    """Time that the operation's own model expects, where the place has another source."""

    def to_dict(self) -> dict[str, Any]:
        seconds = self.prediction.seconds
        return {
            "kernel": self.key.name,
            "identifier": str(self.key),
            "place": self.place,
            "reason": self.reason,
            "predicted_seconds": _finite(seconds),
            "source": self.source,
            "spread_seconds": None if self.spread is None else list(self.spread),
            "modelled_seconds": _finite((self.modelled or self.prediction).seconds),
            "parts": {name: _finite(part) for name, part in self.prediction.parts.items()},
            "config": self.config.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Refusal:
    """A kernel of a set that was not a candidate. ``by`` is ``rules`` (never valid here) or ``problem``."""

    key: KernelKey
    config: KernelConfig
    kernel_set: str
    by: str
    violations: tuple[Violation, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.key.name,
            "identifier": str(self.key),
            "kernel_set": self.kernel_set,
            "by": self.by,
            "violations": [_jsonable(violation.to_dict()) for violation in self.violations],
            "config": self.config.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of ``explain``. ``decided`` is one sentence; ``chosen`` is None if nothing could run."""

    operation: str
    problem: Mapping[str, Any]
    device: str
    arch: str
    strategy: str
    chosen: KernelKey | None
    decided: str
    candidates: tuple[Candidate, ...]
    refused: tuple[Refusal, ...]
    refused_total: int
    """Number of refusals, of which ``refused`` has those within the limit."""
    runner_up: Candidate | None = None
    """The second in order."""
    slower_by: float | None = None
    """Part of the chosen kernel's time by which the runner-up takes longer; None where their times do not compare."""
    refused_by_rule: tuple[tuple[str, int, str], ...] = ()
    """Rule, number of kernels that it refuses first, and one of its reasons; the most frequent rule first."""

    def to_dict(self) -> dict[str, Any]:
        """The explanation as JSON values."""
        return {
            "operation": self.operation,
            "problem": _jsonable(self.problem),
            "device": self.device,
            "arch": self.arch,
            "strategy": self.strategy,
            "chosen": None if self.chosen is None else str(self.chosen),
            "decided": self.decided,
            "runner_up": None
            if self.runner_up is None
            else {"kernel": self.runner_up.key.name, "slower_by": self.slower_by},
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "refused": [refusal.to_dict() for refusal in self.refused],
            "refused_total": self.refused_total,
            "refused_by_rule": [
                {"rule": rule, "count": count, "example": example} for rule, count, example in self.refused_by_rule
            ],
        }


def explain(
    operation: Operation[Any, Any],
    problem: Problem,
    device: DeviceInfo,
    strategy: Strategy,
    *,
    limit: int | None = None,
) -> Explanation:
    """Every candidate in its place, and every kernel of the operation's sets that was rejected, with all its reasons.

    ``limit`` bounds the refusals that are spelled out. A refusal of the strategy itself (a kernel that the caller named
    cannot run, for instance) is told in ``decided`` and not raised.
    """
    offered = _predicted(operation, problem, device)
    ranked: tuple[Ranked, ...] = ()
    decided = ""
    try:
        ranked = tuple(strategy.rank(operation, problem, offered, device))
    except TilewrightError as error:
        decided = f"{strategy.name} refused: {error}"
    candidates = _candidates(operation, problem, device, offered, ranked)
    refused: list[Refusal] = []
    refused_total = 0
    rules: dict[str, tuple[int, str]] = {}
    for config, kernel_set, violations in _others(operation, device, {candidate.config for candidate in candidates}):
        refused_total += 1
        reasons = violations or tuple(operation.mismatches(problem, config, device)) or (_not_proposed(config),)
        count, example = rules.get(reasons[0].rule, (0, reasons[0].reason))
        rules[reasons[0].rule] = (count + 1, example)
        if limit is None or refused_total <= limit:
            by = "rules" if violations else "problem"
            refused.append(Refusal(config.key(device.arch.id), config, kernel_set, by, reasons))
    runner_up = next((item for item in candidates if item.place == 2), None)
    chosen = ranked[0].config.key(device.arch.id) if ranked else None
    if chosen is not None:
        decided = f"{strategy.name}: {ranked[0].reason} (1 of {len(ranked)} ranked, {refused_total} refused)"
    return Explanation(
        operation=operation.name,
        problem=problem.describe(),
        device=device.id,
        arch=device.arch.id,
        strategy=strategy.name,
        chosen=chosen,
        decided=decided or f"no candidate; {refused_total} kernels refused",
        candidates=candidates,
        refused=tuple(refused),
        refused_total=refused_total,
        runner_up=runner_up,
        slower_by=None if runner_up is None else _slower_by(candidates[0], runner_up),
        refused_by_rule=tuple(
            (rule, count, example)
            for rule, (count, example) in sorted(rules.items(), key=lambda item: (-item[1][0], item[0]))
        ),
    )


def _predicted(operation: Operation[Any, Any], problem: Problem, device: DeviceInfo) -> Candidates[KernelConfig]:
    """The candidates, each with a prediction, which the strategy takes as well: none is made twice."""
    found: Sequence[KernelConfig] = operation.candidates(problem, device)
    known = predictions_of(found)
    return Candidates(found, (known.get(config) or operation.predict(problem, config, device) for config in found))


def _candidates(
    operation: Operation[Any, Any],
    problem: Problem,
    device: DeviceInfo,
    offered: Sequence[KernelConfig],
    ranked: tuple[Ranked, ...],
) -> tuple[Candidate, ...]:
    placed, known = {item.config for item in ranked}, predictions_of(offered)
    rest = [Ranked(config, "not ranked by the strategy") for config in offered if config not in placed]
    found = []
    for place, item in enumerate([*ranked, *rest], 1):
        config = item.config
        own = known.get(config)
        if own is None and (item.prediction is None or item.source == MEASURED):
            own = operation.predict(problem, config, device)
        if item.source == LEARNED and item.prediction is not None:
            own = Prediction(item.prediction.parts["analytical"])
        prediction = item.prediction or own or operation.predict(problem, config, device)
        place = place if place <= len(ranked) else 0
        found.append(
            Candidate(config.key(device.arch.id), config, place, item.reason, prediction, item.source, item.spread, own)
        )
    return tuple(found)


def _slower_by(first: Candidate, second: Candidate) -> float | None:
    """How much longer the second takes, in parts of the first's time, where both are of one source, which decided."""
    times = (first.prediction.seconds, second.prediction.seconds)
    comparable = first.source == second.source and first.source not in ("", NEIGHBOURS)
    if not comparable or not all(map(math.isfinite, times)) or times[0] <= 0:
        return None
    return times[1] / times[0] - 1


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _others(
    operation: Operation[Any, Any], device: DeviceInfo, candidates: set[KernelConfig]
) -> Iterator[tuple[KernelConfig, str, tuple[Violation, ...]]]:
    """Every kernel of the sets that is no candidate, with its set and the rules of the arch that it breaks."""
    seen = set(candidates)
    for name, kernels in operation.kernel_sets.items():
        valid = ((config, ()) for config in kernels.expand(device.arch, operation.rules))
        for config, violations in chain(valid, kernels.rejected(device.arch, operation.rules)):
            if config not in seen:
                seen.add(config)
                yield config, name, tuple(violations)


def _not_proposed(config: KernelConfig) -> Violation:
    return Violation(
        "not_proposed", "kernel", config.name, "it could compute this, but the operation did not propose it"
    )


def _jsonable(value: Any) -> Any:
    """Violations hold whatever values a rule looked at; what JSON has no form for is shown as text."""
    if isinstance(value, Mapping):
        return {str(name): _jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
