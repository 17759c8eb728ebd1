"""Reading requests: attributes and tensors, each checked, with an error that says what would do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_kit.types.vocabulary import SLOPES, UNARY_ALIASES, Binary, Unary, Word

__all__ = [
    "DEFAULT_ALIGNMENT",
    "MAX_SPLIT_K",
    "PRODUCT_ATTRIBUTES",
    "ProductAttributes",
    "check_tensor",
    "known_names",
    "refuse",
    "suggest",
    "take_alignment",
    "take_choice",
    "take_clamp",
    "take_dtype",
    "take_finite",
    "take_flag",
    "take_int",
    "take_product",
    "take_word",
    "wrong_type",
]

W = TypeVar("W", bound=Word)

MAX_SPLIT_K = 255
DEFAULT_ALIGNMENT = 16
"""Bytes: every allocator aligns so; a view that begins elsewhere needs the attribute ``alignment``."""
MAX_ALIGNMENT = 128

PRODUCT_ATTRIBUTES = (
    "alpha", "binary", "unary", "clamp_lo", "clamp_hi", "slope", "out_dtype", "split_k", "alignment",
    "fast_accumulation",
)  # fmt: skip
"""Attributes of every operation that computes products of matrices and elementwise steps behind them."""


@dataclass(frozen=True, slots=True)
class ProductAttributes:
    """``PRODUCT_ATTRIBUTES``, checked. Operations add their own."""

    alpha: float = 1.0
    binary: Binary | None = None
    """None if the caller named none."""
    unary: Unary = Unary.NONE
    clamp_lo: float = 0.0
    """Lower bound of ``Clamp``; of ``LeakyRelu`` and ``Elu`` the factor below zero."""
    clamp_hi: float = 0.0
    out_dtype: DType | None = None
    split_k: int = 0
    alignment: int = DEFAULT_ALIGNMENT
    """Bytes of which the caller promises that the address of every operand is a multiple; at most what kernels ask
    for, so that promises beyond that do not make other problems.
    """
    fast_accumulation: bool = False
    """8-bit floats may be summed as the matrix unit does it, with fewer bits than fp32."""


def refuse(reason: str, field: str, value: object, rule: str, fix: str) -> InvalidArgumentError:
    """The error for a request that breaks ``rule``."""
    return InvalidArgumentError(reason, field=field, value=value, rule=rule, fix=fix)


def take_product(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``ProductAttributes``."""
    unary = take_choice(given, "unary", Unary, UNARY_ALIASES) or Unary.NONE
    slope = take_slope(given, unary)
    lo, hi = (slope, 0.0) if unary in SLOPES else take_clamp(given, unary)
    return {
        "alpha": take_finite(given, "alpha", 1.0),
        "binary": take_choice(given, "binary", Binary, {}),
        "unary": unary,
        "clamp_lo": lo,
        "clamp_hi": hi,
        "out_dtype": take_dtype(given, "out_dtype"),
        "split_k": take_int(given, "split_k", 0, 0, MAX_SPLIT_K),
        "alignment": min(take_alignment(given), DEFAULT_ALIGNMENT),
        "fast_accumulation": take_flag(given, "fast_accumulation"),
    }


def take_alignment(given: Mapping[str, Any]) -> int:
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


def take_flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise wrong_type(name, value, "true or false")
    return value


def known_names(given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise refuse(
                f"there is no attribute {name!r}",
                f"attributes.{name}",
                given[name],
                "attribute_known",
                suggest(str(name), known),
            )


def take_int(given: Mapping[str, Any], name: str, default: int, lowest: int, highest: int) -> int:
    if name not in given:
        return default
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, value, "an integer")
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
        raise wrong_type(name, value, "the name of an element type")
    if str(value) not in DType._value2member_map_:
        raise refuse(
            f"{name} names no element type",
            f"attributes.{name}",
            value,
            "attribute_choice",
            suggest(value, [item.value for item in DType]),
        )
    return DType(value)


def take_choice(given: Mapping[str, Any], name: str, words: type[W], aliases: Mapping[str, str]) -> W | None:
    """An elementwise step; None if the attribute is not there."""
    return take_word(given, name, words, aliases, "an elementwise step")


def take_word(given: Mapping[str, Any], name: str, words: type[W], aliases: Mapping[str, str], what: str) -> W | None:
    """One of ``words`` by its value or an alias; None if the attribute is not there. ``what`` it is, as a phrase:
    ``a mask``.
    """
    if name not in given:
        return None
    value = given[name]
    if not isinstance(value, str):
        raise wrong_type(name, value, "a name")
    value = aliases.get(value, value)
    choices = [word.value for word in words]
    if value not in choices:
        raise refuse(
            f"{name} {value!r} is not {what}",
            f"attributes.{name}",
            value,
            "attribute_choice",
            suggest(value, choices),
        )
    return words(value)


def _number(given: Mapping[str, Any], name: str, default: float, fits: Callable[[float], bool], what: str) -> float:
    if name not in given:
        return default
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong_type(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if not fits(number):
        raise refuse(f"{name} must be {what}", f"attributes.{name}", value, "attribute_range", f"give {what}")
    return number


def take_finite(given: Mapping[str, Any], name: str, default: float) -> float:
    return _number(given, name, default, math.isfinite, "a finite number")


def take_clamp(given: Mapping[str, Any], unary: Unary) -> tuple[float, float]:
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


def take_slope(given: Mapping[str, Any], unary: Unary) -> float:
    """The factor below zero; 0 for steps without one."""
    if unary not in SLOPES and "slope" in given:
        raise refuse(
            f"slope is given, but the unary step is {unary}",
            "attributes.slope",
            given["slope"],
            "slope_step",
            f"set unary to {' or '.join(SLOPES)}, or leave slope out",
        )
    return take_finite(given, "slope", SLOPES.get(unary, 0.0))


def wrong_type(name: str, value: object, wanted: str) -> InvalidArgumentError:
    return refuse(
        f"{name} must be {wanted}, not {type(value).__name__}",
        f"attributes.{name}",
        value,
        "attribute_type",
        f"give {wanted}",
    )


def suggest(value: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
    return (f"did you mean {close[0]}? " if close else "") + f"use one of: {', '.join(known)}"


def check_tensor(name: str, desc: Any) -> None:
    """Raise ``InvalidArgumentError`` unless ``desc`` is a tensor whose sizes and strides make sense."""
    if not isinstance(desc, TensorDesc):
        raise refuse(
            f"{name} is not a tensor", str(name), type(desc).__name__, "tensor_type", "give a tensor description"
        )
    numbers = (*desc.shape, *desc.strides)
    if not isinstance(desc.dtype, DType) or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        raise refuse(
            f"{name} is malformed", str(name), desc, "tensor_type", "give an element type and integer sizes and strides"
        )
    desc.check(name)
