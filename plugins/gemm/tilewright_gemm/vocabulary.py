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
    """Scale of A x B on A's side: none, by one fp32 value, or by one for each row."""

    NONE = "none"
    TENSOR = "tensor"
    ROW = "row"


class ScaleB(Word):
    """Scale of A x B on B's side: none, by one fp32 value, or by one for each column."""

    NONE = "none"
    TENSOR = "tensor"
    COLUMN = "column"


LAYOUTS = ("rcr", "rrr", "crr", "ccr")
"""Letters of A, B and C: ``r`` row-major, ``c`` column-major. C is always row-major."""
