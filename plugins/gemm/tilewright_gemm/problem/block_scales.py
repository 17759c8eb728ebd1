"""Checks of requests with block scales (``config.block_scales`` has the contract)."""

from __future__ import annotations

from tilewright_gemm.config.block_scales import DTYPES, SCALES, block_of, scale_shapes
from tilewright_gemm.problem.attributes import refuse
from tilewright_gemm.problem.operands import Group
from tilewright_gemm.vocabulary import ScaleBlock
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["check_block_scales"]


def check_block_scales(group: Group, block: ScaleBlock, a: TensorDesc, b: TensorDesc) -> None:
    """Both scales are there, of the type and the shapes that the blocks give; A and B are plain 8-bit floats.

    Raises ``InvalidArgumentError``.
    """
    a_name, b_name = group.inputs["a"][0], group.inputs["b"][0]
    for name, desc in ((a_name, a), (b_name, b)):
        if desc.dtype not in DTYPES:
            raise refuse(
                f"blocks have scales in products of fp8 and bf8; {name} is {desc.dtype}",
                f"{name}.dtype",
                desc.dtype.value,
                "block_scale_operands",
                "convert it to fp8 with a scale for each block, or leave scale_block out",
            )
    if b.packing:
        raise refuse(
            f"packed {b_name} has no block scales",
            f"{b_name}.packing",
            b.packing,
            "packed_operand",
            f"pass {b_name} as a plain matrix",
        )
    scale_b = SCALES[block][1]
    own_block = block_of(scale_b)
    wanted = scale_shapes(scale_b, a.shape[-2], b.shape[-1], a.shape[-1])
    for base, shape, lines in (("scale_a", wanted[0], "M"), ("scale_b", wanted[1], "N")):
        own = f"ceil({lines} / {own_block.columns})" if base == "scale_b" and own_block.columns > 1 else lines
        form = f"[.., {own}, ceil(K / {own_block.k})]"
        if base not in group.inputs:
            raise refuse(
                f"blocks {block} are asked for, but {base} is missing",
                base,
                "",
                "block_scale_operands",
                f"give {base} {form}, here {list(shape)}, or leave scale_block out",
            )
        name, desc = group.inputs[base]
        if desc.dtype is not own_block.dtype:
            wide = own_block.dtype is DType.FP32
            raise refuse(
                f"{name} is {desc.dtype}; scales of blocks {block} are {'fp32' if wide else 'E8M0 (int8)'}",
                f"{name}.dtype",
                desc.dtype.value,
                "block_scale_dtype",
                "convert it to fp32; of exponents (E8M0) e that is ldexp(1, e - 127), exactly"
                if wide
                else "give exponents e of 8 bits for factors 2**(e - 127), or choose blocks of 128, which have fp32",
            )
        if desc.shape[-2:] != shape:
            raise refuse(
                f"{name} is {list(desc.shape)}; blocks {block} need {form}, here {list(shape)}",
                f"{name}.shape",
                desc.shape,
                "block_scale_shape",
                f"give one factor for each block: {list(shape)} behind the batch dimensions",
            )
