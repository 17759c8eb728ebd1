"""Number formats of the emulator against ml_dtypes, fractions and what the formats' definitions say."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tilewright_emulator.isa import number_formats as formats
from tilewright_emulator.isa.number_formats import BF8_FNUZ, BF8_OCP, FP8_FNUZ, FP8_OCP, SmallFloat

SMALL = {
    ml_dtypes.float8_e4m3fn: FP8_OCP,
    ml_dtypes.float8_e5m2: BF8_OCP,
    ml_dtypes.float8_e4m3fnuz: FP8_FNUZ,
    ml_dtypes.float8_e5m2fnuz: BF8_FNUZ,
}
SPECIAL = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
     0x7F800001, 0x3F800000, 0x3F800001, 0xBF7FFFFF, 0x477FE000, 0x477FF000, 0x33000000, 0x33000001, 0x387FE000],
    np.uint32,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Overflow and NaN are results here, as in the emulator."""
    with np.errstate(all="ignore"):
        yield


def any_bits(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def nearest(value: Fraction, bits: int, least: int) -> Fraction:
    """A number rounded to nearest even with so many significant bits, in steps of 2**least at the least."""
    if value == 0:
        return value
    exponent = abs(value).numerator.bit_length() - abs(value).denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    step = Fraction(2) ** max(exponent - bits + 1, least)
    return round(value / step) * step


@pytest.mark.parametrize(("dtype", "small"), SMALL.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_small_floats_decode_every_code(dtype: type, small: SmallFloat) -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(small.decode(codes), codes.view(dtype).astype(np.float32))


def test_four_and_six_bits() -> None:
    for dtype, small in (
        (ml_dtypes.float4_e2m1fn, formats.FP4),
        (ml_dtypes.float6_e2m3fn, formats.FP6),
        (ml_dtypes.float6_e3m2fn, formats.BF6),
    ):
        codes = np.arange(1 << small.width, dtype=np.uint8)
        np.testing.assert_array_equal(small.decode(codes), codes.view(dtype).astype(np.float32))


@pytest.mark.parametrize(("dtype", "small"), SMALL.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_small_floats_encode_to_nearest_even(dtype: type, small: SmallFloat) -> None:
    """Ties included: every midpoint of neighbours, and the floats next to it."""
    finite = np.sort(small.table[np.isfinite(small.table)]).astype(np.float64)
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    values = np.concatenate([middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, -np.float32(1e9))])
    values = np.concatenate([values, any_bits(1, 20000).view(np.float32), small.table])
    inside = np.abs(values) <= finite[-1]
    values = values[inside & ~np.isnan(values)]
    np.testing.assert_array_equal(small.encode(values), values.astype(dtype).view(np.uint8))


def test_small_floats_beyond_their_range() -> None:
    over = np.array([1e9, -1e9, np.inf, -np.inf, np.nan], np.float32)
    assert FP8_OCP.encode(over[:4]).tolist() == [0x7F, 0xFF, 0x7F, 0xFF]
    assert BF8_OCP.encode(over[:4]).tolist() == [0x7C, 0xFC, 0x7C, 0xFC]
    assert FP8_FNUZ.encode(over).tolist() == [0x80] * 5
    assert BF8_FNUZ.encode(over).tolist() == [0x80] * 5
    for small in SMALL.values():
        saturated = small.decode(small.encode(over, saturate=True))
        largest = np.nanmax(small.table[np.isfinite(small.table)])
        assert saturated[:4].tolist() == [largest, -largest, largest, -largest]
        assert math.isnan(saturated[4])
    for value, code in ((464.0, 0x7E), (464.1, 0x7F)):  # the largest number is the even neighbour of the middle
        assert FP8_OCP.encode(np.array([value], np.float32)).tolist() == [code]


@pytest.mark.parametrize("small", SMALL.values(), ids=lambda x: f"{x.name}-{x.special}")
def test_stochastic_rounding_goes_to_a_neighbour_as_often_as_it_is_near(small: SmallFloat) -> None:
    rng = np.random.default_rng(3)
    for value in (1.03, -1.2, 0.7, 3.3):
        bits = np.full(4096, np.float32(value)).view(np.uint32)
        got = small.decode(small.encode_stochastic(bits, rng.integers(0, 1 << 32, 4096, dtype=np.uint32)))
        assert len(np.unique(got)) == 2
        step = np.ptp(got)
        assert abs(got.mean() - value) < 0.03 * step
    exact = small.table[np.isfinite(small.table)].view(np.uint32)
    codes = small.encode_stochastic(exact, np.full(exact.shape, 0xFFFFFFFF, np.uint32))
    np.testing.assert_array_equal(small.decode(codes), exact.view(np.float32))


def test_bfloat16_rounds_to_nearest_even() -> None:
    bits = np.concatenate([any_bits(5, 50000), SPECIAL, np.array([0x3F808000, 0x3F818000, 0x7F7F8000], np.uint32)])
    got = formats.f32_to_bf16(bits).astype(np.uint16).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got.astype(np.float32), bits.view(np.float32).astype(ml_dtypes.bfloat16).astype("f4"))
    assert formats.f32_to_bf16(bits).max() <= 0xFFFF


def test_fma_of_float32_rounds_once() -> None:
    """Random operands, operands whose sum cancels, and sums next to the middle of two float32."""
    rng = np.random.default_rng(7)
    x, y, z = (any_bits(seed, 3000).view(np.float32) for seed in (1, 2, 3))
    one = rng.integers(0x3F800000, 0x40000000, (3, 3000), dtype=np.uint32).view(np.float32)
    near = -np.multiply(one[0], one[1], dtype=np.float64).astype(np.float32)
    tie = np.float32(1) + np.float32(2.0**-12) * rng.integers(0, 4096, 3000).astype(np.float32)
    tiny = (2.0 ** rng.integers(-130, -40, 3000)).astype(np.float32)
    small = (2.0 ** rng.integers(-149, -100, 3000)).astype(np.float32) * rng.choice([-1, 1], 3000).astype(np.float32)
    cases = [(x, y, z), (one[0], one[1], near), (one[0], one[1], one[2]), (tie, tie, tiny), (tie, tie, -tiny)]
    cases += [(tie * np.float32(2.0**-70), tie * np.float32(2.0**-70), small), (tie, tie, small)]
    for a, b, c in cases:
        got = formats.fma32(a, b, c)
        for p, q, r, s in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
            if not all(map(math.isfinite, (p, q, r))):
                continue
            exact = nearest(Fraction(p) * Fraction(q) + Fraction(r), 24, -149)
            if abs(exact) >= 2**128:
                assert math.isinf(s)
            else:
                assert Fraction(s) == exact, (p, q, r)


def test_fma_of_other_floats_rounds_once() -> None:
    rng = np.random.default_rng(8)
    half = rng.integers(0, 1 << 16, (3, 6000), dtype=np.uint16)
    x, y, z = half.view(np.float16)
    for p, q, r, s in zip(x.tolist(), y.tolist(), z.tolist(), formats.fma16(x, y, z).tolist(), strict=True):
        if all(map(math.isfinite, (p, q, r))):
            exact = nearest(Fraction(p) * Fraction(q) + Fraction(r), 11, -24)
            assert Fraction(s) == exact if abs(exact) < 65520 else math.isinf(s)
    wide = rng.standard_normal((3, 300))
    wide[2] = -wide[0] * wide[1]
    for p, q, r, s in zip(*(part.tolist() for part in wide), formats.fma64(*wide).tolist(), strict=True):
        assert Fraction(s) == nearest(Fraction(p) * Fraction(q) + Fraction(r), 53, -1074)


def test_every_half_as_float32() -> None:
    """Infinities and NaNs go another way than numbers."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    finite = np.isfinite(halves.view(np.float16))
    for part in (halves, halves[finite], halves[~finite], halves[:0]):
        np.testing.assert_array_equal(formats.halves_to_f32(part), part.view(np.float16).astype(np.float32))
    assert np.signbit(formats.halves_to_f32(np.array([0x8000], np.uint16))).all()


def test_rounding_toward_zero_to_half() -> None:
    values = np.concatenate([any_bits(9, 20000).view(np.float32), np.linspace(-70000, 70000, 999, dtype=np.float32)])
    values = np.concatenate([values, (np.arange(1, 4000) * 2.0**-26).astype(np.float32)])
    got = formats.f16(formats.toward_zero16(values))
    for value, half in zip(values.tolist(), got.tolist(), strict=True):
        if math.isnan(value) or math.isinf(value):
            assert struct.pack("<d", half)[7] == struct.pack("<d", value)[7]
            continue
        assert abs(half) <= abs(value)
        following = float(np.nextafter(np.float16(abs(half)), np.float16(np.inf)))
        assert abs(value) < following
