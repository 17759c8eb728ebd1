"""The vocabulary of GEMM: scales and layouts, beside what operations share.

These are facts of the operation, the same on every arch. An arch's abilities are in its ``ArchSpec``.
"""

from __future__ import annotations

from tilewright_kit.types.vocabulary import (
    MAX_D,
    UNARY_ALIASES,
    Binary,
    Epilogue,
    Reduction,
    Switch,
    Unary,
    Word,
    accumulator,
    default_output,
    epilogue_dtypes,
    is_pair,
    output_dtypes,
    size_of,
)

__all__ = [
    "LAYOUTS",
    "MAX_D",
    "UNARY_ALIASES",
    "AFormat",
    "BFormat",
    "Binary",
    "Epilogue",
    "Reduction",
    "ScaleA",
    "ScaleB",
    "ScaleBlock",
    "Switch",
    "Unary",
    "Word",
    "accumulator",
    "default_output",
    "epilogue_dtypes",
    "is_pair",
    "output_dtypes",
    "size_of",
]


class ScaleA(Word):
    """Scale on A's side: none, one fp32 value, one for each row, or one for each block of A (``block_scales``), whose
    values have the format that is named (``narrow``).
    """

    NONE = "none"
    TENSOR = "tensor"
    ROW = "row"
    BLOCK_1X128 = "1x128"
    BLOCK_1X32 = "1x32"
    FP4_1X32 = "1x32fp4"
    FP6_1X32 = "1x32fp6"
    BF6_1X32 = "1x32bf6"


class ScaleB(Word):
    """Scale on B's side: none, one fp32 value, one for each column, one for each block of B (``block_scales``), whose
    values have the format that is named (``narrow``), or one for each group of packed 4-bit weights, of the type that
    is named, with zero points or without (``int4``).
    """

    NONE = "none"
    TENSOR = "tensor"
    COLUMN = "column"
    BLOCK_1X128 = "1x128"
    BLOCK_128X128 = "128x128"
    BLOCK_1X32 = "1x32"
    FP4_1X32 = "1x32fp4"
    FP6_1X32 = "1x32fp6"
    BF6_1X32 = "1x32bf6"
    INT4_FP32 = "int4fp32"
    INT4_FP16 = "int4fp16"
    INT4_BF16 = "int4bf16"
    INT4_FP32_ZEROS = "int4fp32z"
    INT4_FP16_ZEROS = "int4fp16z"
    INT4_BF16_ZEROS = "int4bf16z"


class AFormat(Word):
    """How A is stored: as its type says, or packed values of fewer than 8 bits (``narrow``)."""

    PLAIN = "plain"
    FP4 = "fp4"
    FP6 = "fp6"
    BF6 = "bf6"


class BFormat(Word):
    """How B is stored: likewise, or as packed 4-bit weights in groups of 128 (``int4``)."""

    PLAIN = "plain"
    INT4 = "int4_128"
    FP4 = "fp4"
    FP6 = "fp6"
    BF6 = "bf6"


class ScaleBlock(Word):
    """Blocks of A and of B that have a scale each, as attributes name them: (rows of A, k) and (columns of B, k)."""

    NONE = "none"
    ROWS_AND_COLUMNS = "1x128_1x128"
    ROWS_AND_SQUARES = "1x128_128x128"
    EXPONENTS = "1x32_1x32"


LAYOUTS = ("rcr", "rrr", "crr", "ccr")
"""Letters of A, B and C: ``r`` row-major, ``c`` column-major. C is always row-major."""
