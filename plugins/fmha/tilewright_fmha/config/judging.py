"""Helpers of rules: judging a field against one value, and sizes that rules mend towards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.vocabulary import Family
from tilewright_kit.config.rules import Violation

__all__ = [
    "is_well_formed",
    "must_be",
    "plain",
    "replaced",
    "tile_length",
    "wanted_values",
]


def tile_length(config: FmhaConfig) -> int:
    return 9 if config.family is Family.DQ_DK_DV else 6


def is_well_formed(config: FmhaConfig) -> bool:
    """Tiles and waves are as long as they must be, and positive: without that, nothing else can be said of them."""
    lengths = ((config.tile, tile_length(config)), (config.wave, 9), (config.warp_tile, 9))
    return all(len(numbers) == length and min(numbers, default=0) >= 1 for numbers, length in lengths)


def must_be(
    rule: str, config: FmhaConfig, name: str, wanted: Any, reason: str, more: Mapping[str, Any] | None = None
) -> Iterator[Violation]:
    """A violation unless the field has the one value that it may have; ``more`` joins its fix."""
    have = getattr(config, name)
    if have != wanted:
        yield Violation(rule, name, plain(have), reason, {name: wanted, **(more or {})})


def wanted_values(
    rule: str, config: FmhaConfig, wanted: Mapping[str, Any], reason: str, names: Collection[str] = ()
) -> Iterator[Violation]:
    """The same for several fields (default: all of ``wanted``)."""
    for name in names or wanted:
        yield from must_be(rule, config, name, wanted[name], f"{reason}: {name} is {_text(wanted[name])}")


def replaced(tile: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    """``tile`` with another number in one place."""
    return (*tile[:index], value, *tile[index + 1 :])


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _text(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(plain(value))
