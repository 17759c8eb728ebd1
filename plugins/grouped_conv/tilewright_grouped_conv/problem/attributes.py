"""The attributes of a convolution: numbers per axis, padding in all its forms, and what operations share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.sizes import Triple, extent
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.declaration import AttributeSpec, ValueType, choices_of
from tilewright_kit.requests.attributes import (
    flag,
    integer,
    known_names,
    refuse,
    suggest,
    take_flag,
    word,
    wrong_type,
)
from tilewright_kit.requests.products import PRODUCT_ATTRIBUTES, ProductAttributes, take_product
from tilewright_kit.types.vocabulary import Binary, Unary

__all__ = ["ATTRIBUTES", "Attributes", "pads_of", "read_attributes", "triple"]

PADDING_WORDS = ("same_upper", "same_lower", "valid")
MOST = 2**31 - 1
"""Strides, dilations and pads are 32-bit numbers in every framework."""
_NUMBERS = (ValueType.INTEGER, ValueType.INTEGERS)


def _sizes(name: str, summary: str, default: int | None, lowest: int, **more: Any) -> AttributeSpec:
    return AttributeSpec(name, summary, _NUMBERS, default, lowest=lowest, highest=MOST, **more)


_EACH = "One number for all spatial axes, or one for each."
STRIDE = _sizes("stride", "Pixels from one output to the next.", 1, 1, unit="pixels", constraint=_EACH)
DILATION = _sizes("dilation", "Pixels from one tap of the filter to the next.", 1, 1, unit="pixels", constraint=_EACH)
PADDING = AttributeSpec(
    "padding",
    "Pixels of zero around the image. `same_upper` and `same_lower` give `ceil(size / stride)` outputs, an odd pixel "
    "being behind or before; `valid` is none.",
    (*_NUMBERS, ValueType.TEXT),
    0,
    lowest=0,
    highest=MOST,
    choices=PADDING_WORDS,
    unit="pixels",
    constraint="One number; one for each spatial axis; or two for each: all that come before, then all that come "
    "behind.",
)
GROUPS = integer("groups", "Groups of channels, each a convolution of its own.", 1, 1, constraint="Divides C and K.")
ACCUMULATE = flag("accumulate", "Add the gradient to `acc`.", constraint="Gradients only.")
DETERMINISTIC = flag("deterministic", "Equal calls give equal bits.", True)
LAYOUT = word(
    "layout",
    "Order in memory of an output that is not described: channels last or first.",
    choices_of((Order.LAST, Order.FIRST)),
    absent="that of the first input",
)
INPUT_SIZE = _sizes(
    "input_size", "Spatial sizes of `dx`, which strides leave open.", None, 1,
    absent="those of the described output, which is then needed", unit="pixels", constraint="One for each axis.",
)  # fmt: skip
FILTER_SIZE = _sizes(
    "filter_size", "Spatial sizes of `dw`, which strides leave open.", None, 1,
    absent="those of the described output, which is then needed", unit="pixels", constraint="One for each axis.",
)  # fmt: skip
_COMMON = (STRIDE, DILATION, PADDING, GROUPS, ACCUMULATE, DETERMINISTIC, LAYOUT, *PRODUCT_ATTRIBUTES)
ATTRIBUTES = {
    Direction.FORWARD: _COMMON,
    Direction.BACKWARD_DATA: (*_COMMON, INPUT_SIZE),
    Direction.BACKWARD_WEIGHT: (*_COMMON, FILTER_SIZE),
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
    known_names(given, ATTRIBUTES[direction])
    found = Attributes(
        stride=_positive(given, STRIDE, ndim),
        dilation=_positive(given, DILATION, ndim),
        padding=_padding(given, ndim),
        groups=_groups(given),
        size=_take_sizes(given, INPUT_SIZE, ndim) or _take_sizes(given, FILTER_SIZE, ndim),
        accumulate=take_flag(given, ACCUMULATE),
        deterministic=take_flag(given, DETERMINISTIC),
        layout=_layout(given),
        **take_product(given),
    )
    _check_direction(found, direction)
    return found


def triple(numbers: Sequence[int], fill: int) -> Triple:
    """One to three numbers as (depth, height, width), ``fill`` for axes that there are not."""
    depth, height, width = [fill] * (3 - len(numbers)) + list(numbers)
    return (depth, height, width)


def _take_sizes(given: Mapping[str, Any], spec: AttributeSpec, ndim: int) -> Triple | None:
    """``ndim`` positive integers; None if the attribute is not there."""
    name = spec.name
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
    if min(numbers) < (spec.lowest or 0):
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


def _positive(given: Mapping[str, Any], spec: AttributeSpec, ndim: int) -> Triple:
    name = spec.name
    numbers = _integers({name: spec.default, **given}, name)
    if len(numbers) not in (1, ndim):
        raise refuse(
            f"{name} has {len(numbers)} numbers, but there are {ndim} spatial axes",
            f"attributes.{name}",
            given[name],
            "one_or_ndim",
            f"give one number for all axes, or {ndim}",
        )
    if min(numbers) < (spec.lowest or 0):
        raise refuse(
            f"{name} must be at least {spec.lowest}",
            f"attributes.{name}",
            given[name],
            "positive",
            "give numbers of one or more",
        )
    return triple(numbers if len(numbers) == ndim else numbers * ndim, 1)


def _groups(given: Mapping[str, Any]) -> int:
    value = given.get(GROUPS.name, GROUPS.default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type("groups", value, "an integer")
    if value < (GROUPS.lowest or 0) or value > (GROUPS.highest or 0):
        raise refuse(
            "there is at least one group",
            "attributes.groups",
            value,
            "groups_positive",
            "use groups=1 for a plain convolution, or the number of input channels for a depthwise one",
        )
    return value


def _padding(given: Mapping[str, Any], ndim: int) -> str | tuple[Triple, Triple]:
    value = given.get(PADDING.name, PADDING.default)
    forms = f"a number, {ndim} numbers, {2 * ndim} numbers (all begins, then all ends) or {', '.join(PADDING_WORDS)}"
    if isinstance(value, str):
        if value not in PADDING.choices:
            raise refuse(
                f"{value!r} is no kind of padding",
                "attributes.padding",
                value,
                "padding_form",
                suggest(value, PADDING.choices),
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
    if min(numbers) < (PADDING.lowest or 0):
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
    value = given.get(LAYOUT.name, "")
    if not isinstance(value, str):
        raise wrong_type(LAYOUT.name, value, "a word")
    if value and value not in LAYOUT.choices:
        raise refuse(
            f"{value!r} is no layout of an output",
            "attributes.layout",
            value,
            "layout_word",
            suggest(value, LAYOUT.choices) + ", or leave it out to have that of the first input",
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
