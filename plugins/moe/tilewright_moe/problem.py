"""Problems: rows of tokens sorted by expert, x [T, K], or with room for each expert, x [E, R, K]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tilewright_gemm.fusion import SCALES, GemmProblem, Product, ScaleA, ScaleB, ScaleBlock, View
from tilewright_kit.contract.problem import Operand, Problem
from tilewright_kit.requests.attributes import DEFAULT_ALIGNMENT
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["LEAST_RANGE", "RESULT_BLOCK", "TURN", "MoeProblem"]

TURN = 8
"""Rows of a gate's weights that follow each other, and of the other projection's behind them."""
RESULT_BLOCK = 128
"""Columns of the result that share a factor."""
LEAST_RANGE = 2.0**-100
"""Blocks whose largest magnitude is less than this are quantised as if it were this."""


@dataclass(frozen=True)
class MoeProblem(Problem):
    """A checked request. ``rows`` are all rows of x, or with ``masked`` those that an expert has room for."""

    operation: ClassVar[str] = "moe_gemm"

    tensors: tuple[Operand, ...]
    layout: str
    """Letters of x, of an expert's weights as K x N, and of the result: ``rcr`` where K lies in a row."""
    masked: bool
    experts: int
    rows: int
    n: int
    """Columns of the result."""
    k: int
    expected_rows: int = 0
    alpha: float = 1.0
    alignment: int = DEFAULT_ALIGNMENT
    fast_accumulation: bool = False
    scale_block: ScaleBlock = ScaleBlock.NONE
    """Blocks of x and of weights that have a factor each, which the main loop multiplies sums with."""

    gated: bool = False
    """The result is silu(gate) * up, of weights that hold both, in turns of ``TURN`` rows."""
    quantised: bool = False
    """The result is fp8, with a factor for each row and ``RESULT_BLOCK`` columns."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.tensors

    def desc(self, name: str) -> TensorDesc | None:
        """The tensor of that name; None if there is none."""
        return next((item.desc for item in self.tensors if item.name == name), None)

    @property
    def all_rows(self) -> int:
        return self.rows * (self.experts if self.masked else 1)

    @property
    def typical_rows(self) -> int:
        """Rows of an expert that has any, as far as the request tells."""
        if self.masked or self.expected_rows:
            return max(min(self.expected_rows or self.rows, self.rows), 1)
        return max(-(-self.rows // self.busy_experts), 1)

    @property
    def busy_experts(self) -> int:
        """Experts that may have rows."""
        return max(min(self.experts, self.all_rows), 1)

    @property
    def flops(self) -> int:
        rows = self.typical_rows * self.busy_experts if self.masked else self.rows
        return 2 * rows * self.columns * self.k

    @property
    def columns(self) -> int:
        """Rows of an expert's weights: columns of the product."""
        return self.n * (2 if self.gated else 1)

    @property
    def fused(self) -> bool:
        """True if results are not the sums as they are."""
        return self.gated or self.quantised

    @property
    def bytes_moved(self) -> int:
        """With the weights of no more experts than may have rows."""
        x, w, out = (self._known(name) for name in ("x", "w", "out"))
        rows = self.typical_rows * self.busy_experts if self.masked else self.rows
        read = rows * self.k * x.dtype.bytes + self.busy_experts * self.columns * self.k * w.dtype.bytes
        if self.block_scaled:
            scale_x, scale_w = (self._known(name) for name in ("scale_x", "scale_w"))
            lines = self.busy_experts * scale_w.shape[1]
            read += (rows + lines) * scale_x.shape[-1] * scale_x.dtype.bytes
        factors = rows * -(-self.n // RESULT_BLOCK) * DType.FP32.bytes if self.quantised else 0
        return read + rows * self.n * out.dtype.bytes + factors

    @property
    def block_scaled(self) -> bool:
        return self.scale_block is not ScaleBlock.NONE

    @property
    def scales(self) -> tuple[ScaleA, ScaleB]:
        """Kinds of scales of blocks, as GEMM's kernels name them."""
        return SCALES.get(self.scale_block, (ScaleA.NONE, ScaleB.NONE))

    @property
    def is_empty(self) -> bool:
        return 0 in (self.rows, self.n) and self.desc("status") is None

    def _known(self, name: str) -> TensorDesc:
        desc = self.desc(name)
        assert desc is not None, "parse checks that it is there"
        return desc

    def product(self, rows: int, batch: int) -> GemmProblem:
        """GEMM's problem of ``batch`` experts with so many rows each. Operands are named as here. Where steps are
        fused with it, its result stands for the sums, which lie nowhere or in the workspace.
        """
        x, w, out = (self._known(name) for name in ("x", "w", "out"))
        part = Product(
            rows,
            self.columns,
            self.k,
            batch,
            View("x", x.strides[-2], 1, x.strides[0] if self.masked else 0),
            View("w", w.strides[2], w.strides[1], w.strides[0]),
            View("out", out.strides[-2], 1, out.strides[0] if self.masked else 0),
        )
        if self.block_scaled:
            scale_a, scale_b = self._scale_views()
            part = replace(part, scale_a=scale_a, scale_b=scale_b)
        return GemmProblem(
            dtype_a=x.dtype,
            dtype_b=w.dtype,
            dtype_c=DType.FP32 if self.fused else out.dtype,
            layout=self.layout,
            products=(part,),
            tensors=tuple(item for item in self.tensors if item.name in ("x", "w", "out")),
            alpha=self.alpha,
            scale_a=self.scales[0],
            scale_b=self.scales[1],
            alignment=self.alignment,
            fast_accumulation=self.fast_accumulation,
        )

    def _scale_views(self) -> tuple[View, View]:
        """Where factors of blocks lie: of rows of x and blocks of k, and of columns, or blocks of them, and of k."""
        x, w = (self._known(name).strides for name in ("scale_x", "scale_w"))
        return View("scale_x", x[-2], x[-1], x[0] if self.masked else 0), View("scale_w", w[1], w[2], w[0])

    @property
    def typical(self) -> GemmProblem:
        """The batch of products by which kernels are chosen: experts that may have rows, with as many as is usual."""
        found = self.product(self.typical_rows, self.busy_experts)
        (part,) = found.products
        stride = part.a.row_stride * self.typical_rows, part.out.row_stride * self.typical_rows
        apart = replace(part, a=replace(part.a, batch_stride=stride[0]), out=replace(part.out, batch_stride=stride[1]))
        return replace(found, products=(part if self.masked else apart,))

    def describe(self) -> dict[str, Any]:
        x, out = self._known("x"), self._known("out")
        return {
            "operation": self.operation,
            "dtype": x.dtype.value,
            "dtype_out": out.dtype.value,
            "layout": self.layout,
            "form": "masked" if self.masked else "contiguous",
            "experts": self.experts,
            "rows": self.rows,
            "expected_rows": self.typical_rows,
            "n": self.n,
            "k": self.k,
            **({"activation": "swiglu"} if self.gated else {}),
            **({"out_scale_block": f"1x{RESULT_BLOCK}"} if self.quantised else {}),
            **({"scale_block": self.scale_block.value} if self.block_scaled else {}),
            "flops": self.flops,
        }
