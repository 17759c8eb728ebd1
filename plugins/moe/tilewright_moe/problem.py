"""Problems: rows of tokens sorted by expert, x [T, K], or with room for each expert, x [E, R, K]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilewright_gemm.fusion import GemmProblem, Product, View, default_output, output_dtypes
from tilewright_kit.contract.problem import Operand, OperationRequest, Problem, Role
from tilewright_kit.requests.attributes import (
    DEFAULT_ALIGNMENT,
    check_tensor,
    known_names,
    refuse,
    suggest,
    take_alignment,
    take_dtype,
    take_finite,
    take_flag,
    take_int,
)
from tilewright_kit.requests.operands import check_dtype_agrees, check_output, check_pair
from tilewright_kit.requests.products import ALPHA, FAST_ACCUMULATION, OUT_DTYPE
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc
from tilewright_moe.declaration import ATTRIBUTES, DTYPES, EXPECTED_ROWS, INPUTS, OUTPUTS, RETURN_STATUS

__all__ = ["MoeProblem", "check_values", "parse_moe", "value_operands"]


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
    k: int
    expected_rows: int = 0
    alpha: float = 1.0
    alignment: int = DEFAULT_ALIGNMENT
    fast_accumulation: bool = False

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
        return 2 * rows * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """With the weights of no more experts than may have rows."""
        x, w, out = (self._known(name) for name in ("x", "w", "out"))
        rows = self.typical_rows * self.busy_experts if self.masked else self.rows
        read = rows * self.k * x.dtype.bytes + self.busy_experts * self.n * self.k * w.dtype.bytes
        return read + rows * self.n * out.dtype.bytes

    @property
    def is_empty(self) -> bool:
        return 0 in (self.rows, self.n) and self.desc("status") is None

    def _known(self, name: str) -> TensorDesc:
        desc = self.desc(name)
        assert desc is not None, "parse checks that it is there"
        return desc

    def product(self, rows: int, batch: int) -> GemmProblem:
        """GEMM's problem of ``batch`` experts with so many rows each. Operands are named as here."""
        x, w, out = (self._known(name) for name in ("x", "w", "out"))
        part = Product(
            rows,
            self.n,
            self.k,
            batch,
            View("x", x.strides[-2], 1, x.strides[0] if self.masked else 0),
            View("w", w.strides[2], w.strides[1], w.strides[0]),
            View("out", out.strides[-2], 1, out.strides[0] if self.masked else 0),
        )
        return GemmProblem(
            dtype_a=x.dtype,
            dtype_b=w.dtype,
            dtype_c=out.dtype,
            layout=self.layout,
            products=(part,),
            tensors=tuple(item for item in self.tensors if item.name in ("x", "w", "out")),
            alpha=self.alpha,
            alignment=self.alignment,
            fast_accumulation=self.fast_accumulation,
        )

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
            "flops": self.flops,
        }


def parse_moe(request: OperationRequest) -> MoeProblem:
    """A checked problem. Raises ``InvalidArgumentError`` with field, value, rule and fix."""
    given, described = request.inputs, request.outputs
    for name, desc in (*given.items(), *described.items()):
        check_tensor(name, desc)
    for names, known in ((given, INPUTS), (described, OUTPUTS)):
        for name in names:
            if name not in known:
                raise refuse(f"there is no tensor {name!r}", name, name, "operand_known", suggest(name, known))
    for name in ("x", "w", "counts"):
        if name not in given:
            raise refuse(f"the input {name} is missing", name, "", "operand_missing", f"give the tensor {name}")
    for name, desc in (*given.items(), *described.items()):
        if desc.packing:
            raise refuse(f"{name} cannot be packed", f"{name}.packing", desc.packing, "packed_operand", "unpack it")
    known_names(request.attributes, ATTRIBUTES)
    x, w = given["x"], given["w"]
    _rank("x", x, (2, 3), "[rows, K], or [experts, rows, K]")
    _rank("w", w, (3,), "[experts, N, K]")
    for name, desc in (("x", x), ("w", w)):
        _dtype(name, desc, DTYPES)
    check_pair("product", x.dtype, "w", w.dtype, "w")
    experts, n, k = w.shape
    if experts == 0:
        raise refuse("there is no expert", "w.shape", w.shape, "expert_count", "give the weights of at least one")
    masked = len(x.shape) == 3
    if x.shape[-1] != k:
        fix = "make the last dimension of x equal to that of w, which is [experts, N, K]"
        raise refuse(f"x has rows of {x.shape[-1]}, but w has {k} columns", "x.shape", x.shape, "k_mismatch", fix)
    if masked and x.shape[0] != experts:
        fix = "make the first dimensions of x and w equal, or give x as [rows, K]"
        raise refuse(f"x is of {x.shape[0]} experts, but w of {experts}", "x.shape", x.shape, "expert_count", fix)
    _counts(given["counts"], experts)
    for name in ("scale_x", "scale_w"):
        if name in given:
            _scale(name, given[name], experts if name == "scale_w" else 1)
    out = _output(request, (*x.shape[:-1], n), x.dtype)
    _lines("x", x, "x")
    _lines("out", out, "out")
    inputs = [Operand(name, given[name], Role.INPUT) for name in INPUTS if name in given]
    outputs = [Operand("out", out, Role.OUTPUT)]
    if take_flag(request.attributes, RETURN_STATUS) or "status" in described:
        status = described.get("status", TensorDesc.of("int32", (4,)))
        _dtype("status", status, (DType.INT32,))
        check_output("status", status, (4,))
        if not status.is_contiguous:
            raise refuse("status has gaps", "status.strides", status.strides, "status_layout", "give it stride 1")
        outputs.append(Operand("status", status, Role.OUTPUT))
    return MoeProblem(
        tensors=(*inputs, *outputs),
        layout=f"r{_layout(w)}r",
        masked=masked,
        experts=experts,
        rows=x.shape[-2],
        n=n,
        k=k,
        expected_rows=take_int(request.attributes, EXPECTED_ROWS),
        alpha=take_finite(request.attributes, ALPHA),
        alignment=take_alignment(request.attributes),
        fast_accumulation=take_flag(request.attributes, FAST_ACCUMULATION),
    )


def _rank(name: str, desc: TensorDesc, ranks: tuple[int, ...], form: str) -> None:
    if len(desc.shape) not in ranks:
        raise refuse(f"{name} has {len(desc.shape)} dimensions", f"{name}.shape", desc.shape, "rank", f"give {form}")


def _dtype(name: str, desc: TensorDesc, allowed: tuple[DType, ...]) -> None:
    if desc.dtype not in allowed:
        fix = f"use one of: {', '.join(allowed)}"
        raise refuse(f"{name} cannot be {desc.dtype}", f"{name}.dtype", desc.dtype.value, "operand_dtype", fix)


def _counts(desc: TensorDesc, experts: int) -> None:
    _dtype("counts", desc, (DType.INT32,))
    if desc.shape != (experts,):
        fix = f"give the rows of each expert: shape [{experts}]"
        raise refuse(f"counts has shape {list(desc.shape)}", "counts.shape", desc.shape, "counts_shape", fix)
    if not desc.is_contiguous:
        raise refuse("counts has gaps", "counts.strides", desc.strides, "counts_layout", "give it stride 1")


def _scale(name: str, desc: TensorDesc, experts: int) -> None:
    _dtype(name, desc, (DType.FP32,))
    if desc.shape not in ((), (1,), (experts,)):
        fix = "give one number" + (f", or one for each of the {experts} experts" if name == "scale_w" else "")
        raise refuse(f"{name} has shape {list(desc.shape)}", f"{name}.shape", desc.shape, "scale_shape", fix)


def _output(request: OperationRequest, shape: tuple[int, ...], dtype: DType) -> TensorDesc:
    wanted = take_dtype(request.attributes, OUT_DTYPE)
    desc = request.outputs.get("out")
    if desc is None:
        desc = TensorDesc.of(wanted or default_output(dtype), shape)
    check_output("out", desc, shape, "product")
    check_dtype_agrees("out", desc, wanted)
    if desc.dtype not in output_dtypes(dtype):
        fix = f"use one of: {', '.join(output_dtypes(dtype))}"
        raise refuse(f"a product of {dtype} cannot be {desc.dtype}", "out.dtype", desc.dtype.value, "output_dtype", fix)
    return desc


def _lines(name: str, desc: TensorDesc, what: str) -> None:
    if desc.shape[-1] > 1 and desc.strides[-1] != 1:
        fix = f"give {what} with a last dimension of stride 1: make a contiguous copy"
        raise refuse(f"rows of {name} have gaps", f"{name}.strides", desc.strides, "row_layout", fix)


def _layout(w: TensorDesc) -> str:
    if w.strides[2] == 1 or w.shape[2] <= 1:
        return "c"
    if w.strides[1] == 1 or w.shape[1] <= 1:
        return "r"
    fix = "give w with stride 1 along N or K: make a contiguous copy"
    raise refuse("neither N nor K of w has stride 1", "w.strides", w.strides, "weight_layout", fix)


# ---- counts ----


def value_operands(problem: MoeProblem) -> tuple[str, ...]:  # noqa: ARG001 (of every operation)
    """The operands that ``check_values`` looks at."""
    return ("counts",)


def check_values(problem: MoeProblem, values: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise ``InvalidArgumentError`` for counts that are negative, or more than the rows that there are."""
    counts = values.get("counts")
    if counts is None or not counts.size:
        return
    most = problem.rows
    if int(counts.min()) < 0 or int(counts.max()) > most:
        at = int(np.flatnonzero((counts < 0) | (counts > most))[0])
        room = f"an expert has room for {most}" if problem.masked else f"x has {most}"
        raise refuse(
            f"expert {at} has {int(counts[at])} rows, but {room}",
            f"counts[{at}]",
            int(counts[at]),
            "count_range",
            f"give counts from 0 to {most}",
        )
    if not problem.masked and (total := int(counts.sum(dtype=np.int64))) > most:
        at = int(np.flatnonzero(np.cumsum(counts, dtype=np.int64) > most)[0])
        raise refuse(
            f"the experts have {total} rows together, but x has {most}",
            f"counts[{at}]",
            int(counts[at]),
            "count_sum",
            f"give counts whose sum is at most {most}",
        )
