"""Parameters of commands, declared as data: an operation says what it takes, the command line makes options of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

__all__ = ["REQUIRED", "Parameter", "argument", "flag", "option"]

REQUIRED: Final = object()
"""Default of a parameter that must be given."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument or option of a command."""

    name: str
    """Key under which the value is handed on; the option is called likewise unless ``flags`` say otherwise."""
    kind: type[Any]
    """``int``, ``str`` or ``bool``."""
    help: str
    default: Any = REQUIRED
    flags: tuple[str, ...] = ()
    """Spellings of an option: ``--heads-k``."""
    positional: bool = False
    metavar: str = ""
    least: int | None = None
    """Smallest value of a number."""
    words: tuple[str, ...] = ()
    """Values that the shell completes."""
    strict: bool = False
    """Only ``words`` are accepted."""
    swept: bool = True
    """A column of the operation's cases, so that sweeps can have it."""
    repeated: bool = False
    """The option may be given several times; the value is a list."""


def argument(name: str, kind: type[Any], help: str, metavar: str = "") -> Parameter:
    """A positional parameter."""
    return Parameter(name, kind, help, positional=True, metavar=metavar)


def option(name: str, default: Any, help: str, *flags: str, **more: Any) -> Parameter:
    """An option with a text or a whole number as its default; ``more`` are further fields of ``Parameter``."""
    return Parameter(name, more.pop("kind", type(default)), help, default, flags, **more)


def flag(name: str, help: str, *flags: str, **more: Any) -> Parameter:
    """An option that is off unless it is given; ``more`` are further fields of ``Parameter``."""
    return Parameter(name, bool, help, False, flags, **more)
