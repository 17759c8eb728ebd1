"""Problems: one or more products of equal element types, layouts and epilogue.

    out = unary(binary(alpha * scale_a * scale_b * (A x B) + bias, D0, D1, ...))

A [.., M, K], B [.., K, N], out [.., M, N]. ``parse`` makes problems from requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from tilewright_gemm.config.block_scales import is_block_scaled
from tilewright_gemm.config.int4 import is_int4, scale_dtype
from tilewright_gemm.config.narrow import widths
from tilewright_gemm.config.packing import Packing
from tilewright_gemm.vocabulary import Binary, ScaleA, ScaleB, Unary, accumulator
from tilewright_kit.contract.problem import Operand, Problem
from tilewright_kit.requests.attributes import DEFAULT_ALIGNMENT
from tilewright_kit.requests.describe import describe_steps, describe_unusual
from tilewright_kit.types.dtypes import DType

__all__ = ["GemmProblem", "PackBProblem", "Product", "View"]


@dataclass(frozen=True, slots=True)
class View:
    """The place of an operand: element (batch, i, j) is at
    ``offset + batch*batch_stride + i*row_stride + j*col_stride``, in elements.

    A zero stride broadcasts; strides of dimensions of size one are zero, so that equal problems compare equal.
    """

    operand: str
    row_stride: int
    col_stride: int
    batch_stride: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Product:
    """One (strided, possibly batched) matrix product.

    ``scale_a`` varies along rows, ``scale_b`` along columns, ``bias`` along columns. Scales of blocks have blocks of k
    as columns; rows of ``scale_b`` are then columns, or blocks of columns. Likewise those of groups of packed 4-bit
    weights, and ``zero_b``; the rows of ``b`` are then bytes. Lines of operands of fewer than 8 bits are bytes.
    """

    m: int
    n: int
    k: int
    batch: int
    a: View
    b: View
    out: View
    bias: View | None = None
    d: tuple[View, ...] = ()
    scale_a: View | None = None
    scale_b: View | None = None
    zero_b: View | None = None

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def is_empty(self) -> bool:
        return 0 in (self.m, self.n, self.batch)


@dataclass(frozen=True, eq=True)
class GemmProblem(Problem):
    """A checked GEMM request, in canonical form."""

    operation: ClassVar[str] = "gemm"

    dtype_a: DType
    dtype_b: DType
    dtype_c: DType
    layout: str
    """``rcr``, ``rrr``, ``crr`` or ``ccr``. A packed B counts as column-major."""
    products: tuple[Product, ...]
    tensors: tuple[Operand, ...]
    grouped: bool = False
    packing: Packing | None = None
    alpha: float = 1.0
    binary: Binary = Binary.NONE
    unary: Unary = Unary.NONE
    clamp_lo: float = 0.0
    clamp_hi: float = 0.0
    dtype_bias: DType | None = None
    dtype_d: tuple[DType, ...] = ()
    scale_a: ScaleA = ScaleA.NONE
    scale_b: ScaleB = ScaleB.NONE
    split_k: int = 0
    """Slices of K that the caller asked for; 0: the planner decides."""
    alignment: int = DEFAULT_ALIGNMENT
    """Bytes of which every operand's address is a multiple, by the caller's word."""
    fast_accumulation: bool = False
    """True if sums of 8-bit floats may have fewer bits than fp32."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Plans are looked up by problem at every dispatch; hashing some forty fields each time would cost more than
        # the lookup.
        return hash(
            (self.dtype_a, self.dtype_b, self.dtype_c, self.layout, self.products, self.binary, self.unary, self.alpha)
        )

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.tensors

    @property
    def dtype_acc(self) -> DType:
        return accumulator(self.dtype_a)

    @cached_property
    def flops(self) -> int:
        return sum(product.flops for product in self.products)

    @property
    def m(self) -> int:
        """Rows of the largest product; what models and tables go by."""
        return self.largest.m

    @property
    def n(self) -> int:
        return self.largest.n

    @property
    def k(self) -> int:
        return self.largest.k

    @cached_property
    def largest(self) -> Product:
        return max(self.products, key=lambda product: product.flops)

    @property
    def is_batched(self) -> bool:
        return any(product.batch > 1 for product in self.products)

    @property
    def num_d(self) -> int:
        return len(self.dtype_d)

    @property
    def block_scaled(self) -> bool:
        """True if sums of blocks are scaled before they are added (``config.block_scales``)."""
        return is_block_scaled(self.scale_a, self.scale_b)

    @property
    def int4(self) -> bool:
        """True if B is packed 4-bit weights (``config.int4``)."""
        return is_int4(self.scale_b)

    @property
    def narrow(self) -> bool:
        """True if A or B has fewer than 8 bits (``config.narrow``)."""
        return min(widths(self.scale_a, self.scale_b)) < 8

    @property
    def bytes_b(self) -> int:
        """Bytes of a stored element of B."""
        return 1 if self.int4 else self.dtype_b.bytes

    @property
    def scale_dtype(self) -> DType:
        """Element type of ``scale_b``."""
        return scale_dtype(self.scale_b)

    def describe(self) -> dict[str, Any]:
        sizes = [
            {"m": product.m, "n": product.n, "k": product.k, "batch": product.batch} for product in self.products[:16]
        ]
        record: dict[str, Any] = {
            "operation": self.operation,
            "dtype_a": self.dtype_a.value,
            "dtype_b": self.dtype_b.value,
            "dtype_c": self.dtype_c.value,
            "layout": self.layout,
            "products": sizes,
            "num_products": len(self.products),
            "grouped": self.grouped,
            **describe_steps(self),
            "scale_a": self.scale_a.value,
            "scale_b": self.scale_b.value,
            "flops": self.flops,
            **describe_unusual(self),
        }
        if self.packing:
            record["packing"] = str(self.packing)
        return record


@dataclass(frozen=True)
class PackBProblem(Problem):
    """Packing of B [K, N] for later products with about ``m`` rows.

    If ``packing`` is None the planner chooses the format: the plan's operands then describe the output in full, where
    the problem's cannot yet.
    """

    operation: ClassVar[str] = "gemm_pack_b"

    dtype_a: DType
    dtype_b: DType
    layout: str
    m: int
    n: int
    k: int
    b: View
    tensors: tuple[Operand, ...]
    packing: Packing | None = None

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.tensors

    @property
    def flops(self) -> int:
        return 0

    @property
    def is_empty(self) -> bool:
        # A B without rows still has column sums to write, for int8.
        return self.n == 0

    def describe(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "dtype_a": self.dtype_a.value,
            "dtype_b": self.dtype_b.value,
            "layout": self.layout,
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "packing": str(self.packing) if self.packing else None,
        }
