"""Plain arguments of calls: numbers, flags and words, so that what is none of these is refused by name."""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np

from tilewright.errors import InvalidArgumentError

__all__ = ["Placement", "Priority", "check_name", "check_placement", "check_priority", "flag", "number", "unless"]

Placement = Literal["auto", "caller", "server"]
"""Process that launches: this one, the server, or this one where it can."""


Priority = Literal["interactive", "batch", "background"]
"""Urgency of a client's work on a busy server."""


def check_priority(value: Any) -> Priority:
    """Raises ``InvalidArgumentError`` for what is none."""
    if not isinstance(value, str) or value not in ("interactive", "batch", "background"):
        raise InvalidArgumentError(
            "there is no such priority",
            field="priority",
            value=value,
            rule="priority",
            fix="use interactive, batch or background",
        )
    return cast(Priority, value)


def check_placement(value: Any) -> Placement:
    """Raises ``InvalidArgumentError`` for what is none."""
    if not isinstance(value, str) or value not in ("auto", "caller", "server"):
        raise InvalidArgumentError(
            "a launch is made by the caller, by the server, or by whoever can",
            field="launch",
            value=value,
            rule="launch_placement",
            fix="use auto, caller or server",
        )
    return cast(Placement, value)


def check_name(field: str, value: Any) -> None:
    """Raises ``InvalidArgumentError`` for what is given and no text."""
    if value is not None and not isinstance(value, str):
        raise InvalidArgumentError(f"{field} is not a name", field=field, value=value, rule="name", fix="give a str")


def number(field: str, value: Any) -> float:
    """Raises ``InvalidArgumentError`` for what is no number (true and false included), or an int too large for one."""
    try:
        if not isinstance(value, bool) and isinstance(value, (int, float, np.integer, np.floating)):
            return float(value)
    except OverflowError:
        pass
    raise InvalidArgumentError(
        f"{field} must be a number",
        field=field,
        value=value,
        rule="attribute_type",
        fix="give a float, or an int that fits into one",
    )


def flag(field: str, value: Any) -> bool:
    """True if something is wanted; None: it is not. Raises ``InvalidArgumentError`` for what is neither true nor false:
    of texts and arrays Python would take most for true.
    """
    if value is None:
        return False
    if not isinstance(value, (bool, np.bool_)) and not (isinstance(value, (int, np.integer)) and value in (0, 1)):
        raise InvalidArgumentError(
            f"{field} is true or false", field=field, value=value, rule="attribute_type", fix="give True or False"
        )
    return bool(value)


def unless(value: Any, default: float | str) -> Any:
    """None for the default, which the server knows, and else the value: what is neither is the server's to refuse."""
    return None if isinstance(value, (int, float, str, np.generic)) and value == default else value
