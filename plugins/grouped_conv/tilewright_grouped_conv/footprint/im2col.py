"""Products whose pixels a copy engine gathers (im2col maps, ``tilewright/sm90/conv``): how they walk an image, what the
maps hold, and the implicit product's sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.config.pipelines import IM2COL
from tilewright_grouped_conv.problem.implicit_gemm import Axis, Phase
from tilewright_grouped_conv.problem.layout import FilterView, ImageView, collapses
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.plan import PixelWalk
from tilewright_kit.tiles.footprint.cpu import slices
from tilewright_kit.types.arithmetic import ceil_div
from tilewright_kit.types.vocabulary import Epilogue, size_of

__all__ = [
    "COPY_BYTES",
    "LINE_BYTES",
    "Product",
    "im2col_mismatches",
    "im2col_product",
    "im2col_slices",
    "pixel_walk",
    "row_stride",
    "walk_axis",
]

LINE_BYTES = 128
"""Size of a tile's row in shared memory: the channels that one copy takes of a pixel."""
COPY_BYTES = IM2COL.copy_bytes
"""Number of bytes that addresses and strides of a copy engine's tensors are multiples of."""
_CORNERS = {1: (-(2**15), 2**15 - 1), 2: (-(2**7), 2**7 - 1), 3: (-(2**4), 2**4 - 1)}
"""Limits of a walk's corners by the number of spatial axes."""
_OFFSET_BITS = {1: 16, 2: 8, 3: 5}
"""Bits of a tap's distance from the first, likewise."""
_LONGEST_STEP = 8
_LONGEST_STRIDE = 2**37
"""Elements: the engine's strides have 40 bits of bytes."""
_REACH = 2**31


@dataclass(frozen=True, slots=True)
class Product:
    """The implicit product as the kernel counts it; ``steps`` along k are of 128 bytes (of weights: of tile_k pixels).

    ``tap_items``: every tap of the weights' gradient is an item of the batch, because channels do not fill whole lines
    of a tile; else items are groups.
    """

    m: int
    n: int
    steps: int
    batch: int
    tap_items: bool = False

    def tiles(self, config: ConvConfig) -> int:
        return ceil_div(self.m, config.tile[0]) * ceil_div(self.n, config.tile[1]) * self.batch


def im2col_product(problem: ConvProblem, phase: Phase, config: ConvConfig) -> Product:
    """The product of one phase."""
    geometry, line = problem.geometry, _line(config)
    if config.direction is Direction.BACKWARD_WEIGHT:
        whole = geometry.cg % line == 0
        n, batch = (geometry.cg * phase.taps, phase.batch) if whole else (geometry.cg, phase.taps)
        return Product(phase.m, n, ceil_div(phase.k, config.tile[2]), batch, not whole)
    return Product(phase.m, phase.n, phase.taps * ceil_div(_gathered_channels(problem), line), phase.batch)


def im2col_slices(product: Product, config: ConvConfig) -> int:
    """Slices of the reduction that are not empty, at most ``split_k``."""
    return slices(product.steps, config.split_k, 1)


def pixel_walk(phase: Phase, ndim: int) -> PixelWalk:
    """Corners and steps of the pixels at which the filter begins, the width first."""
    axes = phase.axes[3 - ndim :][::-1]
    lower = [axis.origin + min((axis.taps - 1) * axis.tap_step, 0) for axis in axes]
    upper = [(axis.rows - 1) * axis.row_step + 1 + low - axis.size for axis, low in zip(axes, lower, strict=True)]
    return PixelWalk(tuple(lower), tuple(upper), tuple(axis.row_step for axis in axes))


def _line(config: ConvConfig) -> int:
    return LINE_BYTES // size_of(config.a)


def _gathered_channels(problem: ConvProblem) -> int:
    geometry = problem.geometry
    return geometry.kg if problem.direction is Direction.BACKWARD_DATA else geometry.cg


# ---- what a problem must be ----


def im2col_mismatches(problem: ConvProblem, config: ConvConfig) -> Iterator[Violation]:
    """Why the copy engine cannot gather the problem's pixels, or the kernel not write its result."""
    phases = [phase for phase in problem.phases(config.channels_first) if phase.m and phase.n and phase.batch]
    reasons = [*_one_product(phases), *_groups(problem, config)]
    if not reasons:
        reasons = [reason for phase in phases for reason in (*_walks(phase, problem.ndim), *_counts(phase))]
    for reason in reasons[:1]:
        yield Violation("im2col", "pipeline", config.pipeline, reason)
    if config.epilogue is Epilogue.CSHUFFLE and (reason := _unstored(problem)):
        fix: dict[str, object] = {"epilogue": Epilogue.DEFAULT}
        yield Violation("im2col_store", "epilogue", config.epilogue.value, reason, fix)


def _one_product(phases: list[Phase]) -> Iterator[str]:
    if len(phases) != 1:
        yield f"a launch computes one product, not {len(phases)}: the image's gradient without a stride"
    elif not phases[0].k or not phases[0].taps:
        yield "there is nothing to sum"


def _groups(problem: ConvProblem, config: ConvConfig) -> Iterator[str]:
    """Tiles of several groups must not reach into a neighbour's channels, and groups lie at one distance."""
    geometry, line = problem.geometry, _line(config)
    if problem.alignment < COPY_BYTES:
        yield f"addresses are multiples of {problem.alignment} bytes only; a copy engine wants {COPY_BYTES}"
    for view, sizes in ((problem.image, geometry.input), (problem.pixels, geometry.output)):
        steps = zip((geometry.n, *sizes), (view.n, *view.spatial), strict=True)
        if any(size > 1 and not 0 < step < _LONGEST_STRIDE for size, step in steps):
            yield f"pixels of {view.operand} share memory, or lie too far apart"
    if geometry.groups == 1:
        return
    if _gathered_channels(problem) % line:
        yield f"channels of several groups fill whole lines of {line} elements"
    for view, channels in ((problem.image, geometry.cg), (problem.pixels, geometry.kg)):
        if view.g != channels:
            yield f"the groups of {view.operand} do not follow each other"
    if problem.filter.g != geometry.kg * problem.filter.k:
        yield f"the groups of {problem.filter.operand} do not follow each other"


def _walks(phase: Phase, ndim: int) -> Iterator[str]:
    walk, (least, most) = pixel_walk(phase, ndim), _CORNERS[ndim]
    corners = (*walk.lower, *walk.upper)
    if min(corners) < least or max(corners) > most:
        yield f"with {ndim} axes a filter reaches {least} to {most} pixels beyond the image, not {_text(corners)}"
    if max(walk.step) > _LONGEST_STEP:
        yield f"a stride is at most {_LONGEST_STEP}"
    reach = max((axis.taps - 1) * abs(axis.tap_step) for axis in phase.axes)
    if reach >= 1 << _OFFSET_BITS[ndim]:
        yield f"with {ndim} axes taps lie less than {1 << _OFFSET_BITS[ndim]} pixels apart, not {reach}"


def _counts(phase: Phase) -> Iterator[str]:
    if max(phase.m, phase.n, phase.k) >= _REACH - LINE_BYTES * 8:
        yield "rows, columns and steps are counted in 32 bits"


def _unstored(problem: ConvProblem) -> str:
    """Why the copy engine cannot write the result; empty if it can."""
    size = problem.dtype_out.bytes
    view: ImageView | FilterView
    if problem.direction is Direction.BACKWARD_WEIGHT:
        view = problem.filter
        steps = (view.k, view.g, view.offset, problem.geometry.cg)
    else:
        data = problem.direction is Direction.BACKWARD_DATA
        view, sizes = (problem.image, problem.geometry.input) if data else (problem.pixels, problem.geometry.output)
        steps = (collapses(view, sizes, problem.geometry.n) or 0, view.g, view.offset, 0)
    if any(step * size % COPY_BYTES for step in steps) or problem.alignment < COPY_BYTES:
        return f"rows of {view.operand} do not begin at multiples of {COPY_BYTES} bytes"
    return ""


def _text(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def walk_axis(axis: Axis) -> tuple[int, int, int, int, int, int]:
    """``ConvWalkAxis``: rows, taps, step, origin, and where tap 0 lies from there, and tap 1 from tap 0."""
    reach = (axis.taps - 1) * axis.tap_step
    return axis.rows, axis.taps, axis.row_step, axis.origin + min(reach, 0), max(-reach, 0), axis.tap_step


def row_stride(nbytes: int, count: int, line: int) -> int:
    """Stride of ``count`` rows at ``nbytes``; a single row's is one that the engine takes."""
    return nbytes if count > 1 else math.ceil(max(line, 1) / COPY_BYTES) * COPY_BYTES
