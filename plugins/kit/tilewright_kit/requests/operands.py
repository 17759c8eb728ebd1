"""Reading requests: the operands of elementwise steps, and outputs that a caller described, each checked.

``attributes`` checks what is no tensor. Every function raises ``InvalidArgumentError`` with field, value, rule and fix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from tilewright_kit.requests.attributes import refuse
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc, overlaps
from tilewright_kit.types.vocabulary import MAX_D, Binary, is_pair

__all__ = [
    "binary_step",
    "check_dtype_agrees",
    "check_epilogue_dtype",
    "check_exact_integers",
    "check_output",
    "check_pair",
    "in_order",
]

T = TypeVar("T")


# ---- operands of elementwise steps ----


def in_order(numbered: Mapping[int, T]) -> list[T]:
    """The D operands ``d[0]``, ``d[1]``, ... of a request, by their numbers."""
    if len(numbered) > MAX_D:
        raise refuse(f"at most {MAX_D} D operands fit a kernel", "d", len(numbered), "d_count", "add some up first")
    if sorted(numbered) != list(range(len(numbered))):
        raise refuse(
            "the D operands are not numbered from 0 without gaps",
            "d",
            sorted(numbered),
            "d_numbering",
            "name them d[0], d[1], ...",
        )
    return [numbered[index] for index in range(len(numbered))]


def binary_step(given: Binary | None, count: int) -> Binary:
    """The canonical step for ``count`` D operands: ``MultiD`` forms only for two or more. None: the caller named no
    step, and they are added.
    """
    if given is not None:
        _check_count(given, count)
    if not count:
        return Binary.NONE
    if given in (Binary.MULTIPLY, Binary.MULTI_D_MULTIPLY):
        return Binary.MULTIPLY if count == 1 else Binary.MULTI_D_MULTIPLY
    return Binary.ADD if count == 1 else Binary.MULTI_D_ADD


def _check_count(given: Binary, count: int) -> None:
    if given is Binary.NONE and count:
        reason = "D operands are given, but no step uses them"
        fix = "set binary to Add, Multiply, MultiDAdd or MultiDMultiply, or leave d out"
    elif given in (Binary.MULTI_D_ADD, Binary.MULTI_D_MULTIPLY) and not count:
        reason, fix = f"{given} needs D operands", "give d[0], d[1], ..."
    elif given in (Binary.ADD, Binary.MULTIPLY) and count != 1:
        reason = f"{given} takes exactly one D operand, not {count}"
        fix = f"use MultiD{given} for several, and give at least d[0]"
    else:
        return
    raise refuse(reason, "attributes.binary", given.value, "d_count", fix)


def check_epilogue_dtype(name: str, desc: TensorDesc, allowed: Collection[DType], operation: str) -> None:
    """``operation`` is a phrase: ``a GEMM of fp16``."""
    if desc.dtype not in allowed:
        raise refuse(
            f"{name} cannot be {desc.dtype} in {operation}",
            f"{name}.dtype",
            desc.dtype.value,
            "epilogue_dtype",
            f"use one of: {', '.join(allowed)}",
        )


def check_exact_integers(dtype: DType, steps: Iterable[tuple[str, object, bool]]) -> None:
    """An int32 result is the exact sum: the epilogue computes in fp32, which would round.

    ``steps`` are fields, their values, and whether the request has them do something.
    """
    rounding = [(field, value) for field, value, rounds in steps if rounds] if dtype == DType.INT32 else []
    if rounding:
        field, value = rounding[0]
        raise refuse(
            f"an int32 result is the exact sum of products and takes no {field.split('.')[-1]}",
            field,
            value,
            "integer_output",
            "set out_dtype to fp32, fp16 or bf16",
        )


# ---- element types ----


def check_pair(operation: str, a: DType, name: str, b: DType, convert: str) -> None:
    """Element types of two operands that are multiplied: ``b`` is that of the tensor ``name``, and ``convert`` what the
    fix calls it.
    """
    if not is_pair(a, b):
        raise refuse(
            f"there is no {operation} of {a} with {b}",
            f"{name}.dtype",
            b.value,
            "dtype_pair",
            "use int8 or floating-point operands"
            if a == DType.INT32
            else f"convert {convert} to {a} (fp8 and bf8 mix with each other; the rest must be equal)",
        )


# ---- outputs ----


def check_output(name: str, desc: TensorDesc, shape: tuple[int, ...], what: str = "result") -> None:
    """An output that the caller described has the shape of ``what`` is computed, and every element its own place."""
    if desc.shape != shape:
        raise refuse(
            f"{name} has shape {list(desc.shape)}, but the {what} has {list(shape)}",
            f"{name}.shape",
            desc.shape,
            "output_shape",
            f"give an output of shape {list(shape)}",
        )
    if desc.span and overlaps(desc):
        raise refuse(
            f"elements of {name} overlap in memory",
            f"{name}.strides",
            desc.strides,
            "output_overlap",
            "use strides that give every element its own place",
        )


def check_dtype_agrees(name: str, desc: TensorDesc, asked: DType | None) -> None:
    """An output's element type is what the attribute ``out_dtype`` says, if that is there."""
    if asked not in (None, desc.dtype):
        raise refuse(
            f"{name} is {desc.dtype}, but out_dtype says {asked}",
            "attributes.out_dtype",
            str(asked),
            "output_dtype",
            "leave out_dtype out, or let both agree",
        )
