"""The attributes of a convolution: numbers per axis, padding in all its forms, and what operations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.sizes import Triple, extent
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.requests.attributes import (
    PRODUCT_ATTRIBUTES,
    ProductAttributes,
    known_names,
    refuse,
    suggest,
    take_flag,
    take_product,
    wrong_type,
)
from tilewright_kit.types.vocabulary import Binary, Unary

__all__ = ["PADDING_WORDS", "Attributes", "pads_of", "read_attributes", "take_sizes", "triple"]

PADDING_WORDS = ("same_upper", "same_lower", "valid")
LAYOUT_WORDS = ("", Order.LAST.value, Order.FIRST.value)
MOST = 2**31 - 1
"""Strides, dilations and pads are 32-bit numbers in every framework."""
_COMMON = (
    "stride", "dilation", "padding", "groups", "accumulate", "deterministic", "layout", *PRODUCT_ATTRIBUTES,
)  # fmt: skip
_KNOWN = {
    Direction.FORWARD: _COMMON,
    Direction.BACKWARD_DATA: (*_COMMON, "input_size"),
    Direction.BACKWARD_WEIGHT: (*_COMMON, "filter_size"),
}


@dataclass(frozen=True, slots=True)
class Attributes(ProductAttributes):
    """Checked, but for the padding, which may depend on sizes."""

    stride: Triple = (1, 1, 1)
    dilation: Triple = (1, 1, 1)
    padding: str | tuple[Triple, Triple] = "valid"
    """One of ``PADDING_WORDS``, or begins and ends."""
    groups: int = 1
    size: Triple | None = None
    """``input_size`` or ``filter_size``."""
    accumulate: bool = False
    deterministic: bool = True
    layout: Order | None = None
    """Layout of an output that the caller did not describe."""


def read_attributes(given: Mapping[str, Any], ndim: int, direction: Direction) -> Attributes:
    """Check all attributes of a request. Raises ``InvalidArgumentError``."""
    known_names(given, _KNOWN[direction])
    found = Attributes(
        stride=_positive(given, "stride", ndim),
        dilation=_positive(given, "dilation", ndim),
        padding=_padding(given, ndim),
        groups=_groups(given),
        size=take_sizes(given, "input_size", ndim) or take_sizes(given, "filter_size", ndim),
        accumulate=take_flag(given, "accumulate"),
        deterministic=take_flag({"deterministic": True, **given}, "deterministic"),
        layout=_layout(given),
        **take_product(given),
    )
    _check_direction(found, direction)
    return found


def triple(numbers: Sequence[int], fill: int) -> Triple:
    """One to three numbers as (depth, height, width), ``fill`` for axes that there are not."""
    depth, height, width = [fill] * (3 - len(numbers)) + list(numbers)
    return (depth, height, width)


def take_sizes(given: Mapping[str, Any], name: str, ndim: int) -> Triple | None:
    """``ndim`` positive integers; None if the attribute is not there."""
    if name not in given:
        return None
    numbers = _integers(given, name)
    if len(numbers) != ndim:
        raise refuse(
            f"{name} has {len(numbers)} numbers, but there are {ndim} spatial axes",
            f"attributes.{name}",
            given[name],
            "ndim_numbers",
            f"give {ndim} numbers",
        )
    if min(numbers) < 1:
        raise refuse(
            f"{name} must be positive",
            f"attributes.{name}",
            given[name],
            "sizes_positive",
            "give numbers of one or more",
        )
    return triple(numbers, 1)


def pads_of(attributes: Attributes, size: Triple, filter: Triple) -> tuple[Triple, Triple]:
    """Begins and ends of the padding of an image of ``size`` pixels.

    The words mean what they do in ONNX, also with strides: ``same_upper`` and ``same_lower`` give
    ``ceil(size / stride)`` outputs, an odd pixel going to the end or to the beginning.
    """
    padding = attributes.padding
    if not isinstance(padding, str):
        return padding
    totals = [0, 0, 0]
    if padding != "valid":
        for axis in range(3):
            outputs = -(-size[axis] // attributes.stride[axis])
            reach = (outputs - 1) * attributes.stride[axis] + extent(filter[axis], attributes.dilation[axis])
            totals[axis] = max(reach - size[axis], 0)
    less = triple([total // 2 for total in totals], 0)
    more = triple([total - total // 2 for total in totals], 0)
    return (more, less) if padding == "same_lower" else (less, more)


# ---- one attribute ----


def _integers(given: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = given[name]
    numbers = (value,) if isinstance(value, int) else value
    if not isinstance(numbers, (tuple, list)) or any(isinstance(x, bool) or not isinstance(x, int) for x in numbers):
        raise wrong_type(name, value, "an integer or a list of integers")
    if any(abs(number) > MOST for number in numbers):
        raise refuse(
            f"{name} must be below 2**31", f"attributes.{name}", value, "attribute_range", f"use at most {MOST}"
        )
    return tuple(numbers)


def _per_axis(given: Mapping[str, Any], name: str, ndim: int, fits: Callable[[int], bool], rule: str) -> Triple:
    numbers = _integers(given, name)
    if len(numbers) not in (1, ndim):
        raise refuse(
            f"{name} has {len(numbers)} numbers, but there are {ndim} spatial axes",
            f"attributes.{name}",
            given[name],
            "one_or_ndim",
            f"give one number for all axes, or {ndim}",
        )
    if not all(fits(number) for number in numbers):
        raise refuse(
            f"{name} must be at least 1", f"attributes.{name}", given[name], rule, "give numbers of one or more"
        )
    return triple(numbers if len(numbers) == ndim else numbers * ndim, 1)


def _positive(given: Mapping[str, Any], name: str, ndim: int) -> Triple:
    return _per_axis({name: 1, **given}, name, ndim, lambda number: number >= 1, "positive")


def _groups(given: Mapping[str, Any]) -> int:
    value = given.get("groups", 1)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type("groups", value, "an integer")
    if value < 1:
        raise refuse(
            "there is at least one group",
            "attributes.groups",
            value,
            "groups_positive",
            "use groups=1 for a plain convolution, or the number of input channels for a depthwise one",
        )
    return value


def _padding(given: Mapping[str, Any], ndim: int) -> str | tuple[Triple, Triple]:
    value = given.get("padding", 0)
    forms = f"a number, {ndim} numbers, {2 * ndim} numbers (all begins, then all ends) or {', '.join(PADDING_WORDS)}"
    if isinstance(value, str):
        if value not in PADDING_WORDS:
            raise refuse(
                f"{value!r} is no kind of padding",
                "attributes.padding",
                value,
                "padding_form",
                suggest(value, PADDING_WORDS),
            )
        return value
    numbers = _integers({"padding": value}, "padding")
    if len(numbers) not in (1, ndim, 2 * ndim):
        raise refuse(
            f"padding has {len(numbers)} numbers, but there are {ndim} spatial axes",
            "attributes.padding",
            value,
            "padding_form",
            f"give {forms}",
        )
    if min(numbers) < 0:
        raise refuse(
            "padding must not be negative",
            "attributes.padding",
            value,
            "non_negative",
            "slice the image instead: a view needs no copy",
        )
    if len(numbers) == 1:
        numbers *= ndim
    begins, ends = (numbers[:ndim], numbers[ndim:]) if len(numbers) == 2 * ndim else (numbers, numbers)
    return triple(begins, 0), triple(ends, 0)


def _layout(given: Mapping[str, Any]) -> Order | None:
    value = given.get("layout", "")
    if not isinstance(value, str):
        raise wrong_type("layout", value, "a word")
    if value not in LAYOUT_WORDS:
        raise refuse(
            f"{value!r} is no layout of an output",
            "attributes.layout",
            value,
            "layout_word",
            suggest(value, LAYOUT_WORDS[1:]) + ", or leave it out to have that of the first input",
        )
    return Order(value) if value else None


def _check_direction(found: Attributes, direction: Direction) -> None:
    """Reject attributes that a direction does not have."""
    forward, weight = direction is Direction.FORWARD, direction is Direction.BACKWARD_WEIGHT
    rows: tuple[tuple[bool, str, object, str, str, str], ...] = (
        (
            forward and found.accumulate,
            "accumulate",
            True,
            "accumulate_direction",
            "only gradients are accumulated",
            "give what is to be added as d[0]",
        ),
        (
            not weight and found.split_k > 1,
            "split_k",
            found.split_k,
            "split_k_direction",
            "only the gradient of the weights shares its sum over pixels among workgroups",
            "leave split_k out",
        ),
        (
            not forward and found.binary not in (None, Binary.NONE),
            "binary",
            str(found.binary),
            "epilogue_direction",
            "gradients have no D operands",
            "leave binary out",
        ),
        (
            weight and found.unary is not Unary.NONE,
            "unary",
            found.unary.value,
            "epilogue_direction",
            "the gradient of the weights has no elementwise step",
            "leave unary out",
        ),
        (
            found.accumulate and found.unary is not Unary.NONE,
            "unary",
            found.unary.value,
            "epilogue_direction",
            "a gradient that is accumulated has no elementwise step",
            "leave unary or accumulate out",
        ),
    )
    for broken, name, value, rule, reason, fix in rows:
        if broken:
            raise refuse(reason, f"attributes.{name}", value, rule, fix)
