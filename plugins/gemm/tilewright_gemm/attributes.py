"""The attributes of a GEMM request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright_gemm.words import UNARY_ALIASES, Binary, Unary
from tilewright_kit.attributes import (
    DEFAULT_ALIGNMENT,
    MAX_SPLIT_K,
    known_names,
    refuse,
    take_alignment,
    take_choice,
    take_clamp,
    take_dtype,
    take_finite,
    take_flag,
    take_int,
)
from tilewright_kit.dtypes import DType

__all__ = [
    "DEFAULT_ALIGNMENT",
    "MAX_GROUPS",
    "MAX_SPLIT_K",
    "Attributes",
    "known_names",
    "read_attributes",
    "refuse",
    "take_dtype",
    "take_int",
]

MAX_GROUPS = 4096
_KNOWN = (
    "alpha", "binary", "unary", "clamp_lo", "clamp_hi", "out_dtype", "split_k", "groups", "alignment",
    "fast_accumulation",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Attributes:
    alpha: float = 1.0
    binary: Binary | None = None
    """None if the caller named none."""
    unary: Unary = Unary.PASS
    clamp_lo: float = 0.0
    clamp_hi: float = 0.0
    out_dtype: DType | None = None
    split_k: int = 0
    groups: int = 0
    """0: not grouped, unless the operands' names say so."""
    alignment: int = DEFAULT_ALIGNMENT
    """Bytes of which the caller promises that the address of every operand is a multiple."""
    fast_accumulation: bool = False
    """8-bit floats may be summed as the matrix unit does it, with fewer bits than fp32."""


def read_attributes(given: Mapping[str, Any]) -> Attributes:
    """Check all attributes of a GEMM request. Raises ``InvalidArgumentError``."""
    known_names(given, _KNOWN)
    unary = take_choice(given, "unary", Unary, UNARY_ALIASES) or Unary.PASS
    lo, hi = take_clamp(given, unary)
    return Attributes(
        alpha=take_finite(given, "alpha", 1.0),
        binary=take_choice(given, "binary", Binary, {}),
        unary=unary,
        clamp_lo=lo,
        clamp_hi=hi,
        out_dtype=take_dtype(given, "out_dtype"),
        split_k=take_int(given, "split_k", 0, 0, MAX_SPLIT_K),
        groups=take_int(given, "groups", 0, 0, MAX_GROUPS),
        alignment=take_alignment(given),
        fast_accumulation=take_flag(given, "fast_accumulation"),
    )
