"""Requests: ``x`` of shape [rows, columns], ``weight`` of shape [columns], ``out`` like ``x``; all fp32."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewright_kit.contract.declaration import Declaration, Example, OperandSpec
from tilewright_kit.contract.problem import Operand, OperationRequest, Problem, Role
from tilewright_kit.requests.attributes import known_names, number, take_number
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["DECLARATION", "RmsNormProblem", "parse"]

EPSILON = number("epsilon", "Added to the mean of squares.", 1e-6, lowest=0, constraint="Finite.")
_FP32 = (DType.FP32,)
DECLARATION = Declaration(
    "RMS normalisation of rows: out = x / sqrt(mean(x^2) + epsilon) * weight.",
    (
        OperandSpec("x", Role.INPUT, "Rows.", ("[rows, columns]",), (2, 2), _FP32),
        OperandSpec("weight", Role.INPUT, "Factor of each column.", ("[columns]",), (1, 1), _FP32),
        OperandSpec("out", Role.OUTPUT, "Normalised rows.", ("[rows, columns]",), (2, 2), _FP32),
    ),
    (EPSILON,),
    (
        Example(
            "A batch of hidden states",
            OperationRequest(
                "rmsnorm", {"x": TensorDesc.of("fp32", (64, 384)), "weight": TensorDesc.of("fp32", (384,))}
            ),
        ),
    ),
)


@dataclass(frozen=True)
class RmsNormProblem(Problem):
    operation: ClassVar[str] = "rmsnorm"

    x: TensorDesc
    weight: TensorDesc
    out: TensorDesc
    epsilon: float

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    @property
    def columns(self) -> int:
        return self.x.shape[1]

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (
            Operand("x", self.x, Role.INPUT),
            Operand("weight", self.weight, Role.INPUT),
            Operand("out", self.out, Role.OUTPUT),
        )

    @property
    def flops(self) -> int:
        return 4 * self.x.size

    def describe(self) -> dict[str, Any]:
        return {"rows": self.rows, "columns": self.columns, "epsilon": self.epsilon}


def parse(request: OperationRequest) -> RmsNormProblem:
    """A checked problem. Raises ``InvalidArgumentError`` naming the field, the rule and the fix."""
    known = {"inputs": ("x", "weight"), "outputs": ("out",)}
    for group, names in known.items():
        for name in getattr(request, group):
            if name not in names:
                raise _refusal(f"{group}.{name}", name, "rmsnorm_operands", f"use {', '.join(names)}")
    known_names(request.attributes, DECLARATION.attributes)
    for name in known["inputs"]:
        if name not in request.inputs:
            raise _refusal(f"inputs.{name}", "missing", "rmsnorm_operands", f"give the tensor {name}")
    x, weight = request.inputs["x"], request.inputs["weight"]
    _require_plain("inputs.x", x, rank=2)
    _require_plain("inputs.weight", weight, rank=1)
    if weight.shape != x.shape[1:]:
        raise _refusal("inputs.weight", weight.shape, "rmsnorm_shapes", f"give it the shape {list(x.shape[1:])}")
    out = request.outputs.get("out", TensorDesc.of(x.dtype, x.shape))
    _require_plain("outputs.out", out, rank=2)
    if out.shape != x.shape or (out.shape[0] > 1 and out.strides[0] < out.shape[1]):
        raise _refusal("outputs.out", out.shape, "rmsnorm_shapes", "give it the shape of x, without overlapping rows")
    epsilon = take_number(request.attributes, EPSILON, 0.0, lambda value: 0 <= value < math.inf, "a number from 0 up")
    return RmsNormProblem(x, weight, out, epsilon)


def _require_plain(field: str, desc: TensorDesc, rank: int) -> None:
    desc.check(field)
    if desc.packing or desc.dtype is not DType.FP32 or len(desc.shape) != rank:
        raise _refusal(field, desc.shape, "rmsnorm_tensor", f"give an fp32 tensor of {rank} dimensions")
    if desc.shape[-1] > 1 and desc.strides[-1] != 1:
        raise _refusal(field, desc.strides, "rmsnorm_tensor", "make its last dimension contiguous")


def _refusal(field: str, value: object, rule: str, fix: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"rmsnorm cannot take {field}", field=field, value=value, rule=rule, fix=fix)
