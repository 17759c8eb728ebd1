"""Rows of the table of settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ENV_PREFIX", "Setting", "setting"]

ENV_PREFIX = "TILEWRIGHT_"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    ``default`` may be ``None`` where it depends on the machine; ``doc`` then says what it becomes.
    """

    name: str
    kind: str
    default: Any
    doc: str
    parse: Callable[[Any], Any]

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def setting(default: Any, kind: str, parse: Callable[[Any], Any], doc: str) -> Any:
    """A field of ``Settings`` that is a row of the table."""
    return field(default=default, metadata={"kind": kind, "parse": parse, "doc": doc})
