"""Attributes of every operation that computes products of matrices and elementwise steps behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright_kit.contract.declaration import choices_of
from tilewright_kit.requests.attributes import (
    ALIGNMENT,
    DEFAULT_ALIGNMENT,
    element_type,
    flag,
    integer,
    number,
    refuse,
    take_alignment,
    take_dtype,
    take_finite,
    take_flag,
    take_int,
    take_number,
    take_word,
    word,
)
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import SLOPES, UNARY_ALIASES, Binary, Unary

__all__ = ["MAX_SPLIT_K", "PRODUCT_ATTRIBUTES", "ProductAttributes", "take_product"]

MAX_SPLIT_K = 255
STEP = "an elementwise step"

ALPHA = number("alpha", "Factor of the sums.", 1.0, constraint="Finite; 1 where the result is int32.")
BINARY = word(
    "binary",
    "Step that brings the operands `d` in.",
    choices_of(Binary),
    absent="`Add` for one `d`, `MultiDAdd` for several, none without",
    constraint="`Add` and `Multiply` take exactly one `d`, the others one or more.",
)
UNARY = word(
    "unary",
    "Step on each value, after the binary one. `Gelu` is exact (erf), `FastGelu` its approximation by tanh.",
    choices_of(Unary),
    Unary.NONE.value,
    aliases=UNARY_ALIASES,
    constraint="Only `PassThrough` where the result is int32.",
)
CLAMP_LO = number(
    "clamp_lo",
    "Least value of `Clamp`.",
    None,
    absent="no lower bound",
    constraint="For `Clamp` only, which needs one bound; not NaN, and at most `clamp_hi`.",
)
CLAMP_HI = number(
    "clamp_hi",
    "Greatest value of `Clamp`.",
    None,
    absent="no upper bound",
    constraint="For `Clamp` only, which needs one bound; not NaN.",
)
SLOPE = number(
    "slope",
    "Factor below zero.",
    None,
    absent=", ".join(f"{value:g} for `{step.value}`" for step, value in SLOPES.items()),
    constraint=f"Finite; for {' and '.join(f'`{step.value}`' for step in SLOPES)} only.",
)
OUT_DTYPE = element_type(
    "out_dtype",
    "Element type of the output.",
    absent="that of the described output, else the usual one of the operands",
    constraint="Equal to that of the output where it is described.",
)
SPLIT_K = integer(
    "split_k",
    "Slices that the sums are cut into, which are computed apart and added in a fixed order.",
    0,
    0,
    MAX_SPLIT_K,
    constraint="0: the planner decides.",
)
FAST_ACCUMULATION = flag(
    "fast_accumulation", "8-bit floats may be summed as the matrix unit does it, with fewer bits than fp32."
)

PRODUCT_ATTRIBUTES = (
    ALPHA, BINARY, UNARY, CLAMP_LO, CLAMP_HI, SLOPE, OUT_DTYPE, SPLIT_K, ALIGNMENT, FAST_ACCUMULATION,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProductAttributes:
    """``PRODUCT_ATTRIBUTES``, checked. Operations add their own."""

    alpha: float = 1.0
    binary: Binary | None = None
    """None if the caller named none."""
    unary: Unary = Unary.NONE
    clamp_lo: float = 0.0
    """Lower bound of ``Clamp``; of ``LeakyRelu`` and ``Elu`` the factor below zero."""
    clamp_hi: float = 0.0
    out_dtype: DType | None = None
    split_k: int = 0
    alignment: int = DEFAULT_ALIGNMENT
    """Bytes of which the caller promises that the address of every operand is a multiple; at most what kernels ask
    for, so that promises beyond that do not make other problems.
    """
    fast_accumulation: bool = False
    """8-bit floats may be summed as the matrix unit does it, with fewer bits than fp32."""


def take_product(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``ProductAttributes``."""
    unary = take_word(given, UNARY, Unary, STEP) or Unary.NONE
    slope = _slope(given, unary)
    lo, hi = (slope, 0.0) if unary in SLOPES else _clamp(given, unary)
    return {
        "alpha": take_finite(given, ALPHA),
        "binary": take_word(given, BINARY, Binary, STEP),
        "unary": unary,
        "clamp_lo": lo,
        "clamp_hi": hi,
        "out_dtype": take_dtype(given, OUT_DTYPE),
        "split_k": take_int(given, SPLIT_K),
        "alignment": take_alignment(given),
        "fast_accumulation": take_flag(given, FAST_ACCUMULATION),
    }


def _clamp(given: Mapping[str, Any], unary: Unary) -> tuple[float, float]:
    bounds = [name for name in ("clamp_lo", "clamp_hi") if name in given]
    if unary is not Unary.CLAMP:
        if bounds:
            raise refuse(
                f"{bounds[0]} is given, but the unary step is {unary}",
                f"attributes.{bounds[0]}",
                given[bounds[0]],
                "clamp_bounds",
                "set unary=Clamp, or leave the bounds out",
            )
        return 0.0, 0.0
    if not bounds:
        raise refuse(
            "Clamp needs a bound", "attributes.clamp_lo", "", "clamp_bounds", "give clamp_lo, clamp_hi or both"
        )

    def ordered(number: float) -> bool:
        return not math.isnan(number)

    lo = take_number(given, CLAMP_LO, -math.inf, ordered, "a number that is not NaN")
    hi = take_number(given, CLAMP_HI, math.inf, ordered, "a number that is not NaN")
    if lo > hi:
        raise refuse(
            f"clamp_lo {lo} is greater than clamp_hi {hi}", "attributes.clamp_lo", lo, "clamp_bounds", "swap the bounds"
        )
    return lo, hi


def _slope(given: Mapping[str, Any], unary: Unary) -> float:
    """The factor below zero; 0 for steps without one."""
    if unary not in SLOPES and "slope" in given:
        raise refuse(
            f"slope is given, but the unary step is {unary}",
            "attributes.slope",
            given["slope"],
            "slope_step",
            f"set unary to {' or '.join(SLOPES)}, or leave slope out",
        )
    return take_finite(given, SLOPE, SLOPES.get(unary, 0.0))
