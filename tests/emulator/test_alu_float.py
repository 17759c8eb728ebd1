"""Float instructions against exact fractions, rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from alu_harness import ALL, CDNA, RDNA, Case, bits_of, check_all, empty_waves, execute, finite, float_of

G12, G950, G11 = ("gfx1201",), ("gfx950",), ("gfx1100",)
TINY = 2.0**-126


def total(a: float, b: float) -> Any:
    if not finite(a, b):
        return a + b
    exact = Fraction(a) + Fraction(b)
    return exact if exact else a + b  # the sign of a zero is Python's


def product(a: float, b: float) -> Any:
    if not finite(a, b):
        return a * b
    return Fraction(a) * Fraction(b) or a * b


def fused(a: float, b: float, c: float) -> Any:
    if not finite(a, b, c):
        return a * b + c if not finite(a, b) else c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact:
        return exact
    return math.copysign(0.0, a) * math.copysign(1.0, b) + c if a * b == 0 and c == 0 and 0 in (a, b) else 0.0


def smaller(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    if a == b == 0:
        return math.copysign(0.0, min(math.copysign(1, a), math.copysign(1, b)))
    return min(a, b)


def larger(a: float, b: float) -> float:
    return -smaller(-a, -b)


def propagate(function: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else function(a, b)


def middle(a: float, b: float, c: float) -> float:
    if any(map(math.isnan, (a, b, c))):
        return smaller(smaller(a, b), c)
    return larger(smaller(a, b), smaller(larger(a, b), c))


def whole(function: Callable[[float], int]) -> Callable[[float], float]:
    return lambda a: math.copysign(float(function(a)), a) if math.isfinite(a) else a


def fraction(letter: str) -> Callable[[float], float]:
    most = float_of(bits_of(1.0, letter) - 1, letter)

    def function(a: float) -> float:
        if not math.isfinite(a):
            return math.nan
        return min(float(Fraction(a) - math.floor(a)), most)

    return function


def flushed(a: float) -> float:
    return math.copysign(0.0, a) if abs(a) < TINY else a


def near(function: Callable[[float], float]) -> Callable[[float], float]:
    """A float32 function whose subnormals are zeros on both ends."""

    def wrapped(a: float) -> float:
        try:
            value = function(flushed(a))
        except OverflowError:
            return math.inf
        except ZeroDivisionError:
            return math.copysign(math.inf, a)
        except ValueError:
            return math.nan
        return math.copysign(0.0, value) if abs(value) < TINY * (1 - 2.0**-25) else value

    return wrapped


def log2(a: float) -> float:
    return -math.inf if a == 0 else math.log2(a)


def root_inverse(a: float) -> float:
    return math.copysign(math.inf, a) if a == 0 else 1 / math.sqrt(a)


def turns(function: Callable[[float], float]) -> Callable[[float], float]:
    def wrapped(a: float) -> float:
        if not math.isfinite(a):
            return math.nan
        return function(2 * math.pi * (a - math.floor(a))) if abs(a) <= 256 else function(0.0)

    return wrapped


def mantissa(a: float) -> float:
    return math.frexp(a)[0] if math.isfinite(a) else a


def exponent(a: float) -> int:
    return math.frexp(a)[1] if math.isfinite(a) else 0


def scaled(a: float, b: int) -> Any:
    if not math.isfinite(a) or a == 0:
        return a
    return Fraction(a) * Fraction(2) ** max(-2500, min(2500, b))


def legacy(a: float, b: float) -> Any:
    return 0.0 if a == 0 or b == 0 else product(a, b)


def unfused(a: float, b: float, c: float) -> Any:
    a, b, c = flushed(a), flushed(b), flushed(c)
    first = a * b  # exact in float64
    if math.isfinite(first):
        first = flushed(float_of(bits_of(first, "f"), "f"))
    value = total(first, c)
    return value if not isinstance(value, Fraction) or abs(value) >= Fraction(TINY) else math.copysign(0.0, value)


ARITHMETIC = [
    Case("v_add_f32_e32", "f", "ff", total),
    Case("v_sub_f32_e32", "f", "ff", lambda a, b: total(a, -b)),
    Case("v_subrev_f32_e32", "f", "ff", lambda a, b: total(b, -a)),
    Case("v_mul_f32_e32", "f", "ff", product),
    Case("v_mul_legacy_f32", "f", "ff", legacy, ("gfx90a",)),
    Case("v_mul_dx9_zero_f32_e32", "f", "ff", legacy, RDNA),
    Case("v_fma_f32", "f", "fff", fused),
    Case("v_mad_f32", "f", "fff", unfused, ("gfx90a",)),
    Case("v_add_f64", "d", "dd", total, CDNA),
    Case("v_add_f64_e32", "d", "dd", total, G12),
    Case("v_mul_f64", "d", "dd", product, CDNA),
    Case("v_fma_f64", "d", "ddd", fused),
    Case("v_add_f16_e32", "h", "hh", total, CDNA),
    Case("v_sub_f16_e32", "h", "hh", lambda a, b: total(a, -b), CDNA),
    Case("v_mul_f16_e32", "h", "hh", product, CDNA),
    Case("v_fma_f16", "h", "hhh", fused, CDNA),
]
EXTREMES = [
    *(
        Case(f"v_{name}_{kind}", letter, letter * 2, function, CDNA)
        for name, function in (("min", smaller), ("max", larger))
        for kind, letter in (("f32_e32", "f"), ("f16_e32", "h"), ("f64", "d"))
    ),
    Case("v_min_num_f32_e32", "f", "ff", smaller, G12),
    Case("v_max_num_f32_e32", "f", "ff", larger, G12),
    Case("v_minimum_f32", "f", "ff", propagate(smaller), G12),
    Case("v_maximum_f32", "f", "ff", propagate(larger), G12),
    Case("v_minimum3_f32", "f", "fff", lambda a, b, c: propagate(smaller)(propagate(smaller)(a, b), c), G950),
    Case("v_maximum3_f32", "f", "fff", lambda a, b, c: propagate(larger)(propagate(larger)(a, b), c), (*G950, *G12)),
    Case("v_min3_f32", "f", "fff", lambda a, b, c: smaller(smaller(a, b), c), (*CDNA, *G11)),
    Case("v_max3_f32", "f", "fff", lambda a, b, c: larger(larger(a, b), c), (*CDNA, *G11)),
    Case("v_med3_f32", "f", "fff", middle, (*CDNA, *G11)),
    Case("v_med3_num_f32", "f", "fff", middle, G12),
    Case("v_med3_f16", "h", "hhh", middle, CDNA),
    Case("v_minmax_f32", "f", "fff", lambda a, b, c: larger(smaller(a, b), c), G11),
]  # fmt: skip
PARTS = [
    *(
        Case(f"v_{name}_{kind}_e32", letter, letter, whole(function), archs)
        for name, function in (("floor", math.floor), ("ceil", math.ceil), ("trunc", math.trunc), ("rndne", round))
        for kind, letter, archs in (("f32", "f", ALL), ("f64", "d", ALL), ("f16", "h", CDNA))
    ),
    Case("v_fract_f32_e32", "f", "f", fraction("f")),
    Case("v_fract_f16_e32", "h", "h", fraction("h"), CDNA),
    Case("v_frexp_mant_f32_e32", "f", "f", mantissa),
    Case("v_frexp_exp_i32_f32_e32", "i", "f", exponent),
    Case("v_frexp_exp_i32_f64_e32", "i", "d", exponent),
    Case("v_ldexp_f32", "f", "fi", scaled),
    Case("v_ldexp_f64", "d", "di", scaled),
]
NEAR = [
    Case("v_exp_f32_e32", "f", "f", near(lambda a: 2.0**a), ulps=1),
    Case("v_log_f32_e32", "f", "f", near(log2), ulps=1),
    Case("v_rcp_f32_e32", "f", "f", near(lambda a: 1 / a), ulps=1),
    Case("v_rcp_iflag_f32_e32", "f", "f", near(lambda a: 1 / a), ulps=1),
    Case("v_rsq_f32_e32", "f", "f", near(root_inverse), ulps=1),
    Case("v_sqrt_f32_e32", "f", "f", near(math.sqrt), ulps=1),
    Case("v_sin_f32_e32", "f", "f", near(turns(math.sin)), ulps=1),
    Case("v_cos_f32_e32", "f", "f", near(turns(math.cos)), ulps=1),
    Case("v_s_rcp_f32", "f", "f", near(lambda a: 1 / a), (), ulps=1),
]


def compare(name: str) -> Callable[[float, float], bool]:
    plain: dict[str, Callable[[float, float], bool]] = {
        "lt": lambda a, b: a < b,
        "eq": lambda a, b: a == b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
        "lg": lambda a, b: a < b or a > b,
        "u": lambda a, b: math.isnan(a) or math.isnan(b),
    }
    if name == "o":
        return lambda a, b: not plain["u"](a, b)
    if name[0] == "n" and name != "neq":
        return lambda a, b: not plain[name[1:]](a, b)
    return (lambda a, b: a != b) if name == "neq" else plain[name]


RELATIONS = ("lt", "eq", "le", "gt", "ge", "lg", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt")
COMPARES = [
    Case(f"v_cmp_{name}_{kind}_e64", "m", letter * 2, compare(name), archs)
    for kind, letter, archs in (("f32", "f", ALL), ("f64", "d", ALL), ("f16", "h", CDNA))
    for name in RELATIONS
]


def is_class(exponent: int, fraction: int) -> Callable[[int, int], bool]:
    """Of bits and a mask: by sign, exponent and fraction, so many bits of which there are."""

    def function(bits: int, mask: int) -> bool:
        sign = bits >> (exponent + fraction)
        power, rest = bits >> fraction & ((1 << exponent) - 1), bits & ((1 << fraction) - 1)
        if power == (1 << exponent) - 1 and rest:
            return bool(mask >> (rest >> (fraction - 1)) & 1)
        level = 0 if power == rest == 0 else 1 if power == 0 else 3 if power == (1 << exponent) - 1 else 2
        return bool(mask >> (5 - level if sign else 6 + level) & 1)

    return function


CLASSES = [
    Case("v_cmp_class_f32_e64", "m", "uu", is_class(8, 23)),
    Case("v_cmp_class_f64_e64", "m", "Uu", is_class(11, 52)),
    Case("v_cmp_class_f16_e64", "m", "wu", is_class(5, 10), CDNA),
]


def test_signalling_nans() -> None:
    """In IEEE mode they come out quiet; the functions of gfx12 take them for any NaN."""
    for arch, name, wanted in (("gfx942", "v_max_f32_e32", 0x7FC00001), ("gfx1201", "v_max_num_f32_e32", 0x40000000)):
        w = empty_waves(arch)
        w.u32[0][...], w.u32[2][...] = 0x7F800001, 0x40000000
        execute(arch, f"{name} v8, v0, v2", w)
        assert {hex(x) for x in w.u32[8].ravel().tolist()} == {hex(wanted)}


CASES = [case for case in (*ARITHMETIC, *EXTREMES, *PARTS, *NEAR, *COMPARES, *CLASSES) if case.archs]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_floats(case: Case) -> None:
    check_all(case)
