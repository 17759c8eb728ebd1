"""Checks of requests with packed 4-bit weights (``config.int4`` has the contract)."""

from __future__ import annotations

from tilewright_gemm.config.int4 import DTYPES, GROUP_K, SCALE_DTYPES, group_shape, packed_rows, scale_kind
from tilewright_gemm.problem.attributes import refuse
from tilewright_gemm.problem.operands import Group
from tilewright_gemm.vocabulary import BFormat, ScaleB, ScaleBlock, output_dtypes
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["check_int4", "int4_output", "no_zeros"]


def no_zeros(group: Group) -> None:
    """Zero points are for packed weights alone. Raises ``InvalidArgumentError``."""
    if "zero_b" in group.inputs:
        name = group.inputs["zero_b"][0]
        raise refuse(
            f"{name} goes with packed 4-bit weights, and b_format says plain",
            name,
            "",
            "int4_operands",
            f"set b_format to {BFormat.INT4.value}, or leave {name} out",
        )


def int4_output(dtype_a: DType) -> DType:
    """The result's type, if the caller names none: A's own, fp16 for types of 8 bits."""
    return dtype_a if dtype_a in output_dtypes(dtype_a) and dtype_a.is_float else DType.FP16


def check_int4(group: Group, block: ScaleBlock, a: TensorDesc, b: TensorDesc) -> ScaleB:
    """B is bytes in columns, for a K of A; scales, and zero points if there are any, are those of its groups.

    Raises ``InvalidArgumentError``.
    """
    a_name, b_name = group.inputs["a"][0], group.inputs["b"][0]
    if a.dtype not in DTYPES:
        raise refuse(
            f"4-bit weights are multiplied with {', '.join(DTYPES)}; {a_name} is {a.dtype}",
            f"{a_name}.dtype",
            a.dtype.value,
            "int4_operands",
            "convert it to fp16 or bf16",
        )
    if b.packing or b.dtype is not DType.INT8:
        raise refuse(
            f"{b_name} is {'packed by gemm_pack_b' if b.packing else b.dtype}; 4-bit weights are two a byte, in int8",
            f"{b_name}.{'packing' if b.packing else 'dtype'}",
            b.packing or b.dtype.value,
            "int4_operands",
            "pack two values a byte along k (the client's quantize_int4 and pack_int4 do), viewed as int8",
        )
    if block is not ScaleBlock.NONE:
        raise refuse(
            "4-bit weights have scales of groups of their own",
            "attributes.scale_block",
            block.value,
            "int4_operands",
            "leave scale_block out",
        )
    k, n = a.shape[-1], b.shape[-1]
    if b.shape[-2] != packed_rows(k):
        raise refuse(
            f"{a_name} has {k} columns, which are {packed_rows(k)} bytes of {b_name}; it has {b.shape[-2]} rows",
            f"{b_name}.shape",
            b.shape,
            "k_mismatch",
            "give b [.., ceil(K / 2), N]: the transposed view of weights [N, ceil(K / 2)]",
        )
    if b.shape[-2] > 1 and b.strides[-2] != 1:
        raise refuse(
            f"the columns of {b_name} are not contiguous",
            f"{b_name}.strides",
            b.strides,
            "int4_layout",
            "store weights [N, ceil(K / 2)] and pass the transposed view",
        )
    _check_groups(group, "scale_b", SCALE_DTYPES, group_shape(n, k), required=True)
    _check_groups(group, "zero_b", (DType.INT8,), group_shape(n, k), required=False)
    return scale_kind(group.inputs["scale_b"][1].dtype, "zero_b" in group.inputs)


def _check_groups(
    group: Group, base: str, dtypes: tuple[DType, ...], shape: tuple[int, int], *, required: bool
) -> None:
    form = f"[.., N, ceil(K / {GROUP_K})]"
    if base not in group.inputs:
        if required:
            raise refuse(
                f"4-bit weights have a factor for each group, but {base} is missing",
                base,
                "",
                "int4_operands",
                f"give {base} {form}, here {list(shape)}",
            )
        return
    name, desc = group.inputs[base]
    if desc.packing or desc.dtype not in dtypes:
        raise refuse(
            f"{name} is {'packed' if desc.packing else desc.dtype}; for 4-bit weights it is {' or '.join(dtypes)}",
            f"{name}.{'packing' if desc.packing else 'dtype'}",
            desc.packing or desc.dtype.value,
            "int4_scale_dtype",
            f"convert it to {dtypes[0]}",
        )
    if desc.shape[-2:] != shape:
        raise refuse(
            f"{name} is {list(desc.shape)}; groups of {GROUP_K} need {form}, here {list(shape)}",
            f"{name}.shape",
            desc.shape,
            "int4_scale_shape",
            f"give one value for each column and group: {list(shape)} behind the batch dimensions",
        )
