"""One broken rule, as validation, errors and explanations report it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Violation"]


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: which field has which value, why that cannot be, and the change that corrects it.

    ``fix`` is empty if no single change corrects it.
    """

    rule: str
    field: str
    value: Any
    reason: str
    fix: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def fix_text(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.fix.items())

    def to_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "field": self.field,
            "value": self.value,
            "reason": self.reason,
            "fix": dict(self.fix),
        }
