"""Rules: named functions that say what is wrong with a configuration, why, and how to mend it.

A rule is the one statement of its constraint. Validation collects what rules report, auto-correction applies their
fixes, declarations filter by them, and code generation refuses what they refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.types.errors import ConfigInvalidError
from tilewright_kit.types.violation import Violation

__all__ = ["Correction", "Rule", "RuleBook", "Violation"]

C = TypeVar("C", bound=KernelConfig)


Rule = Callable[[C, ArchSpec], Iterable[Violation]]


@dataclass(frozen=True, slots=True)
class Correction(Generic[C]):
    """What auto-correction made of a configuration. ``remaining`` is empty exactly if ``config`` is valid."""

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
    """The rules of one operation, in the order in which they are checked and mended."""

    MAX_FIXES: ClassVar[int] = 64
    """A correction that takes more fixes than this is going nowhere: some rule always asks for a larger value."""

    def __init__(self, rules: Iterable[Rule[C]]) -> None:
        self.rules: tuple[Rule[C], ...] = tuple(rules)

    def check(self, config: C, arch: ArchSpec) -> tuple[Violation, ...]:
        """Everything that is wrong with ``config`` on ``arch``; empty if it is valid."""
        return tuple(violation for rule in self.rules for violation in rule(config, arch))

    def allows(self, config: C, arch: ArchSpec) -> bool:
        """Whether ``config`` is valid on ``arch``; stops at the first broken rule."""
        for rule in self.rules:
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
