"""Requests for a strided copy: what transform stages run is an operation of its own."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_grouped_conv.problem.problem import TransformProblem
from tilewright_kit.contract.declaration import Declaration, Example, OperandSpec
from tilewright_kit.contract.problem import Operand, OperationRequest, Role
from tilewright_kit.requests.attributes import ALIGNMENT, check_tensor, known_names, refuse, take_alignment
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import UnsupportedError
from tilewright_kit.types.tensor import TensorDesc, overlaps

__all__ = ["DECLARATION", "parse_transform"]

_FLOATS = (DType.FP32, DType.FP16, DType.BF16)
_RANKS = (3, 5)
ATTRIBUTES = (ALIGNMENT,)
DECLARATION = Declaration(
    "Strided copy with conversion: elements that `x` has are copied, the others of `out` become zero.",
    (
        OperandSpec("x", Role.INPUT, "Tensor that is copied, with any strides.", ("[*sizes]",), _RANKS, tuple(DType)),
        OperandSpec(
            "out", Role.OUTPUT, "Tensor that it is copied to.", ("[*sizes]",), _RANKS, tuple(DType),
            constraint="Always described; as many dimensions as `x`, none shorter. Of the type of `x`, or both are "
            "fp32, fp16 or bf16.",
        ),
    ),
    ATTRIBUTES,
    (
        Example(
            "An image to channels-last, two channels filled up with zeros, in bf16",
            OperationRequest(
                "conv_transform",
                {"x": TensorDesc.of("fp32", (2, 6, 8, 8))},
                {"out": TensorDesc.of("bf16", (2, 8, 8, 8), (512, 1, 64, 8))},
            ),
        ),
    ),
)  # fmt: skip


def parse_transform(request: OperationRequest) -> TransformProblem:
    """Check a request. Raises ``InvalidArgumentError`` or ``UnsupportedError``."""
    known_names(request.attributes, ATTRIBUTES)
    x = _tensor(request.inputs, "x", "the tensor that is copied")
    out = _tensor(request.outputs, "out", "the tensor that it is copied to, with its strides")
    if len(out.shape) != len(x.shape) or any(
        have < kept for have, kept in zip(out.shape, x.shape, strict=len(out.shape) == len(x.shape))
    ):
        raise refuse(
            f"out has shape {list(out.shape)}, which does not hold {list(x.shape)}",
            "out.shape",
            out.shape,
            "output_shape",
            "give it as many dimensions, none of them shorter than x's",
        )
    if out.span and overlaps(out):
        raise refuse(
            "elements of out overlap in memory",
            "out.strides",
            out.strides,
            "output_overlap",
            "use strides that give every element its own place",
        )
    if x.dtype != out.dtype and not (x.dtype in _FLOATS and out.dtype in _FLOATS):
        raise UnsupportedError(
            f"a copy does not convert {x.dtype} to {out.dtype}",
            field="out.dtype",
            value=out.dtype.value,
            rule="dtype_pair",
            fix="use equal element types, or fp32, fp16 and bf16",
        )
    return TransformProblem(
        dtype_in=x.dtype,
        dtype_out=out.dtype,
        sizes=out.shape,
        kept=x.shape,
        from_strides=tuple(stride if size > 1 else 0 for size, stride in zip(x.shape, x.strides, strict=True)),
        to_strides=tuple(stride if size > 1 else 0 for size, stride in zip(out.shape, out.strides, strict=True)),
        tensors=(Operand("x", x, Role.INPUT), Operand("out", out, Role.OUTPUT)),
        alignment=take_alignment(request.attributes),
    )


def _tensor(tensors: Mapping[str, TensorDesc], name: str, what: str) -> TensorDesc:
    for other in tensors:
        check_tensor(other, tensors[other])
        if other != name:
            raise refuse(f"there is no tensor {other!r} here", str(other), other, "operand_known", "give x and out")
    if name not in tensors:
        raise refuse(f"{name} is missing", name, "", "operand_missing", f"give {what}")
    desc = tensors[name]
    if desc.packing:
        raise refuse(f"{name} is packed", f"{name}.packing", desc.packing, "packed_operand", "pass a plain tensor")
    if not _RANKS[0] <= len(desc.shape) <= _RANKS[1]:
        raise refuse(
            f"{name} has {len(desc.shape)} dimensions",
            f"{name}.shape",
            desc.shape,
            "tensor_rank_3_to_5",
            "give three to five: reshape it, sizes of one do no harm",
        )
    return desc
