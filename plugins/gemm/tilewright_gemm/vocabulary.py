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
    """Scale on A's side: none, one fp32 value, one for each row, or one for each block of A (``block_scales``)."""

    NONE = "none"
    TENSOR = "tensor"
    ROW = "row"
    BLOCK_1X128 = "1x128"


class ScaleB(Word):
    """Scale on B's side: none, one fp32 value, one for each column, or one for each block of B (``block_scales``)."""

    NONE = "none"
    TENSOR = "tensor"
    COLUMN = "column"
    BLOCK_1X128 = "1x128"
    BLOCK_128X128 = "128x128"


class ScaleBlock(Word):
    """Blocks of A and of B that have a scale each, as attributes name them: (rows of A, k) and (columns of B, k)."""

    NONE = "none"
    ROWS_AND_COLUMNS = "1x128_1x128"
    ROWS_AND_SQUARES = "1x128_128x128"


LAYOUTS = ("rcr", "rrr", "crr", "ccr")
"""Letters of A, B and C: ``r`` row-major, ``c`` column-major. C is always row-major."""
