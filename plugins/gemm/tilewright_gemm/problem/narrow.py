"""Checks of requests with operands of fewer than 8 bits (``config.narrow`` has the contract)."""

from __future__ import annotations

from dataclasses import replace

from tilewright_gemm.config.block_scales import DTYPES
from tilewright_gemm.config.narrow import NARROW, Narrow
from tilewright_gemm.problem.attributes import Attributes, refuse
from tilewright_gemm.problem.operands import Group
from tilewright_gemm.vocabulary import ScaleA, ScaleB, ScaleBlock
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["narrow_scales", "stored_values"]


def _forms(attributes: Attributes) -> tuple[Narrow | None, Narrow | None]:
    return NARROW.get(attributes.a_format.value), NARROW.get(attributes.b_format.value)


def narrow_scales(attributes: Attributes, scales: tuple[ScaleA, ScaleB]) -> tuple[ScaleA, ScaleB]:
    """The kinds of scales of blocks of 32, as the operands' formats name them."""
    a, b = _forms(attributes)
    return a.scale_a if a else scales[0], b.scale_b if b else scales[1]


def stored_values(group: Group, attributes: Attributes, a: TensorDesc, b: TensorDesc) -> tuple[TensorDesc, TensorDesc]:
    """A and B as matrices of the values that they hold, which count as fp8; strides are those of bytes. As they are, if
    both are stored as their types say.

    Raises ``InvalidArgumentError``.
    """
    form_a, form_b = _forms(attributes)
    if form_a is None and form_b is None:
        return a, b
    sides = (
        (group.inputs["a"][0], "a_format", form_a, a, -1),
        (group.inputs["b"][0], "b_format", form_b, b, -2),
    )
    for name, attribute, form, desc, axis in sides:
        _check_side(name, attribute, form, desc, axis, attributes.scale_block)
    held = [form.held_in(desc.shape[axis]) if form else desc.shape[axis] for _, _, form, desc, axis in sides]
    k = min(held)
    for name, _, form, desc, axis in sides:
        wanted = form.bytes_of(k) if form else k
        if desc.shape[axis] != wanted:
            what = f"{wanted} bytes of {form.name}" if form else f"{wanted} elements"
            raise refuse(
                f"the shorter operand has {k} values along k, which are {what}; {name} has {desc.shape[axis]}",
                f"{name}.shape",
                desc.shape,
                "k_mismatch",
                "give a [.., M, ceil(K bits / 8)] and b [.., ceil(K bits / 8), N] of packed values for one K",
            )
    values_a = replace(a, dtype=DType.FP8, shape=(*a.shape[:-1], k)) if form_a else a
    values_b = replace(b, dtype=DType.FP8, shape=(*b.shape[:-2], k, b.shape[-1])) if form_b else b
    return values_a, values_b


def _check_side(name: str, attribute: str, form: Narrow | None, desc: TensorDesc, axis: int, block: ScaleBlock) -> None:
    if form and block is not ScaleBlock.EXPONENTS:
        raise refuse(
            f"values of {form.name} have exponents of blocks of 32",
            "attributes.scale_block",
            block.value,
            "narrow_operands",
            f"set scale_block to {ScaleBlock.EXPONENTS.value} and give scale_a and scale_b (bytes of 127 stand for 1), "
            f"or leave {attribute} out",
        )
    if form and (desc.packing or desc.dtype is not DType.INT8):
        raise refuse(
            f"{name} is {'packed by gemm_pack_b' if desc.packing else desc.dtype}; values of {form.name} are packed in "
            "bytes, as int8",
            f"{name}.{'packing' if desc.packing else 'dtype'}",
            desc.packing or desc.dtype.value,
            "narrow_operands",
            "pack them along k (the client's pack_narrow does), viewed as int8",
        )
    if not form and desc.dtype not in DTYPES:
        raise refuse(
            f"packed values are multiplied with others, or with {' and '.join(DTYPES)}; {name} is {desc.dtype}",
            f"{name}.dtype",
            desc.dtype.value,
            "narrow_operands",
            "convert it to fp8 with an exponent for each block",
        )
    if not desc.packing and desc.shape[axis] > 1 and desc.strides[axis] != 1:
        raise refuse(
            f"the {'rows' if axis == -1 else 'columns'} of {name} are not contiguous",
            f"{name}.strides",
            desc.strides,
            "narrow_layout",
            "store a [M, bytes], and b as weights [N, bytes], of which the transposed view is passed",
        )
