"""The steps of a division: scale both operands, approximate (elsewhere), correct, undo the scale, patch special cases.

The operands of a division are the quotient so far, the denominator and the numerator. Scaling keeps the reciprocal of
the denominator and the quotient away from overflow and from subnormals; a lane flag remembers that the quotient has
to be scaled back, which the last multiply-add does in one rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright_emulator.decode.registry import semantic
from tilewright_emulator.isa import number_formats as formats
from tilewright_emulator.isa.registers import Array

F16, F32, F64 = np.float16, np.float32, np.float64
Pair = tuple[Array, Array]


@dataclass(frozen=True)
class Width:
    """Figures of float32 or float64: exponent distance that overflows, power of two to scale by, tiny numerators."""

    far: int
    step: int
    tiny: int
    bias: int
    underflow: int


WIDTHS = {4: Width(96, 64, 23, 127, 150), 8: Width(768, 128, 53, 1023, 1075)}


def _exponent(a: Array) -> Array:
    """The biased exponent field."""
    if a.dtype == F64:
        return np.asarray((a.view(np.uint64) >> np.uint64(52) & np.uint64(0x7FF)).astype(np.int64))
    return np.asarray((a.view(np.uint32) >> np.uint32(23) & np.uint32(0xFF)).astype(np.int64))


def _is_subnormal(a: Array, least: float) -> Array:
    return np.asarray((a != 0) & (np.abs(a) < least))


@semantic("v_div_scale_f32", dst="f32 mask", src="f32 f32 f32")
@semantic("v_div_scale_f64", dst="f64 mask", src="f64 f64 f64")
def scale(a: Array, denominator: Array, numerator: Array) -> Pair:
    """a is the denominator (again) or the numerator: what it is scaled to, and whether the quotient was changed."""
    a, denominator, numerator = np.broadcast_arrays(a, denominator, numerator)
    width, dtype = WIDTHS[a.itemsize], a.dtype.type
    up, down, least = dtype(2.0**width.step), dtype(2.0**-width.step), float(np.finfo(a.dtype).tiny)
    precise = np.longdouble(1)
    inverse_small = _is_subnormal(precise / denominator, least)
    quotient_small = _is_subnormal(numerator * precise / denominator, least)
    is_denominator, is_numerator = a == denominator, a == numerator
    no, yes = np.zeros(a.shape, bool), np.ones(a.shape, bool)
    rules: list[tuple[Array, Array, Array]] = [
        ((denominator == 0) | (numerator == 0), np.full(a.shape, np.nan, dtype), no),
        (_exponent(numerator) - _exponent(denominator) >= width.far, np.where(is_denominator, a * up, a), yes),
        (_is_subnormal(denominator, least), a * up, no),
        (inverse_small & quotient_small, np.where(is_denominator, a * down, a), yes),
        (inverse_small, a * down, no),
        (quotient_small, np.where(is_numerator, a * up, a), yes),
        (_exponent(numerator) <= width.tiny, a * up, no),
    ]
    conditions = [condition for condition, _, _ in rules]
    value = np.select(conditions, [scaled for _, scaled, _ in rules], a)
    flag = np.select(conditions, [changed for _, _, changed in rules], no)
    return value.astype(dtype), flag


@semantic("v_div_fmas_f32", dst="f32", src="f32 f32 f32 vcc")
def correct(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    product = np.multiply(a, b, dtype=F64)
    total = formats.sum_to_odd(product, np.broadcast_to(c.astype(F64), product.shape))
    factor = np.where(_exponent(c) > 127, 2.0**64, 2.0**-64)
    return np.asarray((total * np.where(scaled, factor, 1.0)).astype(F32))


@semantic("v_div_fmas_f64", dst="f64", src="f64 f64 f64 vcc")
def correct_double(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    factor = np.where(_exponent(c) > 1023, 2.0**128, 2.0**-128)
    return np.asarray(formats.fma64(a, b, c) * np.where(scaled, factor, 1.0))


@semantic("v_div_fixup_f16", dst="f16", src="f16 f16 f16")
@semantic("v_div_fixup_f32", dst="f32", src="f32 f32 f32")
@semantic("v_div_fixup_f64", dst="f64", src="f64 f64 f64")
def patch(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The quotient, but for operands that are zero, infinite or NaN, or far apart: for those the right result."""
    dtype = numerator.dtype.type
    quotient, denominator, numerator = np.broadcast_arrays(quotient, denominator, numerator)
    sign = np.where(np.signbit(denominator) ^ np.signbit(numerator), dtype(-1), dtype(1))
    both_zero = (denominator == 0) & (numerator == 0)
    both_infinite = np.isinf(denominator) & np.isinf(numerator)
    conditions = [
        np.isnan(numerator),
        np.isnan(denominator),
        both_zero | both_infinite,
        (denominator == 0) | np.isinf(numerator),
        np.isinf(denominator) | (numerator == 0),
    ]
    values = [numerator, denominator, np.full_like(sign, np.nan), sign * dtype(np.inf), sign * dtype(0)]
    if dtype is not F16:
        distance = _exponent(numerator) - _exponent(denominator)
        conditions.append(distance < -WIDTHS[numerator.itemsize].underflow)
        values.append(sign * dtype(0))
        conditions.append(np.isnan(quotient))  # of finite operands: the approximation overflowed, as the quotient does
        values.append(sign * dtype(np.inf))
    return np.asarray(np.select(conditions, values, sign * np.abs(quotient)).astype(dtype))
