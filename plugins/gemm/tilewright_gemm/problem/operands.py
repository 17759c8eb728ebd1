"""The names of a request's tensors, sorted into groups."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tilewright_gemm.problem.attributes import MAX_GROUPS, refuse
from tilewright_gemm.vocabulary import epilogue_dtypes, is_pair, output_dtypes
from tilewright_kit.contract.declaration import OperandSpec
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.requests.attributes import check_tensor
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import MAX_RANK, TensorDesc
from tilewright_kit.types.vocabulary import MAX_D

__all__ = ["OPERANDS", "TYPES_A", "Group", "check_tensor", "read_groups"]

TYPES_A = tuple(dtype for dtype in DType if is_pair(dtype, dtype))
_STEPS = tuple(dict.fromkeys(dtype for a in TYPES_A for dtype in epilogue_dtypes(a)))
_RESULT = "[*batch, M, N]"
_REPEATS = "Broadcasts to the result: each dimension is that of the result or 1. "
_INTEGER = _REPEATS + "int32 beside int8 operands only."
_BLOCKS = "Blocks only with the attribute `scale_block`, any strides, dimensions in full but for those of the batch."
_EXPONENTS = "Blocks of 32 have exponents of 8 bits (E8M0), as int8."
_ANY = (0, MAX_RANK)
OPERANDS = (
    OperandSpec(
        "a", Role.INPUT, "First factor.", ("[*batch, M, K]", "[*batch, M, ceil(K bits / 8)]"), (2, MAX_RANK), TYPES_A,
        constraint="One of its last two dimensions has stride 1; the others may have any stride. With `a_format` fp4, "
        "fp6 or bf6: bytes of contiguous rows.",
    ),
    OperandSpec(
        "b", Role.INPUT, "Second factor.",
        ("[*batch, K, N]", "[*batch, ceil(K/2), N]", "[*batch, ceil(K bits / 8), N]"), (2, MAX_RANK), TYPES_A,
        constraint="Strides as of `a`. Of the type of `a`, or fp8 beside bf8. With two dimensions it may be packed "
        "(`gemm_pack_b`). With `b_format` int4_128, fp4, fp6 or bf6: bytes of contiguous columns.",
    ),
    OperandSpec("bias", Role.INPUT, "Added to every row.", ("[N]", _RESULT), _ANY, _STEPS, True, constraint=_INTEGER),
    OperandSpec("c", Role.INPUT, "Added, after all `d`.", (_RESULT,), _ANY, _STEPS, True, constraint=_INTEGER),
    OperandSpec(
        "d", Role.INPUT, "Operands of the binary step.", (_RESULT,), _ANY, _STEPS, True, True,
        constraint=f"{_INTEGER} At most {MAX_D}.",
    ),
    OperandSpec(
        "scale_a", Role.INPUT, "Factor of `a`: one number, one for each row, or one for each block.",
        ("[]", "[*batch, M, 1]", "[*batch, M, ceil(K/128)]", "[*batch, M, ceil(K/32)]"), _ANY,
        (DType.FP32, DType.INT8), True, constraint=f"{_REPEATS}{_BLOCKS} {_EXPONENTS}",
    ),
    OperandSpec(
        "scale_b", Role.INPUT, "Factor of `b`: one number, one for each column, or one for each block.",
        (
            "[]", "[N]", "[*batch, 1, N]", "[*batch, N, ceil(K/128)]", "[*batch, ceil(N/128), ceil(K/128)]",
            "[*batch, N, ceil(K/32)]",
        ), _ANY, (DType.FP32, DType.FP16, DType.BF16, DType.INT8), True,
        constraint=f"{_REPEATS}{_BLOCKS} {_EXPONENTS} Else fp32, but for groups of 4-bit weights.",
    ),
    OperandSpec(
        "zero_b", Role.INPUT, "Zero points of 4-bit weights, from 0 to 15: one for each group.",
        ("[*batch, N, ceil(K/128)]",), _ANY, (DType.INT8,), True,
        constraint="Only with `b_format` int4_128. Any strides. Without it all are 8.",
    ),
    OperandSpec(
        "out", Role.OUTPUT, "Result.", (_RESULT,), (2, MAX_RANK),
        tuple(dict.fromkeys(dtype for a in TYPES_A for dtype in output_dtypes(a))),
        constraint="If it is not described, of the type of `a`, of fp16 for 8-bit floats, of int32 for int8. int32 is "
        "the exact sum, of int8 only.",
    ),
)  # fmt: skip
_INPUTS = [item.name for item in OPERANDS if item.role is Role.INPUT]
_NAME = re.compile(rf"({'|'.join(item.name for item in OPERANDS)})((?:\[(?:0|[1-9][0-9]{{0,5}})\])*)")
"""Numbers have one spelling, so that two names cannot mean one operand."""


@dataclass(slots=True)
class Group:
    """The operands of one product, as they were named."""

    inputs: dict[str, tuple[str, TensorDesc]] = field(default_factory=dict)
    d: dict[int, tuple[str, TensorDesc]] = field(default_factory=dict)
    out: tuple[str, TensorDesc] | None = None


def read_groups(request: OperationRequest, asked: int) -> tuple[list[Group], bool]:
    """The request's tensors by group; whether the caller named them as groups (``a[0]``, ``a[1]``, ...)."""
    for name, desc in (*request.inputs.items(), *request.outputs.items()):
        check_tensor(name, desc)
    grouped = asked > 0 or "a[0]" in request.inputs
    groups: dict[int, Group] = {}
    for name, desc in request.inputs.items():
        base, numbers = _split_name(name, grouped)
        if base == "out":
            raise _unknown_operand(name, grouped)
        group = groups.setdefault(numbers[0] if grouped else 0, Group())
        if base == "d":
            group.d[numbers[-1]] = (name, desc)
        else:
            group.inputs[base] = (name, desc)
    for name, desc in request.outputs.items():
        base, numbers = _split_name(name, grouped)
        if base != "out":
            raise refuse(
                f"GEMM has no output {name!r}",
                name,
                name,
                "operand_known",
                "the output is named out (out[0], ... if grouped)",
            )
        groups.setdefault(numbers[0] if grouped else 0, Group()).out = (name, desc)
    count = asked or max(len(groups), 1)
    if count > MAX_GROUPS:
        raise refuse(
            f"at most {MAX_GROUPS} groups fit in a call",
            "attributes.groups",
            count,
            "group_count",
            "make several calls",
        )
    if sorted(groups) != list(range(count)):
        missing = next((index for index in range(count) if index not in groups), None)
        raise refuse(
            f"{count} groups are asked for, but the operands name others"
            if missing is None
            else f"group {missing} has no operands",
            "attributes.groups",
            asked or len(groups),
            "group_count",
            f"number the operands a[0] to a[{count - 1}] without gaps, and likewise b and out",
        )
    return [groups[index] for index in range(count)], grouped


def _split_name(name: str, grouped: bool) -> tuple[str, list[int]]:
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise _unknown_operand(name, grouped)
    numbers = [int(number) for number in re.findall("[0-9]+", match[2])]
    if len(numbers) != grouped + (match[1] == "d"):
        raise _unknown_operand(name, grouped)
    return match[1], numbers


def _unknown_operand(name: object, grouped: bool) -> InvalidArgumentError:
    group = "[g]" if grouped else ""
    form = ", ".join(f"{item}{group}{'[i]' if item == 'd' else ''}" for item in _INPUTS)
    form += " for group g" if grouped else ""
    return refuse(f"GEMM has no input {name!r}", str(name), name, "operand_known", f"the inputs are {form}")
