"""Declarations of ``gemm`` and ``gemm_pack_b``: their operands, attributes and examples."""

from __future__ import annotations

from tilewright_gemm.problem.attributes import ATTRIBUTES
from tilewright_gemm.problem.operands import OPERANDS
from tilewright_gemm.problem.pack_b import PACK_ATTRIBUTES, PACK_OPERANDS
from tilewright_kit.contract.declaration import Declaration, Example
from tilewright_kit.contract.problem import Attribute, OperationRequest
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["GEMM", "PACK_B"]


def _example(title: str, operation: str, inputs: dict[str, TensorDesc], **attributes: Attribute) -> Example:
    return Example(title, OperationRequest(operation, inputs, {}, attributes))


_A, _B = TensorDesc.of("fp32", (64, 32)), TensorDesc.of("fp32", (32, 48))

GEMM = Declaration(
    "Product of matrices with fused steps: out = unary(binary(alpha * scale_a * scale_b * (a b) + bias, d...)).",
    OPERANDS,
    ATTRIBUTES,
    (
        _example("A product", "gemm", {"a": _A, "b": _B}),
        _example("A batch of products in bf16 with one B, in fp32", "gemm",
                 {"a": TensorDesc.of("bf16", (8, 64, 32)), "b": TensorDesc.of("bf16", (32, 48))}, out_dtype="fp32"),
        _example("B given as columns (transposed), with a bias and an activation", "gemm",
                 {"a": _A, "b": TensorDesc(_B.dtype, (32, 48), (1, 32)), "bias": TensorDesc.of("fp32", (48,))},
                 unary="Relu"),
        _example("A product of 8-bit integers, scaled by row, with an addend, in fp16", "gemm",
                 {"a": TensorDesc.of("int8", (64, 32)), "b": TensorDesc.of("int8", (32, 48)),
                  "c": TensorDesc.of("int32", (64, 48)), "scale_a": TensorDesc.of("fp32", (64, 1))}, out_dtype="fp16"),
        _example("A product times D, bounded", "gemm",
                 {"a": _A, "b": _B, "d[0]": TensorDesc.of("fp32", (64, 48))},
                 binary="Multiply", unary="Clamp", clamp_lo=0.0, clamp_hi=6.0),
        _example("Two products of different sizes in one call", "gemm",
                 {"a[0]": _A, "b[0]": _B, "a[1]": TensorDesc.of("fp32", (7, 32)), "b[1]": _B}),
    ),
    (
        "Leading dimensions of `a` and `b` broadcast as NumPy's do. In grouped calls every operand has the number of "
        "its group in front: `a[1]`, `d[1][0]`.",
        "The output may be the very tensor of `c` or of a `d` (accumulation in place).",
    ),
)  # fmt: skip

PACK_B = Declaration(
    "Packing of B, once, for many products; the output is passed as `b` of `gemm`.",
    PACK_OPERANDS,
    PACK_ATTRIBUTES,
    (_example("Weights for products of few rows", "gemm_pack_b", {"b": _B}, m=4),),
    (
        "Only kernels of CPUs and AMD GPUs read packed matrices. The reply's specification of `out` names the format; "
        "it goes with the packed matrix wherever that is used.",
    ),
)
