"""Values of settings, from the text of a variable or a flag, or from a file. Each raises ``ValueError``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["choice", "count", "flag", "number", "path", "seconds", "size", "text", "words"]


def text(value: Any) -> str:
    """A value that is text."""
    if not isinstance(value, str):
        raise ValueError("expected text")
    return value


def flag(value: Any) -> bool:
    """A value that is true or false, in one of the usual words."""
    if isinstance(value, bool):
        return value
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if not isinstance(value, str) or value.strip().lower() not in known:
        raise ValueError("expected true or false")
    return known[value.strip().lower()]


def words(value: Any) -> tuple[str, ...]:
    """Several words, with commas between them or as a list."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError("expected a list of words")
    return tuple(value)


def path(value: Any) -> Path:
    """A path, `~` resolved."""
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError("expected a path")
    return Path(value).expanduser()


def count(least: int, most: int) -> Callable[[Any], int]:
    """A whole number within bounds."""

    def parse(value: Any) -> int:
        if isinstance(value, (bool, float)):
            raise ValueError("expected a whole number")
        number = int(value)
        if not least <= number <= most:
            raise ValueError(f"expected {least} to {most}")
        return number

    return parse


_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def size(least: int, most: int) -> Callable[[Any], int]:
    """Bytes, or a number with a unit."""

    def parse(value: Any) -> int:
        if isinstance(value, str):
            text = value.strip().lower()
            digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
            unit = text[len(digits) :].strip()
            if unit not in _UNITS or not digits.strip().isdigit():
                raise ValueError("expected bytes, or a number with KiB, MiB, GiB or TiB")
            value = int(digits) * _UNITS[unit]
        return count(least, most)(value)

    return parse


def seconds(least: float, most: float) -> Callable[[Any], float]:
    """A time within bounds."""

    def parse(value: Any) -> float:
        number = float(value)
        if not least <= number <= most:  # also refuses NaN
            raise ValueError(f"expected {least:g} to {most:g} seconds")
        return number

    return parse


def choice(*allowed: str) -> Callable[[Any], str]:
    """One of a few words."""

    def parse(value: Any) -> str:
        if value not in allowed:
            raise ValueError("expected one of " + ", ".join(allowed))
        return str(value)

    return parse


def number(least: float, most: float) -> Callable[[Any], float]:
    """A number within bounds."""

    def parse(value: Any) -> float:
        found = float(value)
        if not least <= found <= most:  # also refuses NaN
            raise ValueError(f"expected {least:g} to {most:g}")
        return found

    return parse
