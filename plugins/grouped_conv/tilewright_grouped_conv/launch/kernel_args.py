"""``tw_conv_problem`` of ``tilewright/core/args/conv.h``, field for field; a test compares the two.

Items of the product are groups, or (image, group) where the kernel runs pixels along columns (channels-first).
"""

from __future__ import annotations

from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.launch.fast_divmod import divisor_row
from tilewright_grouped_conv.problem.implicit_gemm import Axis, Phase
from tilewright_grouped_conv.problem.layout import FilterView, ImageView, VectorView, collapses
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.problem.sizes import Triple
from tilewright_grouped_conv.vocabulary import Direction, Scale
from tilewright_kit.contract.plan import F64, I64, Arg, Pointer, Struct, Table
from tilewright_kit.types.dtypes import DType

__all__ = ["gathered", "operand_row", "operand_rows", "problem_row", "product_row", "row_view", "spatial_sizes"]

_NULL_OPERAND = Struct((Pointer(), I64(0), I64(0), I64(0)))
_ACC = Pointer("acc")


def problem_row(
    problem: ConvProblem,
    config: ConvConfig,
    phase: Phase,
    d: Arg | None = None,
    acc: Pointer = _ACC,
    image_first: bool = False,
) -> Struct:
    """One product. ``d`` replaces the table of its D operands; the old gradient, laid out as the result, begins at
    ``acc``. ``image_first``: the gathered image is A even where it is the right operand of a product.
    """
    geometry, weights = problem.geometry, problem.filter
    image, rows = gathered(problem), row_view(problem)
    operands = Table(operand_rows(problem, config)) if d is None else d
    backward = problem.direction is Direction.BACKWARD_DATA
    column, channel = (weights.c, weights.k) if backward else (weights.k, weights.c)
    axes = tuple(_axis(axis, index, image, rows, weights) for index, axis in enumerate(phase.axes))
    channels = geometry.kg if backward else geometry.cg
    return Struct(
        (
            product_row(problem, config, phase, operands, image_first),
            *axes,
            *(I64(value) for value in (geometry.n, geometry.groups, channels)),
            *(I64(value) for value in (image.n, image.g, image.c)),
            *(I64(value) for value in (rows.n, rows.g, rows.c)),
            *(I64(value) for value in (weights.g, column, channel)),
            divisor_row(channels),
            divisor_row(geometry.groups),
            _result_pointer(problem, phase, acc) if problem.accumulate else Pointer(),
        )
    )


def gathered(problem: ConvProblem) -> ImageView:
    """The image that rows and taps meet in: x, or dy of the image's gradient."""
    return problem.pixels if problem.direction is Direction.BACKWARD_DATA else problem.image


def row_view(problem: ConvProblem) -> ImageView:
    """The tensor whose pixels are the product's rows: y, dx, or dy of the weights' gradient."""
    return problem.image if problem.direction is Direction.BACKWARD_DATA else problem.pixels


def spatial_sizes(problem: ConvProblem, view: ImageView) -> Triple:
    """Sizes of the image that a view describes."""
    return problem.geometry.input if view is problem.image else problem.geometry.output


def operand_rows(problem: ConvProblem, config: ConvConfig) -> tuple[Struct, ...]:
    """The D operands, each laid out as the result."""
    rows = []
    for view, dtype in zip(problem.d, problem.dtype_d, strict=True):
        pixel = collapses(view, problem.geometry.output, 1 if config.channels_first else problem.geometry.n) or 0
        row, column = (view.c, pixel) if config.channels_first else (pixel, view.c)
        rows.append(operand_row(view.operand, view.offset * dtype.bytes, row, column, _item(view, problem, config)))
    return tuple(rows)


def operand_row(operand: str, offset: int, row: int, column: int, item: int) -> Struct:
    """``tw_gemm_operand``; ``offset`` in bytes, strides in elements."""
    return Struct((Pointer(operand, offset), I64(row), I64(column), I64(item)))


# ---- the implicit product ----


def product_row(
    problem: ConvProblem,
    config: ConvConfig,
    phase: Phase,
    d: Arg,
    image_first: bool,
    result_item: int | None = None,
) -> Struct:
    """``tw_gemm_problem``. Leading dimensions hold where a product has no filter to speak of, ldc wherever pixels of
    the result lie at one distance. ``result_item``: elements of the result from item to item, where no group is one.
    """
    image, weights, result = _image_pointer(problem), _weight_pointer(problem, phase), _result_pointer(problem, phase)
    first, second = gathered(problem), row_view(problem)
    image_step = _leading(problem, first, config)
    row_step = _leading(problem, second, config)
    geometry, filter_view = problem.geometry, problem.filter
    backward_weight = problem.direction is Direction.BACKWARD_WEIGHT
    if backward_weight:
        dy = _view_pointer(problem.pixels, problem.dtype_wei)
        pointers = (dy, image, weights)
        leading = (row_step, image_step, filter_view.k)
        items = (second.g, first.g, filter_view.g)
    elif config.channels_first:
        pointers = (image, weights, result) if image_first else (weights, image, result)
        leading = (filter_view.k, image_step, row_step)
        items = (filter_view.g, _item(first, problem, config), _item(second, problem, config))
    else:
        pointers = (image, weights, result)
        leading = (image_step, filter_view.k, row_step)
        items = (first.g, filter_view.g, second.g)
    if result_item is not None:
        items = (*items[:2], result_item)
    sizes = (phase.m, phase.n, phase.k)
    channels_along_rows = config.channels_first and not backward_weight
    vectors = (problem.scale_view, DType.FP32), (problem.bias, problem.dtype_bias or DType.FP32)
    scale, bias = (_vector(view, dtype, channels_along_rows) for view, dtype in vectors)
    # One scale for all is B's in either case.
    of_rows = channels_along_rows and problem.scale is Scale.CHANNEL
    scales = (scale, _NULL_OPERAND) if of_rows else (_NULL_OPERAND, scale)
    return Struct(
        (
            *pointers,
            *(I64(size) for size in sizes),
            *(
                I64(step or _unused(size))
                for step, size in zip(leading, (geometry.c, geometry.c, phase.n), strict=True)
            ),
            I64(phase.batch),
            *(I64(step) for step in items),
            *(F64(value) for value in (problem.alpha, problem.clamp_lo, problem.clamp_hi)),
            *scales,
            bias,
            d,
        )
    )


def _unused(size: int) -> int:
    """A leading dimension of what has a single row: any number does, zero would look like a broadcast."""
    return max(size, 1)


def _leading(problem: ConvProblem, view: ImageView, config: ConvConfig) -> int:
    """Elements from one pixel (channels-first: channel) of an image to the next; 0 if there is no one distance."""
    if config.channels_first:
        return view.c
    return collapses(view, spatial_sizes(problem, view), problem.geometry.n) or 0


def _item(view: ImageView, problem: ConvProblem, config: ConvConfig) -> int:
    """Elements from item to item. Channels-first, items are (image, group): one distance for both, if there is one."""
    if not config.channels_first or problem.direction is Direction.BACKWARD_WEIGHT:
        return view.g
    return view.g if problem.geometry.groups > 1 else view.n


def _vector(view: VectorView | None, dtype: DType, along_rows: bool) -> Struct:
    if view is None:
        return _NULL_OPERAND
    row, column = (view.c, 0) if along_rows else (0, view.c)
    return operand_row(view.operand, view.offset * dtype.bytes, row, column, view.g)


def _view_pointer(view: ImageView | FilterView, dtype: DType, elements: int = 0) -> Pointer:
    return Pointer(view.operand, (view.offset + elements) * dtype.bytes)


def _image_pointer(problem: ConvProblem) -> Pointer:
    return _view_pointer(gathered(problem), problem.dtype_in)


def _weight_pointer(problem: ConvProblem, phase: Phase) -> Pointer:
    """w at the phase's first tap, or dw."""
    if problem.direction is Direction.BACKWARD_WEIGHT:
        return _view_pointer(problem.filter, problem.dtype_out)
    taps = zip(phase.axes, problem.filter.spatial, strict=True)
    return _view_pointer(problem.filter, problem.dtype_wei, sum(axis.first_tap * step for axis, step in taps))


def _result_pointer(problem: ConvProblem, phase: Phase, base: Pointer | None = None) -> Pointer:
    """The first element that a phase writes, or its place in another tensor of the same strides, at ``base``."""
    view: ImageView | FilterView
    if problem.direction is Direction.BACKWARD_WEIGHT:
        view, elements = problem.filter, 0
    else:
        view = row_view(problem)
        elements = sum(axis.first_row * step for axis, step in zip(phase.axes, view.spatial, strict=True))
    if base is None:
        return _view_pointer(view, problem.dtype_out, elements)
    return Pointer(base.operand, base.offset + elements * problem.dtype_out.bytes)


def _axis(axis: Axis, index: int, image: ImageView, rows: ImageView, weights: FilterView) -> Struct:
    """``tw_conv_axis``."""
    return Struct(
        (
            *(I64(value) for value in (axis.rows, axis.size, axis.taps)),
            *(I64(value) for value in (axis.row_step, axis.tap_step, axis.origin)),
            I64(image.spatial[index]),
            I64(rows.spatial[index] * axis.row_every),
            I64(weights.spatial[index] * axis.tap_every),
            divisor_row(axis.rows),
            divisor_row(axis.taps),
        )
    )
