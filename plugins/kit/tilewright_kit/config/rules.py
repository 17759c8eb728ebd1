"""Rules: named functions that say what is wrong with a configuration, why, and how to correct it.

A rule is the one statement of its constraint. Validation collects what rules report, auto-correction applies their
fixes, declarations filter by them, and code generation rejects what they reject. A rule that concerns only some kinds
of device is marked with ``rule_of``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import update_wrapper
from typing import ClassVar, Generic, TypeVar

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.types.errors import ConfigInvalidError
from tilewright_kit.types.violation import Violation

__all__ = ["Correction", "KindRule", "Rule", "RuleBook", "Violation", "rule_of"]

C = TypeVar("C", bound=KernelConfig)
Judged = TypeVar("Judged", contravariant=True)
"""Configurations of an operation, or all that have certain fields."""


Rule = Callable[[C, ArchSpec], Iterable[Violation]]


class KindRule(Generic[Judged]):
    """A rule of some kinds of device, which nothing breaks on others. A rule book does not evaluate it there."""

    def __init__(self, rule: Callable[[Judged, ArchSpec], Iterable[Violation]], kinds: tuple[str, ...]) -> None:
        update_wrapper(self, rule)
        self.rule = rule
        self.kinds = frozenset(kinds)

    def __call__(self, config: Judged, arch: ArchSpec) -> Iterable[Violation]:
        """Violations on an arch of its kinds; none elsewhere."""
        return self.rule(config, arch) if arch.kind in self.kinds else ()


def rule_of(*kinds: str) -> Callable[[Callable[[Judged, ArchSpec], Iterable[Violation]]], KindRule[Judged]]:
    """Decorator of rules that concern only these kinds of device: ``cpu``, ``cuda``, ``hip``."""
    return lambda rule: KindRule(rule, kinds)


@dataclass(frozen=True, slots=True)
class Correction(Generic[C]):
    """The result of auto-correction. ``remaining`` is empty exactly if ``config`` is valid."""

    config: C
    applied: tuple[Violation, ...]
    remaining: tuple[Violation, ...]

    @property
    def is_valid(self) -> bool:
        return not self.remaining

    @property
    def changed(self) -> bool:
        return bool(self.applied)


class RuleBook(Generic[C]):
    """The rules of one operation, in the order in which they are checked and corrected."""

    MAX_FIXES: ClassVar[int] = 64
    """A correction that takes more fixes than this is going nowhere: some rule always asks for a larger value."""

    def __init__(self, rules: Iterable[Rule[C]]) -> None:
        self.rules: tuple[Rule[C], ...] = tuple(rules)
        self._by_kind: dict[str, tuple[Rule[C], ...]] = {}

    def _rules_of(self, kind: str) -> tuple[Rule[C], ...]:
        """The rules that concern a kind of device, in order."""
        found = self._by_kind.get(kind)
        if found is None:
            concerned = (rule for rule in self.rules if not isinstance(rule, KindRule) or kind in rule.kinds)
            found = tuple(rule.rule if isinstance(rule, KindRule) else rule for rule in concerned)
            self._by_kind[kind] = found
        return found

    def check(self, config: C, arch: ArchSpec) -> tuple[Violation, ...]:
        """Everything that is wrong with ``config`` on ``arch``; empty if it is valid."""
        return tuple(violation for rule in self._rules_of(arch.kind) for violation in rule(config, arch))

    def allows(self, config: C, arch: ArchSpec) -> bool:
        """True if ``config`` is valid on ``arch``; stops at the first broken rule."""
        for rule in self._rules_of(arch.kind):
            for _ in rule(config, arch):
                return False
        return True

    def require(self, config: C, arch: ArchSpec) -> None:
        """Raise ``ConfigInvalidError`` with all violations if there are any."""
        violations = self.check(config, arch)
        if violations:
            first = violations[0]
            raise ConfigInvalidError(
                f"{config.name} is not valid on {arch.id}: {first.reason}"
                + (f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""),
                field=first.field,
                value=first.value,
                rule=first.rule,
                fix=first.fix_text,
                violations=violations,
            )

    def correct(self, config: C, arch: ArchSpec) -> Correction[C]:
        """Apply fixes, the first fixable violation at a time, until the configuration is valid or no fix helps.

        Deterministic. Ends, because no configuration is tried twice and ``MAX_FIXES`` bounds the fixes.
        """
        applied: list[Violation] = []
        seen = {config}
        while True:
            violations = self.check(config, arch)
            if len(applied) == self.MAX_FIXES:
                return Correction(config, tuple(applied), violations)
            mended = next(
                (
                    item
                    for item in (
                        (violation, config.replace(**violation.fix)) for violation in violations if violation.fix
                    )
                    if item[1] not in seen
                ),
                None,
            )
            if mended is None:
                return Correction(config, tuple(applied), violations)
            violation, config = mended
            applied.append(violation)
            seen.add(config)
