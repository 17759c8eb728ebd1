"""float32 and float64 arithmetic of the vector and the scalar unit.

Rounding is to nearest even and subnormals are kept, as compute kernels set the mode (the launch refuses others); the
old unfused v_mac and v_mad of float32 flush them whatever the mode.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewright_emulator.decode.registry import semantic
from tilewright_emulator.isa import number_formats as formats
from tilewright_emulator.isa.registers import Array

U32, I32, U64 = np.uint32, np.int32, np.uint64
F32, F64 = np.float32, np.float64
Binary = Callable[[Array, Array], Array]


def _reversed(a: Array, b: Array) -> Array:
    return np.asarray(b - a)


for _kind in ("f32", "f64"):
    semantic(f"v_add_{_kind}", dst=_kind, src=f"{_kind} {_kind}")(np.add)
    semantic(f"v_mul_{_kind}", dst=_kind, src=f"{_kind} {_kind}")(np.multiply)
semantic("v_sub_f32", dst="f32", src="f32 f32")(np.subtract)
semantic("v_subrev_f32", dst="f32", src="f32 f32")(_reversed)
for _name, _ufunc in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
    semantic(f"s_{_name}_f32", dst="f32", src="f32 f32")(_ufunc)
    semantic(f"v_pk_{_name}_f32", dst="pk_f32", src="pk_f32 pk_f32")(_ufunc)


@semantic("v_mul_legacy_f32", "v_mul_dx9_zero_f32", dst="f32", src="f32 f32")
def multiply_legacy(a: Array, b: Array) -> Array:
    """Zero times anything is zero."""
    return np.where((a == 0) | (b == 0), F32(0), a * b)


@semantic("v_fma_f32", "v_fmamk_f32", "v_fmaak_f32", dst="f32", src="f32 f32 f32")
@semantic("s_fmamk_f32", "s_fmaak_f32", dst="f32", src="f32 f32 f32")
@semantic("v_fmac_f32", "s_fmac_f32", dst="f32", src="f32 f32 dst:f32")
@semantic("v_pk_fma_f32", dst="pk_f32", src="pk_f32 pk_f32 pk_f32")
def fma(a: Array, b: Array, c: Array) -> Array:
    return formats.fma32(a, b, c)


@semantic("v_fma_f64", dst="f64", src="f64 f64 f64")
@semantic("v_fmac_f64", dst="f64", src="f64 f64 dst:f64")
def fma_double(a: Array, b: Array, c: Array) -> Array:
    return formats.fma64(a, b, c)


def _flushed(a: Array) -> Array:
    return np.where(np.abs(a) < F32(1.1754943508222875e-38), np.copysign(F32(0), a), a).astype(F32)


@semantic("v_mad_f32", "v_madmk_f32", "v_madak_f32", dst="f32", src="f32 f32 f32")
@semantic("v_mac_f32", dst="f32", src="f32 f32 dst:f32")
def multiply_then_add(a: Array, b: Array, c: Array) -> Array:
    """Rounded after the product and after the sum; subnormals count as zeros everywhere."""
    return np.asarray(_flushed(_flushed(_flushed(a) * _flushed(b)) + _flushed(c)))


# ---- extremes ----
#
# min and max: of a NaN and a number the number; minus zero is below zero. A signalling NaN gives a quiet one where
# IEEE mode holds (gfx9, gfx11: names without "num"). minimum and maximum of gfx950 and gfx12: a NaN wins.


def _signalling(a: Array) -> Array:
    """Which of these floats are signalling NaNs."""
    quiet, unsigned = {2: (1 << 9, np.uint16), 4: (1 << 22, U32), 8: (1 << 51, U64)}[a.dtype.itemsize]
    return np.asarray(np.isnan(a) & ((a.view(unsigned) & unsigned(quiet)) == 0))


def smaller(a: Array, b: Array) -> Array:
    """The smaller; a number rather than a NaN; minus zero rather than zero."""
    low = np.fmin(a, b)
    zero = (a == 0) & (b == 0)
    return np.where(zero & (np.signbit(a) | np.signbit(b)), np.negative(np.zeros_like(low)), low) if zero.any() else low


def larger(a: Array, b: Array) -> Array:
    """The larger; a number rather than a NaN; zero rather than minus zero."""
    high = np.fmax(a, b)
    zero = (a == 0) & (b == 0)
    return np.where(zero & ~(np.signbit(a) & np.signbit(b)), np.zeros_like(high), high) if zero.any() else high


def _ieee(function: Binary) -> Binary:
    def checked(a: Array, b: Array) -> Array:
        result = function(a, b)
        bad = _signalling(a) | _signalling(b)
        return np.where(bad, a + b, result) if bad.any() else result

    return checked


def _propagating(function: Binary) -> Binary:
    def checked(a: Array, b: Array) -> Array:
        nan = np.isnan(a) | np.isnan(b)
        result = function(a, b)
        return np.where(nan, a + b, result) if nan.any() else result

    return checked


min_ieee, max_ieee = _ieee(smaller), _ieee(larger)
min_nan, max_nan = _propagating(smaller), _propagating(larger)


def middle(a: Array, b: Array, c: Array) -> Array:
    """The middle one of three; with a NaN among them, their smallest."""
    result = np.asarray(larger(smaller(a, b), smaller(larger(a, b), c)))
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, smaller(smaller(a, b), c), result) if nan.any() else result


def _two(names: str, kind: str, function: Binary) -> None:
    semantic(*names.split(), dst=kind, src=f"{kind} {kind}")(function)


def _three(names: str, kind: str, first: Binary, second: Binary) -> None:
    @semantic(*names.split(), dst=kind, src=f"{kind} {kind} {kind}")
    def three(a: Array, b: Array, c: Array) -> Array:
        return second(first(a, b), c)


for _kind in ("f32", "f64", "f16"):
    _two(f"v_min_{_kind}", _kind, min_ieee)
    _two(f"v_max_{_kind}", _kind, max_ieee)
    _two(f"v_min_num_{_kind}", _kind, smaller)
    _two(f"v_max_num_{_kind}", _kind, larger)
    _two(f"v_minimum_{_kind}", _kind, min_nan)
    _two(f"v_maximum_{_kind}", _kind, max_nan)
for _kind in ("f32", "f16"):
    for _suffix, _least, _most in (("", min_ieee, max_ieee), ("_num", smaller, larger)):
        _three(f"v_min3{_suffix}_{_kind}", _kind, _least, _least)
        _three(f"v_max3{_suffix}_{_kind}", _kind, _most, _most)
        _three(f"v_minmax{_suffix}_{_kind}", _kind, _least, _most)
        _three(f"v_maxmin{_suffix}_{_kind}", _kind, _most, _least)
        semantic(f"v_med3{_suffix}_{_kind}", dst=_kind, src=f"{_kind} {_kind} {_kind}")(middle)
    _three(f"v_minimum3_{_kind}", _kind, min_nan, min_nan)
    _three(f"v_maximum3_{_kind}", _kind, max_nan, max_nan)
    _three(f"v_minimummaximum_{_kind}", _kind, min_nan, max_nan)
    _three(f"v_maximumminimum_{_kind}", _kind, max_nan, min_nan)
    _two(f"s_min_num_{_kind}", _kind, smaller)
    _two(f"s_max_num_{_kind}", _kind, larger)
    _two(f"s_min_{_kind}", _kind, min_ieee)
    _two(f"s_max_{_kind}", _kind, max_ieee)
    _two(f"s_minimum_{_kind}", _kind, min_nan)
    _two(f"s_maximum_{_kind}", _kind, max_nan)
for _name, _function in (("min", min_ieee), ("max", max_ieee), ("min_num", smaller), ("max_num", larger)):
    _two(f"v_pk_{_name}_f16", "pk_f16", _function)
for _name, _function in (("minimum", min_nan), ("maximum", max_nan)):
    _two(f"v_pk_{_name}_f16", "pk_f16", _function)
    _three(f"v_pk_{_name}3_f16", "pk_f16", _function, _function)


# ---- parts of a number ----


def _rounding(name: str, function: Callable[[Array], Array]) -> None:
    for kind in ("f32", "f64", "f16"):
        semantic(f"v_{name}_{kind}", dst=kind, src=kind)(function)
    for kind in ("f32", "f16"):
        semantic(f"s_{name}_{kind}", dst=kind, src=kind)(function)


_rounding("floor", np.floor)
_rounding("ceil", np.ceil)
_rounding("trunc", np.trunc)
_rounding("rndne", np.rint)


def _fraction(a: Array) -> Array:
    """x - floor(x), below one: of a tiny negative number the largest float that is."""
    most = np.nextafter(a.dtype.type(1), a.dtype.type(0))
    return np.asarray(np.where(np.isnan(a) | np.isinf(a), a - a, np.minimum(a - np.floor(a), most)))


for _kind in ("f32", "f64", "f16"):
    semantic(f"v_fract_{_kind}", dst=_kind, src=_kind)(_fraction)


@semantic("v_frexp_mant_f32", dst="f32", src="f32")
@semantic("v_frexp_mant_f64", dst="f64", src="f64")
@semantic("v_frexp_mant_f16", dst="f16", src="f16")
def mantissa(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


@semantic("v_frexp_exp_i32_f32", dst="i32", src="f32")
@semantic("v_frexp_exp_i32_f64", dst="i32", src="f64")
def exponent(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(I32)


@semantic("v_frexp_exp_i16_f16", dst="i16", src="f16")
def exponent_half(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(np.int16)


@semantic("v_ldexp_f64", dst="f64", src="f64 i32")
def scale_double(a: Array, b: Array) -> Array:
    return np.asarray(np.ldexp(a, np.clip(b, -5000, 5000)))


@semantic("v_ldexp_f32", dst="f32", src="f32 i32")
def scale(a: Array, b: Array) -> Array:
    return np.asarray(np.ldexp(a.astype(F64), np.clip(b, -600, 600)).astype(F32))


@semantic("v_ldexp_f16", dst="f16", src="f16 i16")
def scale_half(a: Array, b: Array) -> Array:
    return np.asarray(np.ldexp(a.astype(F64), np.clip(b.astype(I32), -600, 600)).astype(np.float16))
