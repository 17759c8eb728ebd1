"""From problem and kernel to stages.

The argument block is ``tw_gemm_args`` of ``tilewright/core/gemm_args.h``, field for field; a test compares the two.
"""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_gemm.config import GemmConfig
from tilewright_gemm.footprint import staging_bytes
from tilewright_gemm.packing import format_of
from tilewright_gemm.problem import GemmProblem, PackBProblem, Product, View
from tilewright_gemm.workspace import slices, workspace_bytes
from tilewright_kit.device import DeviceInfo
from tilewright_kit.dtypes import DType
from tilewright_kit.plan import F64, I64, WORKSPACE, ExecutionPlan, Geometry, Pointer, Stage, Struct, Table
from tilewright_kit.problem import Operand, Role
from tilewright_kit.tensor import TensorDesc

__all__ = ["plan_gemm", "plan_pack_b"]

_NULL_OPERAND = Struct((Pointer(), I64(0), I64(0), I64(0)))


def plan_gemm(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> ExecutionPlan:
    """Stages: one for a product, a batch or a group; two for split-K (slices, then their sum in a fixed order); none if
    nothing is to be written.
    """
    products = tuple(product for product in problem.products if not product.is_empty)
    split = slices(problem.k, config.split_k, config.tile[2])
    nbytes = workspace_bytes(config, products, split) if products and device.arch.kind == "cpu" else 0
    rows = tuple(_problem_row(problem, product) for product in products)
    args = Struct((Table(rows), I64(len(rows)), Pointer(WORKSPACE) if nbytes else Pointer(), I64(nbytes), I64(split)))
    geometry = _geometry(config, products, device.arch, split)
    roles = ("partial", "reduce") if split > 1 else ("main",)
    notes = []
    if config.split_k > 1 and split != config.split_k:
        notes.append(f"K = {problem.k} gives {split} slices of whole tiles, not {config.split_k}")
    if problem.dtype_acc == DType.INT32 and problem.k > 2**31 // 128**2:
        notes.append(f"K = {problem.k}: sums of int8 products may wrap around in int32")
    return ExecutionPlan(
        operation=problem.operation,
        arch=device.arch.id,
        operands=problem.operands,
        stages=tuple(Stage(role, config, role, args, geometry) for role in roles) if rows else (),
        workspace_bytes=nbytes,
        notes=tuple(notes),
        flops=problem.flops,
        bytes_moved=problem.bytes_moved,
        details={"in_place": _in_place(problem)},
    )


def _in_place(problem: GemmProblem) -> list[list[str]]:
    """(output, D operand) pairs that may be one tensor: an element of D is read just before its own place in the output
    is written, and by nobody else.
    """
    outputs = {item.name[4:].partition("]")[0]: item for item in problem.operands if item.role is Role.OUTPUT}
    pairs = []
    for item in problem.operands:
        kind, _, rest = item.name.partition("[")
        out = outputs.get(rest.partition("]")[0] if problem.grouped else "")
        if kind in ("c", "d") and item.role is Role.INPUT and out is not None and out.desc == item.desc:
            pairs.append([out.name, item.name])
    return pairs


def plan_pack_b(problem: PackBProblem, config: GemmConfig, device: DeviceInfo) -> ExecutionPlan:
    """One stage that packs B. The plan's output operand states the format and its size."""
    packing = format_of(problem.dtype_a, config.warp_tile)
    operands = []
    for operand in problem.operands:
        desc = operand.desc
        if operand.role is Role.OUTPUT:
            nbytes = packing.nbytes(problem.k, problem.n)
            desc = TensorDesc(desc.dtype, desc.shape, desc.strides, packing=str(packing), packed_bytes=nbytes)
        operands.append(Operand(operand.name, desc, operand.role))
    out = next(operand for operand in operands if operand.role is Role.OUTPUT)
    row = _row(
        problem.layout,
        Product(0, problem.n, problem.k, 1, View("", 0, 0), problem.b, View(out.name, 0, 0)),
        (1, problem.dtype_b.bytes, 1),
        (1.0, 0.0, 0.0),
        (),
        (),
    )
    args = Struct((Table((row,)), I64(1), Pointer(), I64(0), I64(1)))
    stage = Stage("pack_b", config, "pack_b", args, Geometry(team=config.waves))
    return ExecutionPlan(
        operation=problem.operation,
        arch=device.arch.id,
        operands=tuple(operands),
        stages=() if problem.is_empty else (stage,),
        bytes_moved=problem.k * problem.n * problem.dtype_b.bytes + out.desc.packed_bytes,
    )


def _problem_row(problem: GemmProblem, product: Product) -> Struct:
    sizes = (problem.dtype_a.bytes, problem.dtype_b.bytes, problem.dtype_c.bytes)
    bias_bytes = problem.dtype_bias.bytes if problem.dtype_bias else 0
    vectors = (
        _operand(product.scale_a, DType.FP32.bytes),
        _operand(product.scale_b, DType.FP32.bytes),
        _operand(product.bias, bias_bytes),
    )
    d = tuple(_operand(view, dtype.bytes) for view, dtype in zip(product.d, problem.dtype_d, strict=True))
    return _row(problem.layout, product, sizes, (problem.alpha, problem.clamp_lo, problem.clamp_hi), vectors, d)


def _row(
    layout: str,
    product: Product,
    sizes: tuple[int, int, int],
    scalars: tuple[float, float, float],
    vectors: tuple[Struct, ...],
    d: tuple[Struct, ...],
) -> Struct:
    """``tw_gemm_problem``: ``sizes`` are element bytes of A, B and C; ``vectors`` are scale_a, scale_b and bias."""
    m, n, k = product.m, product.n, product.k
    a, b, out = product.a, product.b, product.out
    return Struct(
        (
            Pointer(a.operand, a.offset * sizes[0]),
            Pointer(b.operand, b.offset * sizes[1]),
            Pointer(out.operand, out.offset * sizes[2]),
            I64(m),
            I64(n),
            I64(k),
            I64(_leading(a, m, k, layout[0])),
            I64(_leading(b, k, n, layout[1])),
            I64(_leading(out, m, n, "r")),
            I64(product.batch),
            I64(a.batch_stride),
            I64(b.batch_stride),
            I64(out.batch_stride),
            *(F64(value) for value in scalars),
            *(vectors or (_NULL_OPERAND,) * 3),
            Table(d),
        )
    )


def _operand(view: View | None, element_bytes: int) -> Struct:
    """``tw_gemm_operand``."""
    if view is None:
        return _NULL_OPERAND
    return Struct(
        (
            Pointer(view.operand, view.offset * element_bytes),
            I64(view.row_stride),
            I64(view.col_stride),
            I64(view.batch_stride),
        )
    )


def _leading(view: View, rows: int, cols: int, letter: str) -> int:
    """The leading dimension of a matrix; where only one row (column) exists, what a contiguous matrix would have."""
    if letter == "r":
        return view.row_stride if rows > 1 else max(cols, 1)
    return view.col_stride if cols > 1 else max(rows, 1)


def _geometry(config: GemmConfig, products: tuple[Product, ...], arch: ArchSpec, split: int) -> Geometry:
    if arch.kind == "cpu":
        return Geometry(team=config.waves)
    tiles = sum(-(-item.m // config.tile[0]) * -(-item.n // config.tile[1]) * item.batch for item in products) * split
    if config.persistent and arch.throughput.units:
        tiles = min(tiles, arch.throughput.units)
    threads = arch.threads_per_workgroup(config.pipeline, config.wave, config.table_key, config.warp_tile)
    stages = 2 if arch.pipeline(config.pipeline).double_buffer else 1
    return Geometry(
        team=1, grid=(max(tiles, 1), 1, 1), block=(threads, 1, 1), shared_bytes=staging_bytes(config, arch) * stages
    )
