"""Requests: ``x`` [m, k], ``w_gate`` and ``w_up`` [k, n], ``w_down`` [n, l], ``out`` [m, l], of one float type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tilewright_gemm.fusion import GemmProblem, parse_gemm
from tilewright_kit.contract.problem import Operand, OperationRequest, Problem, Role
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["INPUTS", "SwigluProblem", "parse_swiglu"]

INPUTS = ("x", "w_gate", "w_up", "w_down")
DTYPES = (DType.FP32, DType.FP16, DType.BF16)


@dataclass(frozen=True)
class SwigluProblem(Problem):
    """The three products, in the order in which they run."""

    operation: ClassVar[str] = "swiglu"

    gate: GemmProblem
    """fp32: silu(x w_gate)."""
    up: GemmProblem
    """(x w_up) times the gate."""
    down: GemmProblem
    tensors: tuple[Operand, ...]

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.tensors

    @property
    def flops(self) -> int:
        return self.gate.flops + self.up.flops + self.down.flops

    def describe(self) -> dict[str, Any]:
        sizes = {"m": self.up.m, "k": self.up.k, "n": self.up.n, "l": self.down.n}
        return {"operation": self.operation, "dtype": self.up.dtype_a.value, **sizes, "flops": self.flops}


def parse_swiglu(request: OperationRequest) -> SwigluProblem:
    """A checked problem. Raises ``InvalidArgumentError`` with field, value, rule and fix."""
    for group, known in (("inputs", INPUTS), ("outputs", ("out",)), ("attributes", ())):
        for name in getattr(request, group):
            if name not in known:
                raise _invalid(f"{group}.{name}", name, "swiglu_operands", f"use {', '.join(known) or 'none'}")
    if missing := [name for name in INPUTS if name not in request.inputs]:
        raise _invalid(f"inputs.{missing[0]}", "missing", "swiglu_operands", f"give the tensor {missing[0]}")
    x, w_gate, w_up, w_down = (_matrix(name, request.inputs[name]) for name in INPUTS)
    _same("w_gate", w_gate.shape[0], x.shape[1])
    _same("w_up", w_up.shape, w_gate.shape)
    _same("w_down", w_down.shape[0], w_up.shape[1])
    out = _matrix("out", request.outputs.get("out", TensorDesc.of(x.dtype, (x.shape[0], w_down.shape[1]))))
    _same("out", out.shape, (x.shape[0], w_down.shape[1]))
    for name, desc in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down), ("out", out)):
        _same(name, desc.dtype.value, x.dtype.value)
    gated, hidden = (TensorDesc.of(dtype, (x.shape[0], w_up.shape[1])) for dtype in (DType.FP32, x.dtype))
    gate = _product({"a": x, "b": w_gate}, gated, "w_gate", unary="Silu")
    up = _product({"a": x, "b": w_up, "d[0]": gated}, hidden, "w_up", binary="Multiply")
    down = _product({"a": hidden, "b": w_down}, out, "w_down")
    given = zip(INPUTS, (x, w_gate, w_up, w_down), strict=True)
    inputs = tuple(Operand(name, desc, Role.INPUT) for name, desc in given)
    return SwigluProblem(gate, up, down, (*inputs, Operand("out", out, Role.OUTPUT)))


def _product(inputs: dict[str, TensorDesc], out: TensorDesc, weight: str, **attributes: Any) -> GemmProblem:
    try:
        return parse_gemm(OperationRequest("gemm", inputs, {"out": out}, attributes))
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"the product with {weight}: {error.reason}",
            field=weight,
            value=error.value,
            rule=error.rule,
            fix=error.fix,
        ) from error


def _matrix(name: str, desc: TensorDesc) -> TensorDesc:
    desc.check(name)
    if desc.packing or len(desc.shape) != 2 or desc.dtype not in DTYPES:
        raise _invalid(name, desc.shape, "swiglu_tensor", "give a plain matrix of fp32, fp16 or bf16")
    return desc


def _same(name: str, have: object, want: object) -> None:
    if have != want:
        raise _invalid(name, have, "swiglu_shapes", f"give it {want}")


def _invalid(field: str, value: object, rule: str, fix: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"swiglu cannot take {field}", field=field, value=value, rule=rule, fix=fix)
