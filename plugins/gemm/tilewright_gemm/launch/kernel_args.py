"""``tw_gemm_problem`` and ``tw_gemm_operand`` of ``tilewright/core/args/gemm.h``, field for field; a test compares."""

from __future__ import annotations

from tilewright_gemm.config.packing import VectorFormat
from tilewright_gemm.problem.problem import GemmProblem, Product, View
from tilewright_kit.contract.plan import F64, I64, Arg, Pointer, Struct, Table
from tilewright_kit.types.dtypes import DType

__all__ = ["bare_row", "leading", "operand_row", "operand_rows", "problem_row"]

_NULL_OPERAND = Struct((Pointer(), I64(0), I64(0), I64(0)))


def problem_row(problem: GemmProblem, product: Product, d: Arg | None = None) -> Struct:
    """One product. ``d`` replaces the table of its D operands."""
    sizes = (problem.dtype_a.bytes, problem.bytes_b, problem.dtype_c.bytes)
    bias_bytes = problem.dtype_bias.bytes if problem.dtype_bias else 0
    vectors = (
        operand_row(product.scale_a, DType.FP32.bytes),
        operand_row(product.scale_b, problem.scale_dtype.bytes),
        operand_row(product.bias, bias_bytes),
    )
    scalars = (problem.alpha, problem.clamp_lo, problem.clamp_hi)
    table = Table(operand_rows(problem, product)) if d is None else d
    packing = problem.packing
    ldb = packing.stride(product.k) if isinstance(packing, VectorFormat) else None
    return _row(problem.layout, product, sizes, scalars, vectors, table, ldb)


def bare_row(layout: str, product: Product, sizes: tuple[int, int, int]) -> Struct:
    """A product without an epilogue; ``sizes`` are element bytes of A, B and C."""
    return _row(layout, product, sizes, (1.0, 0.0, 0.0), (_NULL_OPERAND,) * 3, Table(()))


def operand_rows(problem: GemmProblem, product: Product) -> tuple[Struct, ...]:
    """The D operands of a product, and behind them its zero points, if it has any."""
    rows = tuple(operand_row(view, dtype.bytes) for view, dtype in zip(product.d, problem.dtype_d, strict=True))
    return (*rows, operand_row(product.zero_b, DType.INT8.bytes)) if product.zero_b else rows


def operand_row(view: View | None, element_bytes: int) -> Struct:
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


def leading(view: View, rows: int, cols: int, letter: str) -> int:
    """The leading dimension of a matrix; where only one row (column) exists, what a contiguous matrix would have."""
    if letter == "r":
        return view.row_stride if rows > 1 else max(cols, 1)
    return view.col_stride if cols > 1 else max(rows, 1)


def _row(
    layout: str,
    product: Product,
    sizes: tuple[int, int, int],
    scalars: tuple[float, float, float],
    vectors: tuple[Struct, ...],
    d: Arg,
    ldb: int | None = None,
) -> Struct:
    """``tw_gemm_problem``: ``scalars`` are alpha and the bounds of Clamp, ``vectors`` scale_a, scale_b and bias;
    ``ldb`` replaces B's own leading dimension.
    """
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
            I64(leading(a, m, k, layout[0])),
            I64(leading(b, k, n, layout[1]) if ldb is None else ldb),
            I64(leading(out, m, n, "r")),
            I64(product.batch),
            I64(a.batch_stride),
            I64(b.batch_stride),
            I64(out.batch_stride),
            *(F64(value) for value in scalars),
            *vectors,
            d,
        )
    )
