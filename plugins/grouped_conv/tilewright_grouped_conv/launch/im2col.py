"""The launch of a product whose pixels a copy engine gathers: parameters, tensor maps, grid, workspace.

The kernel's parameter is ``Sm90ConvParams`` of ``tilewright/sm90/conv/params.hpp``, field for field; a test compares
the two.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright_arch import BulkCopy
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.footprint.im2col import (
    LINE_BYTES,
    Product,
    im2col_product,
    im2col_slices,
    pixel_walk,
    row_stride,
    walk_axis,
)
from tilewright_grouped_conv.launch.kernel_args import gathered, operand_rows, product_row, row_view, spatial_sizes
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.problem.layout import ImageView, collapses
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import (
    COUNTERS,
    I64,
    WORKSPACE,
    Geometry,
    Pointer,
    Stage,
    Struct,
    TensorMap,
    WorkspaceLayout,
)
from tilewright_kit.tiles.cost.units import units_of
from tilewright_kit.tiles.footprint.workgroup import shared_bytes, threads_of
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["im2col_stages"]

_PARTIAL_BYTES = 4
_COUNTER_BYTES = 4
_STORE_ROWS = 64
"""Rows of the result that one copy stores."""
_BOX_COLUMNS = 64
"""Columns of the weights that one copy loads: ``PixelRowLoader::kBoxed``."""
_NO_MAP = TensorMap("", 0, "int8", (), (), ())


def im2col_stages(
    problem: ConvProblem,
    config: ConvConfig,
    device: DeviceInfo,
    layout: WorkspaceLayout,
    acc: Pointer,  # noqa: ARG001
) -> tuple[list[Stage], int]:
    """The stage of a convolution, which adds to nothing, and the bytes of its counters."""
    copies = device.arch.bulk_copy
    phases = [phase for phase in problem.phases(config.channels_first) if phase.m and phase.n and phase.batch]
    if not phases or copies is None:
        return [], 0
    (phase,) = phases
    product = im2col_product(problem, phase, config)
    tiles, split = product.tiles(config), im2col_slices(product, config)
    workspace = counters = 0
    if config.split_k > 1:
        workspace = tiles * split * config.tile[0] * config.tile[1] * _PARTIAL_BYTES
        counters = tiles * _COUNTER_BYTES
    maps, row = _maps(problem, phase, product, config, copies), _row(problem, phase, product, config)
    task = Struct((*maps, row, I64(0), *operand_rows(problem, config)))
    args = Struct(
        (
            Pointer(),
            I64(1),
            I64(tiles),
            Pointer(WORKSPACE, layout.reserve(workspace)) if workspace else Pointer(),
            Pointer(COUNTERS) if counters else Pointer(),
            I64(split),
            I64(workspace),
            I64(0),
            task,
            *_walk(problem, phase, product),
        )
    )
    geometry = Geometry(
        grid=(min(units_of(device), tiles * split), 1, 1),
        block=(threads_of(config, device.arch), 1, 1),
        shared_bytes=shared_bytes(config, device.arch),
        dependent=True,
    )
    return [Stage("main", config, "main", args, geometry)], counters


def _row(problem: ConvProblem, phase: Phase, product: Product, config: ConvConfig) -> Struct:
    """``tw_gemm_problem`` of the product: k in whole steps, items as the kernel counts them."""
    k = product.steps * config.tile[2]
    counted = replace(phase, m=product.m, n=product.n, k=k, batch=product.batch)
    item = problem.geometry.cg if product.tap_items else None
    return product_row(problem, config, counted, Pointer(), image_first=False, result_item=item)


def _walk(problem: ConvProblem, phase: Phase, product: Product) -> tuple[I64, ...]:
    """``ConvWalk``."""
    geometry, data = problem.geometry, problem.direction is Direction.BACKWARD_DATA
    channels = geometry.kg if data else geometry.cg
    line = LINE_BYTES // problem.dtype_in.bytes
    values = [value for axis in phase.axes for value in walk_axis(axis)]
    return tuple(I64(value) for value in (*values, channels, -(-channels // line), int(product.tap_items), 0))


# ---- tensor maps ----


def _maps(
    problem: ConvProblem, phase: Phase, product: Product, config: ConvConfig, copies: BulkCopy
) -> tuple[TensorMap, TensorMap, TensorMap]:
    """Layout that the copy engine needs of A, B and C."""
    tile_m, tile_n, tile_k = config.tile
    line = copies.swizzle_bytes // problem.dtype_in.bytes
    if config.direction is Direction.BACKWARD_WEIGHT:
        a = _matrix(problem, problem.pixels, problem.dtype_wei, phase.k, (line, tile_k, 1))
        b = _pixels(problem, phase, tile_k)
    else:
        data = config.direction is Direction.BACKWARD_DATA
        a = _pixels(problem, phase, tile_m)
        # Columns in boxes of which those beyond the last are not loaded, if they divide the tile.
        b = _weights(problem, (line, tile_k if data else tile_n if tile_n % _BOX_COLUMNS else _BOX_COLUMNS, 1))
    return a, b, _result(problem, product, config, copies)


def _pixels(problem: ConvProblem, phase: Phase, count: int) -> TensorMap:
    """The gathered image: channels, spatial axes, images; ``count`` pixels a copy."""
    view, geometry, ndim = gathered(problem), problem.geometry, problem.ndim
    size = problem.dtype_in.bytes
    channels = geometry.k if problem.direction is Direction.BACKWARD_DATA else geometry.c
    sizes = (*spatial_sizes(problem, view)[3 - ndim :][::-1], geometry.n)
    strides: list[int] = []
    for length, step in zip(sizes, (*view.spatial[3 - ndim :][::-1], view.n), strict=True):
        strides.append(step * size if length > 1 else max(strides[-1:] or [row_stride(0, 1, channels * size)]))
    return TensorMap(
        operand=view.operand,
        offset=view.offset * size,
        dtype=problem.dtype_in.value,
        sizes=(channels, *sizes),
        strides=tuple(strides),
        box=(LINE_BYTES // size, count),
        walk=pixel_walk(phase, ndim),
    )


def _weights(problem: ConvProblem, box: tuple[int, int, int]) -> TensorMap:
    """Channels of x, those of y of all groups, taps."""
    geometry, view, size = problem.geometry, problem.filter, problem.dtype_wei.bytes
    tap = geometry.cg * size
    return TensorMap(
        operand=view.operand,
        offset=view.offset * size,
        dtype=problem.dtype_wei.value,
        sizes=(geometry.cg, geometry.k, geometry.taps),
        strides=(row_stride((view.k or view.g) * size, geometry.k, geometry.taps * tap), tap),
        box=box,
    )


def _matrix(problem: ConvProblem, view: ImageView, dtype: DType, pixels: int, box: tuple[int, int, int]) -> TensorMap:
    """An image whose pixels lie at one distance, as rows of all its channels."""
    geometry = problem.geometry
    step = collapses(view, spatial_sizes(problem, view), geometry.n) or 0
    stride = row_stride(step * dtype.bytes, pixels, geometry.k * dtype.bytes)
    return TensorMap(
        view.operand, view.offset * dtype.bytes, dtype.value, (geometry.k, pixels, 1), (stride, stride), box
    )


def _result(problem: ConvProblem, product: Product, config: ConvConfig, copies: BulkCopy) -> TensorMap:
    if config.epilogue is not Epilogue.CSHUFFLE:
        return _NO_MAP
    geometry, size = problem.geometry, problem.dtype_out.bytes
    if config.direction is Direction.BACKWARD_WEIGHT:
        operand, offset = problem.filter.operand, problem.filter.offset
        step, item = problem.filter.k, geometry.cg if product.tap_items else problem.filter.g
    else:
        view = row_view(problem)
        operand, offset = view.operand, view.offset
        step, item = collapses(view, spatial_sizes(problem, view), geometry.n) or 0, view.g
    row = row_stride(step * size, product.m, product.n * size)
    return TensorMap(
        operand=operand,
        offset=offset * size,
        dtype=problem.dtype_out.value,
        sizes=(product.n, product.m, product.batch),
        strides=(row, item * size if product.batch > 1 else row),
        box=(copies.swizzle_bytes // size, _STORE_ROWS, 1),
    )
