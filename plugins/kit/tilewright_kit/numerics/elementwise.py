"""Elementwise steps in float64, for the references of operations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_kit.types.vocabulary import Unary

__all__ = ["apply_unary"]

Array = npt.NDArray[Any]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def apply_unary(unary: Unary, x: Array, lo: float, hi: float) -> Array:
    """One elementwise step in float64. NaN passes through every step. ``lo``: also the factor below zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        if unary is Unary.RELU:
            return np.where(x < 0, 0.0, x)
        if unary is Unary.GELU:
            return np.asarray(0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))) if x.size else x
        if unary is Unary.FAST_GELU:
            return np.asarray(0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))))
        if unary is Unary.SILU:
            return np.asarray(x / (1.0 + np.exp(-x)))
        if unary is Unary.SIGMOID:
            return np.asarray(1.0 / (1.0 + np.exp(-x)))
        if unary is Unary.TANH:
            return np.asarray(np.tanh(x))
        if unary is Unary.HARD_SWISH:
            return np.asarray(x * np.clip(x + 3.0, 0.0, 6.0) / 6.0)
        if unary is Unary.CLAMP:
            return np.asarray(np.clip(x, lo, hi))
        if unary is Unary.LEAKY_RELU:
            return np.where(x < 0, lo * x, x)
        if unary is Unary.ELU:
            return np.where(x < 0, lo * np.expm1(np.minimum(x, 0.0)), x)
        if unary is Unary.SOFTPLUS:
            return np.asarray(np.logaddexp(x, 0.0))
        if unary is Unary.MISH:
            return np.asarray(x * np.tanh(np.logaddexp(x, 0.0)))
    return x
