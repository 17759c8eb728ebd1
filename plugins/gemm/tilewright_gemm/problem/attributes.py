"""The attributes of a GEMM request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright_gemm.vocabulary import AFormat, BFormat, ScaleBlock
from tilewright_kit.requests.attributes import integer, known_names, refuse, take_dtype, take_int, take_word, word
from tilewright_kit.requests.products import PRODUCT_ATTRIBUTES, ProductAttributes, take_product

__all__ = [
    "ATTRIBUTES",
    "MAX_GROUPS",
    "Attributes",
    "known_names",
    "read_attributes",
    "refuse",
    "take_dtype",
    "take_int",
]

MAX_GROUPS = 4096

GROUPS = integer(
    "groups",
    "Products of one call, each with operands of its own: `a[0]`, `b[0]`, `out[0]`, `a[1]`, ...",
    0,
    0,
    MAX_GROUPS,
    constraint="0: as the operands' names say. Groups share element types, layouts, and the operands that they have.",
)
SCALE_BLOCK = word(
    "scale_block",
    "Blocks of A (rows x k) and of B (columns x k) that `scale_a` and `scale_b` have a factor for each.",
    [item.value for item in ScaleBlock],
    ScaleBlock.NONE.value,
    constraint="`none`: factors of tensors, rows and columns. Blocks are for fp8 and bf8, and both scales are given; "
    "those of `1x32_1x32` (MX) are exponents of 8 bits.",
)
A_FORMAT = word(
    "a_format",
    "How `a` is stored: as its type says, or as bytes (int8) of packed values of 4 bits (`fp4`: E2M1) or of 6 (`fp6`: "
    "E2M3, `bf6`: E3M2).",
    [item.value for item in AFormat],
    AFormat.PLAIN.value,
    constraint="Packed values need `scale_block` `1x32_1x32`, and an `a` and a `b` along k: `a` is [M, ceil(K bits / "
    "8)] of contiguous rows, the first value in the lowest bits; what is left of a last byte is zero.",
)
B_FORMAT = word(
    "b_format",
    "How `b` is stored: as its type says, as packed values like those of `a_format`, or as 4-bit weights, two a byte "
    "along k, in groups of 128.",
    [item.value for item in BFormat],
    BFormat.PLAIN.value,
    constraint="`int4_128`: beside an `a` of fp16, bf16, fp8 or int8. `b` is [ceil(K/2), N] of int8 with contiguous "
    "columns, the even k in the low four bits. `scale_b`, and `zero_b` (8 without it), have a value for each group. "
    "`fp4`, `fp6` and `bf6`: `b` is [ceil(K bits / 8), N] of int8 with contiguous columns.",
)
ATTRIBUTES = (*PRODUCT_ATTRIBUTES, GROUPS, SCALE_BLOCK, A_FORMAT, B_FORMAT)


@dataclass(frozen=True, slots=True)
class Attributes(ProductAttributes):
    groups: int = 0
    """0: not grouped, unless the operands' names say so."""
    scale_block: ScaleBlock = ScaleBlock.NONE
    a_format: AFormat = AFormat.PLAIN
    b_format: BFormat = BFormat.PLAIN


def read_attributes(given: Mapping[str, Any]) -> Attributes:
    """Check all attributes of a GEMM request. Raises ``InvalidArgumentError``."""
    known_names(given, ATTRIBUTES)
    block = take_word(given, SCALE_BLOCK, ScaleBlock, "a pair of blocks") or ScaleBlock.NONE
    a_form = take_word(given, A_FORMAT, AFormat, "a format") or AFormat.PLAIN
    b_form = take_word(given, B_FORMAT, BFormat, "a format") or BFormat.PLAIN
    groups = take_int(given, GROUPS)
    return Attributes(groups=groups, scale_block=block, a_format=a_form, b_format=b_form, **take_product(given))
