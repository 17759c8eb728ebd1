"""Values of settings, from the text of a variable or a flag, or from a file. Each raises ``ValueError``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError, UnsupportedError

__all__ = ["choice", "count", "flag", "number", "pair", "path", "read_file", "seconds", "size", "text", "uids", "words"]

T = TypeVar("T")


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


def uids(value: Any) -> tuple[int, ...]:
    """Numbers of users."""
    items = value if isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value) else words(value)
    return tuple(count(0, 2**32 - 2)(item) for item in items)


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


def pair(item: Callable[[Any], T]) -> Callable[[Any], tuple[T, T]]:
    """Two values of a kind, with a comma between them or as a list."""

    def parse(value: Any) -> tuple[T, T]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or len(parts) != 2:
            raise ValueError("expected two values with a comma between them")
        return item(parts[0]), item(parts[1])

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


def read_file(path: Path) -> dict[str, Any]:
    """Content of a settings file. Raises ``NotFoundError``, ``InvalidArgumentError``, ``UnsupportedError``."""
    try:
        content = path.read_bytes().decode()
    except FileNotFoundError:
        raise NotFoundError(
            "there is no such settings file",
            field="config",
            value=str(path),
            rule="settings_file",
            fix="name a TOML file, or leave it out",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"cannot read the settings file: {error}",
            field="config",
            value=str(path),
            rule="settings_file",
            fix="make it a text file in UTF-8 that the server's user can read",
        ) from error
    toml = _toml()
    try:
        parsed: dict[str, Any] = toml.loads(content)
    except toml.TOMLDecodeError as error:
        raise InvalidArgumentError(
            f"the settings file is not TOML: {error}",
            field="config",
            value=str(path),
            rule="settings",
            fix='write lines such as queue_limit = 256 or strategy = "heuristic"',
        ) from error
    return parsed


def _toml() -> Any:
    """The TOML reader: standard from Python 3.11, the package ``tomli`` before."""
    import importlib

    try:
        return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise UnsupportedError(
            "settings files need a TOML reader on Python 3.10",
            field="config",
            rule="settings_file",
            fix="pip install tomli, or use flags",
        ) from None
