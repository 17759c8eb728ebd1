"""The implicit products of a convolution: which pixel every row gathers for every tap.

Of each product one operand is gathered from an image at ``origin + row * row_step + tap * tap_step`` along every axis,
and what lies outside ``[0, size)`` reads as zero. Forward and the gradient of the weights are one product. The
gradient of the image is one for each remainder of a row by the stride, because only every so-manieth tap reaches a row:
with ``g = gcd(stride, dilation)`` row ``first_row + i*stride`` sees the taps ``first_tap + j*(stride/g)``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from tilewright_grouped_conv.problem.sizes import ConvGeometry
from tilewright_grouped_conv.vocabulary import Direction

__all__ = ["Axis", "Phase", "phases_of"]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a product: rows are pixels of the tensor that is not gathered."""

    rows: int
    size: int
    """Pixels of the gathered image."""
    taps: int
    row_step: int
    tap_step: int
    origin: int
    first_tap: int = 0
    """The filter's tap that comes first, and (below) its distance to the next."""
    tap_every: int = 1
    first_row: int = 0
    """The pixel that is row 0, and (below) its distance to row 1."""
    row_every: int = 1


@dataclass(frozen=True, slots=True)
class Phase:
    """One implicit product; ``batch`` counts groups, and images too where pixels run along columns."""

    axes: tuple[Axis, Axis, Axis]
    m: int
    n: int
    k: int
    batch: int

    @property
    def rows(self) -> int:
        """Pixels of one image that the product runs over."""
        return math.prod(axis.rows for axis in self.axes)

    @property
    def taps(self) -> int:
        return math.prod(axis.taps for axis in self.axes)


@lru_cache(maxsize=1024)
def phases_of(geometry: ConvGeometry, direction: Direction, channels_first: bool) -> tuple[Phase, ...]:
    """All products, the first remainder of the last axis first. Those without taps stay: their rows become zero."""
    if direction is Direction.BACKWARD_DATA:
        depth, height, width = (_backward(geometry, index) for index in range(3))
    else:
        depth, height, width = ((_forward(geometry, index),) for index in range(3))
    axes = itertools.product(depth, height, width)
    return tuple(_phase(geometry, direction, channels_first, item) for item in axes)


def _phase(geometry: ConvGeometry, direction: Direction, channels_first: bool, axes: tuple[Axis, Axis, Axis]) -> Phase:
    rows, taps = (math.prod(getattr(axis, what) for axis in axes) for what in ("rows", "taps"))
    n, cg, kg, groups = geometry.n, geometry.cg, geometry.kg, geometry.groups
    if direction is Direction.BACKWARD_WEIGHT:
        return Phase(axes, kg, taps * cg, n * rows, groups)
    own, gathered = (kg, cg) if direction is Direction.FORWARD else (cg, kg)
    if channels_first:
        return Phase(axes, own, rows, taps * gathered, n * groups)
    return Phase(axes, n * rows, own, taps * gathered, groups)


def _forward(geometry: ConvGeometry, index: int) -> Axis:
    return Axis(
        rows=geometry.output[index],
        size=geometry.input[index],
        taps=geometry.filter[index],
        row_step=geometry.stride[index],
        tap_step=geometry.dilation[index],
        origin=-geometry.pad_begin[index],
    )


def _backward(geometry: ConvGeometry, index: int) -> tuple[Axis, ...]:
    stride, dilation, pad = geometry.stride[index], geometry.dilation[index], geometry.pad_begin[index]
    size, taps = geometry.input[index], geometry.filter[index]
    common = math.gcd(stride, dilation)
    every = stride // common
    found = []
    for first in range(min(stride, size)):
        rows = -(-(size - first) // stride)
        tap = next((tap for tap in range(min(every, taps)) if (first + pad - tap * dilation) % stride == 0), None)
        found.append(
            Axis(
                rows=rows,
                size=geometry.output[index],
                taps=0 if tap is None else len(range(tap, taps, every)),
                row_step=1,
                tap_step=-(dilation // common),
                origin=0 if tap is None else (first + pad - tap * dilation) // stride,
                first_tap=tap or 0,
                tap_every=every,
                first_row=first,
                row_every=stride,
            )
        )
    return tuple(found)
