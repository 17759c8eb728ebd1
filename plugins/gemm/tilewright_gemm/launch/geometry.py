"""The launch of a GEMM kernel on a GPU: parameters, tensor maps, grid, workspace.

The kernel's parameter is ``GemmParams`` of ``tilewright/gpu/gemm/params.hpp``, field for field; a test compares the
two. One launch does everything: the last workgroup that finishes a part of a tile adds the parts in their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tilewright_arch import ArchSpec, BulkCopy
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.int4 import INT4_RING
from tilewright_gemm.launch.kernel_args import operand_rows, problem_row
from tilewright_gemm.problem.problem import GemmProblem, Product, View
from tilewright_gemm.vocabulary import Epilogue, Reduction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import (
    COUNTERS,
    I64,
    WORKSPACE,
    Arg,
    Geometry,
    Pointer,
    Stage,
    Struct,
    Table,
    TensorMap,
)
from tilewright_kit.tiles.cost.units import units_of
from tilewright_kit.tiles.footprint.workgroup import is_specialised, shared_bytes, size_of, threads_of
from tilewright_kit.types.dtypes import DType

__all__ = ["Matrix", "alignments", "gpu_parts", "grid_of", "matrices", "store_box", "tiles_of"]

_PARTIAL_BYTES = 4
_COUNTER_BYTES = 4
PACKED_ALIGNMENT = 16
"""Bytes: alignment of a packed B, and of what is copied to a ring of packed weights."""
_STORE_ROWS = 64
"""Rows of C that one copy stores, in the orientation in which rows are the instruction's fixed side."""


def gpu_parts(
    problem: GemmProblem, products: tuple[Product, ...], config: GemmConfig, device: DeviceInfo, split: int
) -> dict[str, Any]:
    """The plan's stages and memory, for a launch of ``config`` on ``products`` in ``split`` slices of K."""
    if not products:
        return {}
    tiles = sum(tiles_of(product, config) for product in products)
    grid = grid_of(config, device, tiles * split)
    area = config.tile[0] * config.tile[1] * _PARTIAL_BYTES
    workspace = counters = 0
    if config.reduction is not Reduction.NONE:
        workspace, counters = grid * 2 * area, tiles * _COUNTER_BYTES
    elif config.split_k > config.cluster[2]:
        workspace, counters = tiles * split * area, tiles * _COUNTER_BYTES
    tasks = tuple(_tasks(problem, products, config, device.arch))
    head: tuple[Arg, ...] = (
        Table(tasks) if config.grouped else Pointer(),
        I64(len(tasks)),
        I64(tiles),
        Pointer(WORKSPACE) if workspace else Pointer(),
        Pointer(COUNTERS) if counters else Pointer(),
        I64(split),
        I64(workspace),
        I64(0),
    )
    geometry = Geometry(
        grid=(grid, 1, 1),
        block=(threads_of(config, device.arch), 1, 1),
        # The grid has one dimension, and so has a cluster: the kernel knows which of its workgroups is where.
        cluster=(math.prod(config.cluster), 1, 1),
        shared_bytes=shared_bytes(config, device.arch),
        dependent=is_specialised(config, device.arch),
    )
    args = Struct(head if config.grouped else (*head, *tasks))
    return {
        "stages": (Stage("main", config, "main", args, geometry),),
        "workspace_bytes": workspace,
        "counter_bytes": counters,
    }


def tiles_of(product: Product, config: GemmConfig) -> int:
    """Output tiles of a product, in whole clusters: a workgroup at the edge may get one that lies outside."""
    clusters = [-(-size // (tile * share)) for size, tile, share in _along(product, config)]
    return math.prod(clusters) * product.batch * config.cluster[0] * config.cluster[1]


def _along(product: Product, config: GemmConfig) -> Iterator[tuple[int, int, int]]:
    yield from zip((product.m, product.n), config.tile[:2], config.cluster[:2], strict=True)


def grid_of(config: GemmConfig, device: DeviceInfo, slices: int) -> int:
    """Workgroups for that many slices of tiles: one each, or as many as run at a time."""
    size = math.prod(config.cluster)
    units = max(units_of(device) // size, 1) * size
    if config.reduction is not Reduction.NONE:
        return units
    return min(units, slices) if config.persistent else slices


def alignments(problem: GemmProblem, config: GemmConfig, arch: ArchSpec) -> dict[str, int]:
    """Bytes of which every operand's address must be a multiple."""
    wanted = {operand.name: operand.desc.dtype.bytes for operand in problem.operands}
    if problem.packing:
        wanted |= {product.b.operand: PACKED_ALIGNMENT for product in problem.products}
    if problem.int4 and config.pipeline == INT4_RING:
        read = [view for product in problem.products for view in (product.a, product.b)]
        wanted |= {view.operand: PACKED_ALIGNMENT for view in read}
    copies = arch.bulk_copy if is_specialised(config, arch) else None
    for product in problem.products if copies else ():
        stored = (product.out,) if config.epilogue is Epilogue.CSHUFFLE else ()
        for view in (product.a, product.b, *stored):
            wanted[view.operand] = max(wanted[view.operand], copies.alignment if copies else 1)
    return wanted


# ---- tasks ----


def _tasks(problem: GemmProblem, products: tuple[Product, ...], config: GemmConfig, arch: ArchSpec) -> Iterator[Struct]:
    """``GemmTask``: tensor maps of the warp-specialised pipeline, the problem, its first tile, its D operands."""
    first = 0
    for product in products:
        maps: tuple[Arg, ...] = ()
        if arch.bulk_copy and is_specialised(config, arch):
            maps = _maps(problem, product, config, arch.bulk_copy)
        row = problem_row(problem, product, Pointer())
        yield Struct((*maps, row, I64(first), *operand_rows(problem, product)))
        first += tiles_of(product, config)


def _maps(problem: GemmProblem, product: Product, config: GemmConfig, copies: BulkCopy) -> tuple[TensorMap, ...]:
    """The copy engine's descriptors of A, B and C. Each workgroup of a cluster loads a part of what they share."""
    tile, cluster = config.tile, config.cluster
    a, b, c = matrices(problem, product)
    row = copies.swizzle_bytes // problem.dtype_a.bytes
    box_a = (row, tile[2] if problem.layout[0] == "c" else tile[0] // cluster[1], 1)
    box_b = (row, tile[2] if problem.layout[1] == "r" else tile[1] // cluster[0], 1)
    if config.epilogue is not Epilogue.CSHUFFLE:
        return _map(a, product.batch, box_a), _map(b, product.batch, box_b), _NO_MAP
    box_c = store_box(config, copies)
    return _map(a, product.batch, box_a), _map(b, product.batch, box_b), _map(c, product.batch, box_c)


def store_box(config: GemmConfig, copies: BulkCopy) -> tuple[int, int, int]:
    """Columns and rows of C that one copy stores."""
    rows = config.tile[0] if config.transpose_c else _STORE_ROWS
    return copies.swizzle_bytes // size_of(config.c), rows, 1


@dataclass(frozen=True, slots=True)
class Matrix:
    """An operand as rows that each lie in one piece. Sizes and strides are elements."""

    view: View
    dtype: DType
    rows: int
    cols: int
    stride: int

    @property
    def stride_bytes(self) -> int:
        """Bytes from row to row; a single row may claim any stride, so it claims one that the engine takes."""
        nbytes = self.stride * self.dtype.bytes
        return nbytes if self.rows > 1 else max(-(-self.cols * self.dtype.bytes // 16), 1) * 16


def matrices(problem: GemmProblem, product: Product) -> tuple[Matrix, Matrix, Matrix]:
    """A, B and C of a product."""
    m, n, k = product.m, product.n, product.k
    a, b, out = product.a, product.b, product.out
    along_m, along_n = problem.layout[0] == "c", problem.layout[1] == "r"
    return (
        Matrix(a, problem.dtype_a, k, m, a.col_stride) if along_m else Matrix(a, problem.dtype_a, m, k, a.row_stride),
        Matrix(b, problem.dtype_b, k, n, b.row_stride) if along_n else Matrix(b, problem.dtype_b, n, k, b.col_stride),
        Matrix(out, problem.dtype_c, m, n, out.row_stride),
    )


def _map(matrix: Matrix, batch: int, box: tuple[int, int, int]) -> TensorMap:
    if 0 in (matrix.rows, matrix.cols):
        return _NO_MAP
    view, size = matrix.view, matrix.dtype.bytes
    batched = batch > 1 and view.batch_stride != 0
    return TensorMap(
        operand=view.operand,
        offset=view.offset * size,
        dtype=matrix.dtype.value,
        sizes=(matrix.cols, matrix.rows, batch if batched else 1),
        strides=(matrix.stride_bytes, view.batch_stride * size if batched else matrix.stride_bytes),
        box=box,
    )


_NO_MAP = TensorMap("", 0, "int8", (), (), ())
