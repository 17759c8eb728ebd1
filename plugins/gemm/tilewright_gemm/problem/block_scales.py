"""Checks of requests with block scales (``config.block_scales`` has the contract)."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_gemm.config.block_scales import DTYPES, SCALES, block_of, scale_shapes
from tilewright_gemm.problem.attributes import refuse
from tilewright_gemm.vocabulary import ScaleBlock
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["check_block_scales"]


def check_block_scales(
    given: Mapping[str, tuple[str, TensorDesc]],
    block: ScaleBlock,
    a: TensorDesc,
    b: TensorDesc,
    missing: tuple[str, str] = ("scale_a", "scale_b"),
) -> None:
    """Both scales are there, of the type and the shapes that the blocks give; A and B are plain 8-bit floats.

    ``given``: names and tensors of ``a``, ``b``, ``scale_a`` and ``scale_b`` as callers know them; ``missing``: what a
    caller calls scales that are not among them. Raises ``InvalidArgumentError``.
    """
    a_name, b_name = given["a"][0], given["b"][0]
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
    for base, called, shape, lines in (
        ("scale_a", missing[0], wanted[0], "M"),
        ("scale_b", missing[1], wanted[1], "N"),
    ):
        own = f"ceil({lines} / {own_block.columns})" if base == "scale_b" and own_block.columns > 1 else lines
        form = f"[.., {own}, ceil(K / {own_block.k})]"
        if base not in given:
            raise refuse(
                f"blocks {block} are asked for, but {called} is missing",
                called,
                "",
                "block_scale_operands",
                f"give {called} {form}, here {list(shape)}, or leave scale_block out",
            )
        name, desc = given[base]
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
