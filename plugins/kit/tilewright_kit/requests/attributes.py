"""Reading requests: attributes and tensors, each checked, with an error that says what would do.

Attributes are read by their ``AttributeSpec``, which has names, bounds, choices and defaults.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tilewright_kit.contract.declaration import MOST_INTEGER, AttributeSpec, ValueType
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_kit.types.vocabulary import Word

__all__ = [
    "ALIGNMENT",
    "DEFAULT_ALIGNMENT",
    "check_tensor",
    "element_type",
    "flag",
    "integer",
    "known_names",
    "number",
    "refuse",
    "suggest",
    "take_alignment",
    "take_dtype",
    "take_finite",
    "take_flag",
    "take_int",
    "take_number",
    "take_word",
    "word",
    "wrong_type",
]

W = TypeVar("W", bound=Word)

DEFAULT_ALIGNMENT = 16
"""Bytes: every allocator aligns so; a view that begins elsewhere needs the attribute ``alignment``."""


# ---- declaring ----


def flag(name: str, summary: str, default: bool = False, **more: Any) -> AttributeSpec:
    return AttributeSpec(name, summary, (ValueType.FLAG,), default, **more)


def integer(
    name: str, summary: str, default: int | None, lowest: int = 0, highest: int = MOST_INTEGER, **more: Any
) -> AttributeSpec:
    return AttributeSpec(name, summary, (ValueType.INTEGER,), default, lowest=lowest, highest=highest, **more)


def number(name: str, summary: str, default: float | None, **more: Any) -> AttributeSpec:
    return AttributeSpec(name, summary, (ValueType.NUMBER,), default, **more)


def word(name: str, summary: str, choices: Sequence[str], default: str | None = None, **more: Any) -> AttributeSpec:
    return AttributeSpec(name, summary, (ValueType.TEXT,), default, choices=tuple(choices), **more)


def element_type(name: str, summary: str, choices: Sequence[DType] = tuple(DType), **more: Any) -> AttributeSpec:
    return word(name, summary, [item.value for item in choices], **more)


ALIGNMENT = integer(
    "alignment",
    "Bytes of which the address of every operand is a multiple; an operand that lies elsewhere is refused.",
    DEFAULT_ALIGNMENT,
    1,
    128,
    unit="bytes",
    constraint="A power of two. More than 16 is taken as 16.",
)


# ---- reading ----


def refuse(reason: str, field: str, value: object, rule: str, fix: str) -> InvalidArgumentError:
    """The error for a request that breaks ``rule``."""
    return InvalidArgumentError(reason, field=field, value=value, rule=rule, fix=fix)


def known_names(given: Mapping[str, Any], known: Sequence[AttributeSpec]) -> None:
    names = [spec.name for spec in known]
    for name in given:
        if name not in names:
            raise refuse(
                f"there is no attribute {name!r}",
                f"attributes.{name}",
                given[name],
                "attribute_known",
                suggest(str(name), names),
            )


def take_alignment(given: Mapping[str, Any]) -> int:
    """``ALIGNMENT``, at most what kernels ask for, so that promises beyond that do not make other problems."""
    value = take_int(given, ALIGNMENT)
    if value & (value - 1):
        raise refuse(
            "alignment must be a power of two",
            "attributes.alignment",
            value,
            "attribute_range",
            f"use 1, 2, 4, ... {ALIGNMENT.highest}: the largest that divides the addresses of all operands",
        )
    return min(value, DEFAULT_ALIGNMENT)


def take_flag(given: Mapping[str, Any], spec: AttributeSpec) -> bool:
    value = given.get(spec.name, spec.default)
    if not isinstance(value, bool):
        raise wrong_type(spec.name, value, "true or false")
    return value


def take_int(given: Mapping[str, Any], spec: AttributeSpec, absent: int = 0) -> int:
    """``absent`` stands for a default that is no single value."""
    if spec.name not in given:
        return spec.default if isinstance(spec.default, int) else absent
    value = given[spec.name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(spec.name, value, "an integer")
    lowest, highest = spec.lowest, spec.highest
    if (lowest is not None and value < lowest) or (highest is not None and value > highest):
        raise refuse(
            f"{spec.name} must be from {lowest} to {highest}",
            f"attributes.{spec.name}",
            value,
            "attribute_range",
            f"use a value from {lowest} to {highest}",
        )
    return value


def take_dtype(given: Mapping[str, Any], spec: AttributeSpec) -> DType | None:
    if spec.name not in given:
        return None
    value = given[spec.name]
    if not isinstance(value, str):
        raise wrong_type(spec.name, value, "the name of an element type")
    if str(value) not in spec.choices:
        raise refuse(
            f"{spec.name} names no element type that is possible here",
            f"attributes.{spec.name}",
            value,
            "attribute_choice",
            suggest(value, spec.choices),
        )
    return DType(value)


def take_word(given: Mapping[str, Any], spec: AttributeSpec, words: type[W], what: str) -> W | None:
    """One of the choices by its value or an alias; None if the attribute is not there. ``what`` it is, as a phrase:
    ``a mask``.
    """
    if spec.name not in given:
        return None
    value = given[spec.name]
    if not isinstance(value, str):
        raise wrong_type(spec.name, value, "a name")
    value = spec.aliases.get(value, value)
    if value not in spec.choices:
        raise refuse(
            f"{spec.name} {value!r} is not {what}",
            f"attributes.{spec.name}",
            value,
            "attribute_choice",
            suggest(value, spec.choices),
        )
    return words(value)


def take_number(
    given: Mapping[str, Any], spec: AttributeSpec, absent: float, fits: Callable[[float], bool], what: str
) -> float:
    if spec.name not in given:
        return float(spec.default) if isinstance(spec.default, (int, float)) else absent
    value = given[spec.name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong_type(spec.name, value, "a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf if value > 0 else -math.inf
    if not fits(found):
        raise refuse(f"{spec.name} must be {what}", f"attributes.{spec.name}", value, "attribute_range", f"give {what}")
    return found


def take_finite(given: Mapping[str, Any], spec: AttributeSpec, absent: float = 0.0) -> float:
    return take_number(given, spec, absent, math.isfinite, "a finite number")


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
