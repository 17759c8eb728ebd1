"""Comparing a kernel's output with the truth: relative norms with bounds that say where they come from.

Outputs are filled with poison before a kernel runs, so that an element that it did not write is seen even where a stale
right answer could lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilewright_kit.types.dtypes import DType

__all__ = ["Comparison", "bound", "compare", "poison", "relative_error", "unit_roundoff"]

Array = npt.NDArray[Any]
_finfo: Any = ml_dtypes.finfo  # knows NumPy's own types too

_SIGNIFICAND = {"fp32": 24, "fp16": 11, "bf16": 8, "fp8": 4, "bf8": 3}
"""Bits of precision, the hidden one included."""
SAFETY = 4.0
"""Room for summation orders that the bound does not model, such as a few hundred elements whose errors line up."""
_INT_POISON = {"int8": (0x5A, -0x5B), "int32": (0x5A5A5A5A, -0x5A5A5A5B)}


def unit_roundoff(dtype: DType) -> float:
    """Largest relative error of rounding to nearest: ``2**-p`` for ``p`` significant bits; 0 for integers."""
    return 2.0 ** -_SIGNIFICAND[dtype.value] if dtype.is_float else 0.0


def bound(dtype: DType, k: int = 1, acc: DType | None = None) -> float:
    """Allowed relative Frobenius error of an output of ``dtype`` whose elements sum ``k`` products in ``acc``.

    ``u(dtype) + SAFETY * sqrt(k) * u(acc)``: one rounding of the result, and accumulation whose rounding errors are
    independent (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019, theorem 2.4). The norm
    of a sum of independent products grows as ``sqrt(k)`` too, so the bound is relative to the norm of the result when
    the inputs have mean zero, which is what tests should draw. ``acc`` is fp32, or int32 for integer outputs: integer
    sums are exact, and the bound is 0.
    """
    return unit_roundoff(dtype) + SAFETY * math.sqrt(max(1, k)) * unit_roundoff(
        acc or (DType.FP32 if dtype.is_float else DType.INT32)
    )


def relative_error(actual: Array, reference: Array) -> float:
    """``norm(actual - reference) / norm(reference)`` in float64 over the elements where both are finite.

    0 if both are zero there, infinite if only the reference is.
    """
    have, want = np.asarray(actual).astype(np.float64), np.asarray(reference).astype(np.float64)
    usable = np.isfinite(have) & np.isfinite(want)
    difference = float(np.linalg.norm(have[usable] - want[usable]))
    scale = float(np.linalg.norm(want[usable]))
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class Comparison:
    """An output against the truth. ``unwritten`` counts poison, ``misplaced`` NaN and infinities that do not agree."""

    error: float
    bound: float
    unwritten: int
    misplaced: int
    worst: tuple[int, ...]
    """The place of the largest absolute error (or the first misplaced element); empty for an empty output."""
    actual: float
    expected: float
    """Both values there."""

    @property
    def passed(self) -> bool:
        return self.unwritten == 0 and self.misplaced == 0 and self.error <= self.bound

    def __str__(self) -> str:
        return (
            f"relative error {self.error:.3g} (bound {self.bound:.3g}), {self.unwritten} unwritten, "
            f"{self.misplaced} misplaced NaN or infinity; worst at {list(self.worst)}: "
            f"{self.actual:.6g} for {self.expected:.6g}"
        )


def compare(
    actual: Array, reference: Array, dtype: DType, k: int = 1, acc: DType | None = None, poisoned: Array | None = None
) -> Comparison:
    """Compare an output of ``dtype`` with its float64 reference of the same shape.

    NaN and infinities must be where the reference, rounded to ``dtype``, has them. Kernels may saturate or overflow
    beyond the range of ``dtype``: there, its largest value and infinity (NaN in fp8) are both right. ``poisoned`` is
    what the output held before the kernel ran: elements that still hold exactly that although the reference rounds to
    something else are unwritten. Raises ``ValueError`` if the shapes differ.
    """
    have = np.asarray(actual)
    if have.shape != np.shape(reference):
        raise ValueError(f"the output has shape {have.shape}, the reference {np.shape(reference)}")
    truth = np.asarray(reference)
    seen = have.astype(np.float64)
    unwritten = np.zeros(have.shape, dtype=bool)
    if poisoned is not None:
        same = _bytes(have) == _bytes(np.asarray(poisoned))
        unwritten = np.all(same, axis=-1).reshape(have.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = truth.astype(have.dtype).astype(np.float64)
        unwritten &= (rounded != seen) & ~(np.isnan(rounded) & np.isnan(seen))
    expected, right_overflow = _in_range(truth.astype(np.float64), seen, dtype)
    finite = np.isfinite(seen) & np.isfinite(expected)
    agree = finite | right_overflow | (np.isnan(seen) & np.isnan(expected)) | (seen == expected)
    misplaced = ~agree & ~unwritten
    limit = bound(dtype, k, acc)
    error = _error(have, truth, seen, expected, finite & ~unwritten, dtype)
    gap = np.where(finite, np.abs(np.where(finite, seen, 0) - np.where(finite, expected, 0)), 0.0)
    gap = np.where(misplaced | unwritten, np.inf, gap)
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(gap)), gap.shape)) if gap.size else ()
    return Comparison(
        error,
        limit,
        int(np.count_nonzero(unwritten)),
        int(np.count_nonzero(misplaced)),
        worst,
        float(seen[worst]) if gap.size else 0.0,
        float(expected[worst]) if gap.size else 0.0,
    )


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    """The bytes of each element, one row per element."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, array.dtype.itemsize)


def _in_range(truth: npt.NDArray[np.float64], seen: Array, dtype: DType) -> tuple[npt.NDArray[np.float64], Array]:
    """The reference with overflowing elements at the largest value, and where the kernel overflowed rightly instead."""
    if not dtype.is_float:
        info = np.iinfo(dtype.numpy)
        return np.clip(np.rint(truth), info.min, info.max), np.zeros(truth.shape, dtype=bool)
    largest = float(_finfo(dtype.numpy).max)
    over = np.isfinite(truth) & (np.abs(truth) > largest)
    signed_infinity = np.isinf(seen) & (np.signbit(seen) == np.signbit(truth))
    return np.where(over, np.copysign(largest, truth), truth), over & (signed_infinity | np.isnan(seen))


def _error(have: Array, truth: Array, seen: Array, expected: Array, usable: Array, dtype: DType) -> float:
    if not dtype.is_float and truth.dtype.kind in "iu":
        # Large integers are exact in their own type but not in float64.
        info = np.iinfo(dtype.numpy)
        wrong = np.any(have.astype(np.int64)[usable] != np.clip(truth, info.min, info.max)[usable])
        return relative_error(seen[usable], expected[usable]) or 1.0 if wrong else 0.0
    error = relative_error(seen[usable], expected[usable])
    if not dtype.is_float or error == 0.0:
        return error
    # Results below the normal range have an absolute error of half a subnormal each, whatever their size.
    tiny = 0.5 * float(_finfo(dtype.numpy).smallest_subnormal) * math.sqrt(int(np.count_nonzero(usable)))
    difference = float(np.linalg.norm(seen[usable] - expected[usable]))
    return 0.0 if difference <= tiny else error


def poison(dtype: DType, shape: tuple[int, ...], variant: int = 0) -> Array:
    """An array to put in place of an output: NaN, or for integers a pattern (two ``variant``s, for running twice)."""
    if dtype.is_float:
        return np.full(shape, np.nan).astype(dtype.numpy)
    return np.full(shape, _INT_POISON[dtype.value][variant % 2], dtype=dtype.numpy)
