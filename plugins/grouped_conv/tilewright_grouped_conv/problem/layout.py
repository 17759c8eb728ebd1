"""Where images, filters and vectors of channels lie in memory.

Strides are in elements. Those of dimensions of size one are zero, so that equal problems compare equal; a zero stride
along a longer dimension broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright_grouped_conv.problem.sizes import Triple
from tilewright_kit.types.vocabulary import Word

__all__ = [
    "FilterOrder",
    "FilterView",
    "ImageView",
    "Order",
    "VectorView",
    "collapses",
    "filter_orders",
    "filter_view",
    "image_view",
    "orders",
    "vector_view",
]


class Order(Word):
    """Which elements of an image are neighbours in memory: channels, pixels of a line, or neither."""

    LAST = "channels_last"
    FIRST = "channels_first"
    MIXED = "mixed"


class FilterOrder(Word):
    """Which elements of a filter are neighbours in memory: channels, taps, or neither."""

    GKYXC = "gkyxc"
    GKCYX = "gkcyx"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class ImageView:
    """Pixel (d, h, w) of channel c of group g of image n is at ``offset + n*n + g*g + c*c + d*spatial[0] + ...``."""

    operand: str
    n: int
    g: int
    c: int
    spatial: Triple
    offset: int = 0


@dataclass(frozen=True, slots=True)
class FilterView:
    """Tap (z, y, x) from channel c to output channel k of group g; ``k`` and ``c`` count within the group."""

    operand: str
    g: int
    k: int
    c: int
    spatial: Triple
    offset: int = 0


@dataclass(frozen=True, slots=True)
class VectorView:
    """One value per channel: that of channel c of group g is at ``offset + g*g + c*c``. All zero: one for all."""

    operand: str
    g: int
    c: int
    offset: int = 0


def image_view(operand: str, shape: Sequence[int], strides: Sequence[int], groups: int) -> ImageView:
    """The view of a tensor [N, C, *spatial]."""
    n, channels, *sizes = shape
    per_group = channels // groups
    step = strides[1]
    return ImageView(
        operand,
        n=strides[0] if n > 1 else 0,
        g=step * per_group if groups > 1 else 0,
        c=step if per_group > 1 else 0,
        spatial=_triple(sizes, strides[2:]),
    )


def filter_view(operand: str, shape: Sequence[int], strides: Sequence[int], groups: int) -> FilterView:
    """The view of a tensor [K, C/G, *filter]."""
    k, channels, *sizes = shape
    per_group = k // groups
    return FilterView(
        operand,
        g=strides[0] * per_group if groups > 1 else 0,
        k=strides[0] if per_group > 1 else 0,
        c=strides[1] if channels > 1 else 0,
        spatial=_triple(sizes, strides[2:]),
    )


def vector_view(operand: str, channels: int, stride: int, groups: int) -> VectorView:
    """The view of a vector with one value per channel; ``stride`` 0 gives all the same value."""
    per_group = channels // groups
    return VectorView(operand, g=stride * per_group if groups > 1 else 0, c=stride if per_group > 1 else 0)


def _triple(sizes: Sequence[int], strides: Sequence[int]) -> Triple:
    found = [stride if size > 1 else 0 for size, stride in zip(sizes, strides, strict=True)]
    depth, height, width = [0] * (3 - len(found)) + found
    return (depth, height, width)


def collapses(view: ImageView, sizes: Triple, images: int) -> int | None:
    """The one distance between neighbouring pixels of all images, in the order image, depth, height, width; None if
    there is none. 0 for a single pixel.
    """
    distance, count = 0, 1
    for size, stride in zip((images, *sizes)[::-1], (view.n, *view.spatial)[::-1], strict=True):
        if size <= 1:
            continue
        if count == 1:
            distance = stride
        elif stride != distance * count:
            return None
        count *= size
    return distance


def orders(view: ImageView, sizes: Triple, groups: int, per_group: int) -> tuple[Order, ...]:
    """The orders that describe an image with ``per_group`` channels in each of ``groups``, channels-last first.

    Channels-last: the channels of a group (all channels, if groups have one) lie side by side. Channels-first: so do
    the pixels of the innermost axis that has several. Sizes of one leave the choice free.
    """
    found = []
    step, count = (view.c, per_group) if per_group > 1 else (view.g, groups)
    if count <= 1 or step == 1:
        found.append(Order.LAST)
    inner = next((stride for size, stride in zip(sizes[::-1], view.spatial[::-1], strict=True) if size > 1), 1)
    if inner == 1:
        found.append(Order.FIRST)
    return tuple(found)


def filter_orders(view: FilterView, sizes: Triple, per_group: int) -> tuple[FilterOrder, ...]:
    """The orders that describe a filter with ``per_group`` input channels, gkyxc first."""
    found = []
    if per_group <= 1 or view.c == 1:
        found.append(FilterOrder.GKYXC)
    inner = next((stride for size, stride in zip(sizes[::-1], view.spatial[::-1], strict=True) if size > 1), 1)
    if inner == 1 and (math.prod(sizes) > 1 or per_group <= 1 or view.c == 1):
        found.append(FilterOrder.GKCYX)
    return tuple(found)
