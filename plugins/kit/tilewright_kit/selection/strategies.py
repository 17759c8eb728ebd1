"""Strategies: which of the candidates runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Protocol, TypeVar, runtime_checkable

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import KernelKey, alias_of
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.abilities import RejectsDevices
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation, Prediction, predictions_of
from tilewright_kit.contract.problem import Problem
from tilewright_kit.types.errors import ConfigInvalidError, NotFoundError, UnsupportedError

__all__ = [
    "LEARNED", "MEASURED", "MODEL", "NEIGHBOURS", "Explicit", "FirstFit", "Heuristic", "Proposes", "Ranked", "Selector",
    "Strategy", "ordered",
]  # fmt: skip


MEASURED, NEIGHBOURS, LEARNED, MODEL = "measured", "neighbours", "learned", "model"
"""Sources of places."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate in its place, with what decided it."""

    config: KernelConfig
    reason: str
    prediction: Prediction | None = None
    source: str = ""
    """Source of the place: ``measured`` (this problem), ``neighbours`` (measured on problems near it), ``learned`` (a
    learned model) or ``model`` (the operation's own); empty where no time decided.
    """
    spread: tuple[float, float] | None = None
    """Seconds below which a tenth, and nine tenths, of the measured times were."""


T = TypeVar("T")


def ordered(items: Iterable[T], key: Callable[[T], Any], name: Callable[[T], str]) -> list[T]:
    """``items`` by ``key``, those of equal keys by ``name``: names of kernels are costly, and seldom decide."""
    found: list[T] = []
    for _, equal in groupby(sorted(items, key=key), key):
        group = list(equal)
        found += sorted(group, key=name) if len(group) > 1 else group
    return found


class Strategy(Protocol):
    """Orders candidates, best first. Deterministic: the same inputs give the same order."""

    name: str

    def rank(
        self, operation: Operation[Any, Any], problem: Problem, candidates: Sequence[KernelConfig], device: DeviceInfo
    ) -> Sequence[Ranked]: ...


@runtime_checkable
class Proposes(Protocol):
    """A strategy that knows kernels by itself, so that the operation need not make candidates."""

    def propose(self, operation: Operation[Any, Any], problem: Problem, device: DeviceInfo) -> Sequence[Ranked]:
        """Usable kernels, best first; empty if candidates have to be ranked."""
        ...


class FirstFit:
    """The candidates in the operation's own order."""

    name = "first_fit"

    def rank(
        self,
        operation: Operation[Any, Any],  # noqa: ARG002
        problem: Problem,  # noqa: ARG002
        candidates: Sequence[KernelConfig],
        device: DeviceInfo,  # noqa: ARG002
    ) -> Sequence[Ranked]:
        return [Ranked(config, f"candidate {place} in declared order") for place, config in enumerate(candidates, 1)]


class Heuristic:
    """By predicted time, the fastest first; kernels of equal time by name."""

    name = "heuristic"

    def rank(
        self, operation: Operation[Any, Any], problem: Problem, candidates: Sequence[KernelConfig], device: DeviceInfo
    ) -> Sequence[Ranked]:
        known = predictions_of(candidates)
        predicted = [(config, known.get(config) or operation.predict(problem, config, device)) for config in candidates]

        def order(item: tuple[KernelConfig, Prediction]) -> tuple[bool, float]:
            seconds = item[1].seconds
            # A model that fails on a kernel must not make it win, and NaN has no order.
            usable = math.isfinite(seconds)
            return not usable, seconds if usable else 0.0

        return [
            Ranked(
                config,
                f"predicted {prediction.seconds * 1e6:.3g} us"
                if math.isfinite(prediction.seconds)
                else "no usable prediction",
                prediction,
                MODEL,
            )
            for config, prediction in ordered(predicted, order, lambda item: item[0].name)
        ]


class Explicit:
    """The kernel that the caller names: a configuration, its key, the text of its key, its name, or its alias.

    ``rank`` gives that one kernel. It looks among the candidates and then in all kernel sets of the operation, so that
    a kernel that was not proposed can still be tried. It raises ``NotFoundError`` if there is no such kernel,
    ``ConfigInvalidError`` if rules reject it on the device's arch and ``UnsupportedError`` if it cannot compute the
    problem; the latter two carry all violations.
    """

    name = "explicit"

    def __init__(self, kernel: KernelConfig | KernelKey | str) -> None:
        self.kernel = kernel

    def rank(
        self, operation: Operation[Any, Any], problem: Problem, candidates: Sequence[KernelConfig], device: DeviceInfo
    ) -> Sequence[Ranked]:
        config = self._find(operation, candidates, device)
        operation.rules.require(config, device.arch)
        violations = tuple(operation.mismatches(problem, config, device))
        if violations:
            first = violations[0]
            raise UnsupportedError(
                f"{config.name} cannot compute this problem: {first.reason}",
                field=first.field,
                value=first.value,
                rule=first.rule,
                fix=first.fix_text,
                violations=violations,
            )
        return [Ranked(config, "named by the caller")]

    def _find(
        self, operation: Operation[Any, Any], candidates: Sequence[KernelConfig], device: DeviceInfo
    ) -> KernelConfig:
        if isinstance(self.kernel, KernelConfig):
            return self.kernel
        arch = device.arch
        known: Iterable[KernelConfig] = chain(
            candidates, *(kernels.expand(arch, operation.rules) for kernels in operation.kernel_sets.values())
        )
        for config in known:
            if self._is(config, arch.id):
                return config
        # A kernel that is declared but invalid deserves its reasons rather than "not found".
        for kernels in operation.kernel_sets.values():
            for config, violations in kernels.rejected(arch, operation.rules):
                if self._is(config, arch.id):
                    raise ConfigInvalidError(
                        f"{config.name} is not valid on {arch.id}: {violations[0].reason}",
                        field=violations[0].field,
                        value=violations[0].value,
                        rule=violations[0].rule,
                        fix=violations[0].fix_text,
                        violations=violations,
                    )
        raise NotFoundError(
            f"operation {operation.name!r} has no kernel of that name for {arch.id}",
            field="kernel",
            value=str(self.kernel),
            rule="kernel_name",
            fix="name one of its kernels, or leave the choice to a strategy",
        )

    def _is(self, config: KernelConfig, arch: str) -> bool:
        name = config.name
        if isinstance(self.kernel, KernelKey):
            return name == self.kernel.name and config.key(arch) == self.kernel
        # The text of a key begins with the name, which is far cheaper than the digest.
        text = str(self.kernel)
        if text.startswith("@"):
            return alias_of(name) == text
        return name == text or (text.startswith(f"{name}@") and str(config.key(arch)) == text)


class Selector:
    """Asks an operation for candidates and a strategy for their order."""

    def __init__(self, strategy: Strategy | None = None) -> None:
        self.strategy: Strategy = strategy or Heuristic()

    def rank(self, operation: Operation[Any, Any], problem: Problem, device: DeviceInfo) -> Sequence[Ranked]:
        """Usable kernels, best first: what the strategy proposes, else the operation's candidates. Raises what the
        strategy raises; ``UnsupportedError`` if there is none.
        """
        if isinstance(self.strategy, Proposes):
            proposed = self.strategy.propose(operation, problem, device)
            if proposed:
                return proposed
        candidates = operation.candidates(problem, device)
        ranked = self.strategy.rank(operation, problem, candidates, device)
        if ranked:
            return ranked
        violations = _why_none(operation, problem, device)
        raise UnsupportedError(
            f"no kernel of {operation.name!r} computes this problem on {device.arch.id}"
            + (f": {violations[0].reason}" if violations else ""),
            field=violations[0].field if violations else "problem",
            value=violations[0].value if violations else problem.describe(),
            rule=violations[0].rule if violations else "no_candidates",
            fix=(violations[0].fix_text if violations else "") or "change what the reason names, or use another device",
            violations=violations,
        )

    def select(self, operation: Operation[Any, Any], problem: Problem, device: DeviceInfo) -> Ranked:
        """The best kernel; raises as ``rank`` does."""
        return self.rank(operation, problem, device)[0]


def _why_none(operation: Operation[Any, Any], problem: Problem, device: DeviceInfo) -> tuple[Violation, ...]:
    """The reasons why kernels of the default set reject the problem, each once, the most frequent first; or the
    operation's own reason if it ``RejectsDevices``.
    """
    if isinstance(operation, RejectsDevices) and (violation := operation.refusal(problem, device)) is not None:
        return (violation,)
    kernels = operation.kernel_sets.get("default")
    if kernels is None:
        return ()
    counts: dict[tuple[str, str], tuple[int, Violation]] = {}
    for config in kernels.expand(device.arch, operation.rules):
        for violation in operation.mismatches(problem, config, device):
            count, first = counts.get((violation.rule, violation.field), (0, violation))
            counts[violation.rule, violation.field] = (count + 1, first)
    return tuple(violation for _, violation in sorted(counts.values(), key=lambda item: -item[0]))
