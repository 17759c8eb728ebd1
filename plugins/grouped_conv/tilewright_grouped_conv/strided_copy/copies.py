"""Copies that a plan makes because no kernel, or none that is fast enough, takes a tensor as it lies.

``needed_transforms`` (candidates) says which; a plan runs each as a stage of the operation ``conv_transform`` into its
workspace, or out of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilewright_grouped_conv.problem.layout import FilterOrder, FilterView, ImageView, Order
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.problem.sizes import ConvGeometry, Triple
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.plan import WORKSPACE
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InternalError

__all__ = ["Lowered", "Sizes", "Transform", "copied", "sizes_of", "strides_of", "transform_of", "view_of"]

Sizes = tuple[int, int, int, int, int, int]
"""Images, groups, channels of a group, depth, height, width; of a filter the first are 1, groups, K/G channels ... see
``sizes_of``."""


@dataclass(frozen=True, slots=True)
class Transform:
    """One tensor that a plan copies. ``order`` is that of the copy: a word of ``Order`` or ``FilterOrder``."""

    operand: str
    order: str
    channels: int
    """Per group, in the copy; those beyond the tensor's own are zero."""
    dtype: DType
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lowered:
    """A tensor and its copy: sizes and strides of six dimensions, in elements."""

    transform: Transform
    sizes: Sizes
    """Sizes of the copy."""
    kept: Sizes
    """Sizes of the tensor: elements beyond are zero in the copy, and not copied back."""
    strides: Sizes
    """Strides of the tensor."""
    copy_strides: Sizes
    is_output: bool


def transform_of(problem: ConvProblem, operand: str, order: str, reason: str, channels: int = 0) -> Transform:
    """The transform of an operand by name; ``channels`` of a group in the copy (0: as many as there are)."""
    dtype = _dtype_of(problem, operand)
    view = view_of(problem, operand)
    kept = sizes_of(problem.geometry, view, problem)
    wide = max(channels, kept[2])
    sizes = _with_channels(kept, wide)
    return Transform(operand, order, wide, dtype, math.prod(sizes) * dtype.bytes, reason)


def copied(problem: ConvProblem, transform: Transform) -> Lowered:
    """The copy's own description."""
    view = view_of(problem, transform.operand)
    kept = sizes_of(problem.geometry, view, problem)
    sizes = _with_channels(kept, transform.channels)
    strides = strides_of(view)
    output = {Direction.FORWARD: "y", Direction.BACKWARD_DATA: "dx", Direction.BACKWARD_WEIGHT: "dw"}
    is_output = transform.operand == output[problem.direction]
    return Lowered(transform, sizes, kept, strides, _dense(sizes, transform.order), is_output)


def lowered_problem(problem: ConvProblem, copy: Lowered, offset: int) -> ConvProblem:
    """The problem with the copy, ``offset`` bytes into the workspace, in the tensor's place."""
    operand, elements = copy.transform.operand, offset // copy.transform.dtype.bytes
    n, g, c, *spatial = (step if size > 1 else 0 for size, step in zip(copy.sizes, copy.copy_strides, strict=True))
    axes: Triple = (spatial[0], spatial[1], spatial[2])
    if operand.startswith("d["):
        moved = ImageView(WORKSPACE, n, g, c, axes, elements)
        return replace(problem, d=tuple(moved if view.operand == operand else view for view in problem.d))
    geometry = problem.geometry
    if copy.sizes[2] != copy.kept[2]:
        if operand not in ("x", "w"):
            raise InternalError(f"channels of {operand} cannot be filled up", field="plan", rule="transform")
        geometry = replace(geometry, c=geometry.groups * copy.sizes[2])
    if operand == problem.filter.operand:
        # The filter's first dimension is its output channels.
        return replace(problem, geometry=geometry, filter=FilterView(WORKSPACE, g, n, c, axes, elements))
    moved = ImageView(WORKSPACE, n, g, c, axes, elements)
    if operand == problem.image.operand:
        return replace(problem, geometry=geometry, image=moved)
    return replace(problem, geometry=geometry, pixels=moved)


def view_of(problem: ConvProblem, operand: str) -> ImageView | FilterView:
    """The view of an operand by name; ``acc`` lies as the output."""
    views: tuple[ImageView | FilterView, ...] = (problem.image, problem.filter, problem.pixels, *problem.d)
    for view in views:
        if view.operand == operand:
            return view
    raise InternalError(f"a convolution has no operand {operand}", field="plan", value=operand, rule="transform")


def sizes_of(geometry: ConvGeometry, view: ImageView | FilterView, problem: ConvProblem) -> Sizes:
    """Six sizes: of an image its images, groups, channels of a group, pixels; of a filter: output channels of a group,
    groups, input channels of a group, taps.
    """
    if isinstance(view, FilterView):
        return (geometry.kg, geometry.groups, geometry.cg, *geometry.filter)
    if view is problem.image:
        return (geometry.n, geometry.groups, geometry.cg, *geometry.input)
    return (geometry.n, geometry.groups, geometry.kg, *geometry.output)


def strides_of(view: ImageView | FilterView) -> Sizes:
    first = view.k if isinstance(view, FilterView) else view.n
    return (first, view.g, view.c, *view.spatial)


def _with_channels(sizes: Sizes, channels: int) -> Sizes:
    return (*sizes[:2], channels, *sizes[3:])


def _dense(sizes: Sizes, order: str) -> Sizes:
    """Strides of a copy without gaps: from the slowest dimension to the fastest."""
    ranks = {
        Order.LAST.value: (0, 3, 4, 5, 1, 2),
        Order.FIRST.value: (0, 1, 2, 3, 4, 5),
        FilterOrder.GKYXC.value: (1, 0, 3, 4, 5, 2),
        FilterOrder.GKCYX.value: (1, 0, 2, 3, 4, 5),
    }
    strides, step = [0] * 6, 1
    for dim in reversed(ranks[str(order)]):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return (strides[0], strides[1], strides[2], strides[3], strides[4], strides[5])


def _dtype_of(problem: ConvProblem, operand: str) -> DType:
    return next(item.desc.dtype for item in problem.operands if item.name == operand)
