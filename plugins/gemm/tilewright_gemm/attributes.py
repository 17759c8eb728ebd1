"""Reading the attributes of a request: each checked, with an error that says what would do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tilewright_gemm.words import UNARY_ALIASES, Binary, Unary, Word
from tilewright_kit.dtypes import DType
from tilewright_kit.errors import InvalidArgumentError

__all__ = [
    "DEFAULT_ALIGNMENT",
    "MAX_GROUPS",
    "MAX_SPLIT_K",
    "Attributes",
    "read_attributes",
    "refuse",
    "take_dtype",
    "take_int",
]

W = TypeVar("W", bound=Word)

MAX_SPLIT_K = 255
MAX_GROUPS = 4096
DEFAULT_ALIGNMENT = 16
"""What every allocator gives; a view that begins elsewhere needs the attribute ``alignment``."""
MAX_ALIGNMENT = 128
_KNOWN = (
    "alpha", "binary", "unary", "clamp_lo", "clamp_hi", "out_dtype", "split_k", "groups", "alignment",
    "fast_accumulation",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Attributes:
    alpha: float = 1.0
    binary: Binary | None = None
    """None if the caller named none."""
    unary: Unary = Unary.PASS
    clamp_lo: float = 0.0
    clamp_hi: float = 0.0
    out_dtype: DType | None = None
    split_k: int = 0
    groups: int = 0
    """0: not grouped, unless the operands' names say so."""
    alignment: int = DEFAULT_ALIGNMENT
    """Bytes of which the caller promises that the address of every operand is a multiple."""
    fast_accumulation: bool = False
    """8-bit floats may be summed as the matrix unit does it, with fewer bits than fp32."""


def refuse(reason: str, field: str, value: object, rule: str, fix: str) -> InvalidArgumentError:
    """The error for a request that breaks ``rule``."""
    return InvalidArgumentError(reason, field=field, value=value, rule=rule, fix=fix)


def read_attributes(given: Mapping[str, Any]) -> Attributes:
    """Check all attributes of a GEMM request. Raises ``InvalidArgumentError``."""
    known_names(given, _KNOWN)
    unary = _choice(given, "unary", Unary, UNARY_ALIASES) or Unary.PASS
    lo, hi = _clamp(given, unary)
    return Attributes(
        alpha=_finite(given, "alpha", 1.0),
        binary=_choice(given, "binary", Binary, {}),
        unary=unary,
        clamp_lo=lo,
        clamp_hi=hi,
        out_dtype=take_dtype(given, "out_dtype"),
        split_k=take_int(given, "split_k", 0, 0, MAX_SPLIT_K),
        groups=take_int(given, "groups", 0, 0, MAX_GROUPS),
        alignment=_alignment(given),
        fast_accumulation=_flag(given, "fast_accumulation"),
    )


def _alignment(given: Mapping[str, Any]) -> int:
    value = take_int(given, "alignment", DEFAULT_ALIGNMENT, 1, MAX_ALIGNMENT)
    if value & (value - 1):
        raise refuse(
            "alignment must be a power of two",
            "attributes.alignment",
            value,
            "attribute_range",
            f"use 1, 2, 4, ... {MAX_ALIGNMENT}: the largest that divides the addresses of all operands",
        )
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise _wrong_type(name, value, "true or false")
    return value


def known_names(given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise refuse(
                f"there is no attribute {name!r}",
                f"attributes.{name}",
                given[name],
                "attribute_known",
                _suggest(str(name), known),
            )


def take_int(given: Mapping[str, Any], name: str, default: int, lowest: int, highest: int) -> int:
    if name not in given:
        return default
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(name, value, "an integer")
    if not lowest <= value <= highest:
        raise refuse(
            f"{name} must be from {lowest} to {highest}",
            f"attributes.{name}",
            value,
            "attribute_range",
            f"use a value from {lowest} to {highest}",
        )
    return value


def take_dtype(given: Mapping[str, Any], name: str) -> DType | None:
    if name not in given:
        return None
    value = given[name]
    if not isinstance(value, str):
        raise _wrong_type(name, value, "the name of an element type")
    if str(value) not in DType._value2member_map_:
        raise refuse(
            f"{name} names no element type",
            f"attributes.{name}",
            value,
            "attribute_choice",
            _suggest(value, [item.value for item in DType]),
        )
    return DType(value)


def _choice(given: Mapping[str, Any], name: str, words: type[W], aliases: Mapping[str, str]) -> W | None:
    if name not in given:
        return None
    value = given[name]
    if not isinstance(value, str):
        raise _wrong_type(name, value, "a name")
    value = aliases.get(value, value)
    choices = [word.value for word in words]
    if value not in choices:
        raise refuse(
            f"{name} {value!r} is not an elementwise step",
            f"attributes.{name}",
            value,
            "attribute_choice",
            _suggest(value, choices),
        )
    return words(value)


def _number(given: Mapping[str, Any], name: str, default: float, fits: Callable[[float], bool], what: str) -> float:
    if name not in given:
        return default
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong_type(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if not fits(number):
        raise refuse(f"{name} must be {what}", f"attributes.{name}", value, "attribute_range", f"give {what}")
    return number


def _finite(given: Mapping[str, Any], name: str, default: float) -> float:
    return _number(given, name, default, math.isfinite, "a finite number")


def _clamp(given: Mapping[str, Any], unary: Unary) -> tuple[float, float]:
    bounds = [name for name in ("clamp_lo", "clamp_hi") if name in given]
    if unary is not Unary.CLAMP:
        if bounds:
            raise refuse(
                f"{bounds[0]} is given, but the unary step is {unary}",
                f"attributes.{bounds[0]}",
                given[bounds[0]],
                "clamp_bounds",
                "set unary=Clamp, or leave the bounds out",
            )
        return 0.0, 0.0
    if not bounds:
        raise refuse(
            "Clamp needs a bound", "attributes.clamp_lo", "", "clamp_bounds", "give clamp_lo, clamp_hi or both"
        )

    def ordered(number: float) -> bool:
        return not math.isnan(number)

    lo = _number(given, "clamp_lo", -math.inf, ordered, "a number that is not NaN")
    hi = _number(given, "clamp_hi", math.inf, ordered, "a number that is not NaN")
    if lo > hi:
        raise refuse(
            f"clamp_lo {lo} is greater than clamp_hi {hi}", "attributes.clamp_lo", lo, "clamp_bounds", "swap the bounds"
        )
    return lo, hi


def _wrong_type(name: str, value: object, wanted: str) -> InvalidArgumentError:
    return refuse(
        f"{name} must be {wanted}, not {type(value).__name__}",
        f"attributes.{name}",
        value,
        "attribute_type",
        f"give {wanted}",
    )


def _suggest(value: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
    return (f"did you mean {close[0]}? " if close else "") + f"use one of: {', '.join(known)}"
