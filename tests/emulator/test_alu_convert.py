"""Conversions against Python's integers, struct and ml_dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from alu_harness import CDNA, M32, RDNA, Case, bits_of, check_all, empty_waves, execute, float_of

G12, G950 = ("gfx1201",), ("gfx950",)
I32, U32, I16, U16 = (-(1 << 31), (1 << 31) - 1), (0, M32), (-(1 << 15), (1 << 15) - 1), (0, 0xFFFF)


def clamp(x: float, limits: tuple[int, int], how: Callable[[float], int] = math.trunc) -> int:
    if math.isnan(x):
        return 0
    if math.isinf(x):
        return limits[x > 0]
    return max(limits[0], min(limits[1], how(x)))


def half(x: float) -> int:
    return bits_of(x, "h")


def toward_zero(x: float) -> int:
    bits = half(x)
    return bits - 1 if math.isfinite(x) and abs(float_of(bits, "h")) > abs(x) else bits


def brain(x: float) -> int:
    return int(np.array([x], np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)[0])


def both(low: int, high: int) -> int:
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def signed_byte(x: int) -> int:
    return (x & 0xFF) - 256 if x & 0x80 else x & 0xFF


CASES = [
    Case("v_cvt_i32_f32_e32", "i", "f", lambda a: clamp(a, I32)),
    Case("v_cvt_u32_f32_e32", "u", "f", lambda a: clamp(a, U32)),
    Case("v_cvt_i32_f64_e32", "i", "d", lambda a: clamp(a, I32)),
    Case("v_cvt_u32_f64_e32", "u", "d", lambda a: clamp(a, U32)),
    Case("v_cvt_i16_f16_e32", "x", "h", lambda a: clamp(a, I16), CDNA),
    Case("v_cvt_u16_f16_e32", "w", "h", lambda a: clamp(a, U16), CDNA),
    Case("v_cvt_flr_i32_f32_e32", "i", "f", lambda a: clamp(a, I32, math.floor), CDNA),
    Case("v_cvt_floor_i32_f32_e32", "i", "f", lambda a: clamp(a, I32, math.floor), RDNA),
    Case("v_cvt_rpi_i32_f32_e32", "i", "f", lambda a: clamp(a, I32, lambda x: math.floor(x + 0.5)), CDNA),
    Case("v_cvt_f32_i32_e32", "f", "i", float),
    Case("v_cvt_f32_u32_e32", "f", "u", float),
    Case("v_cvt_f64_i32_e32", "d", "i", float),
    Case("v_cvt_f64_u32_e32", "d", "u", float),
    Case("v_cvt_f16_i16_e32", "h", "x", float, CDNA),
    Case("v_cvt_f16_u16_e32", "h", "w", float, CDNA),
    Case("v_cvt_f64_f32_e32", "d", "f", lambda a: a),
    Case("v_cvt_f32_f64_e32", "f", "d", lambda a: a),
    Case("v_cvt_f16_f32_e32", "h", "f", lambda a: a, CDNA),
    Case("v_cvt_f32_f16_e32", "f", "h", lambda a: a, CDNA),
    *(
        Case(f"v_cvt_f32_ubyte{n}_e32", "f", "u", lambda a, n=n: float(a >> 8 * n & 0xFF))
        for n in range(4)
    ),
    Case("v_cvt_off_f32_i4_e32", "f", "u", lambda a: ((a & 15 ^ 8) - 8) / 16),
    Case("v_cvt_pk_i16_i32", "u", "ii", lambda a, b: both(clamp(a, I16), clamp(b, I16))),
    Case("v_cvt_pk_u16_u32", "u", "uu", lambda a, b: both(clamp(a, U16), clamp(b, U16))),
    Case("v_cvt_pk_u8_f32", "u", "fuu", lambda a, b, c: c & ~(255 << 8 * (b & 3)) | clamp(a, (0, 255)) << 8 * (b & 3)),
    Case("s_cvt_f32_i32", "f", "i", float, G12),
    Case("s_cvt_u32_f32", "u", "f", lambda a: clamp(a, U32), G12),
]  # fmt: skip
PAIRS: list[tuple[str, tuple[str, ...], Callable[[float], int]]] = [
    ("v_cvt_pkrtz_f16_f32", CDNA, toward_zero),
    ("v_cvt_pk_rtz_f16_f32_e32", RDNA, toward_zero),
    ("v_cvt_pk_f16_f32", G950, half),
    ("v_cvt_pk_bf16_f32", G950, brain),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conversions(case: Case) -> None:
    check_all(case)


def run(arch: str, text: str, *sources: Any, old: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    """Executes over arrays of float32 or uint32, spread over registers v0, v2 ...; the result register v8 as uint32."""
    w = empty_waves(arch)
    size = w.count * w.lanes
    count = len(sources[0])
    got = []
    for begin in range(0, count, size):
        for i, source in enumerate(sources):
            part = np.resize(source[begin : begin + size], size)
            w.u32[2 * i][...] = part.view(np.uint32).reshape(w.count, w.lanes)
        w.u32[8][...], w.u32[9][...] = old, old
        execute(arch, text, w)
        pair = np.stack([w.u32[8].ravel(), w.u32[9].ravel()], 1)
        got.append(pair[: min(size, count - begin)].copy())
    return np.concatenate(got)


def floats(seed: int, scale: float = 1.0) -> np.ndarray:  # type: ignore[type-arg]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 1 << 32, 1000, dtype=np.uint32).view(np.float32)
    tame = (rng.standard_normal(2000) * scale).astype(np.float32)
    exact = np.arange(-600, 600, dtype=np.float32) / np.float32(16)
    values = np.concatenate([raw, tame, exact, np.array([0.0, -0.0, 448, 464, 465, 240, 248, 249, 57344, 61440], "f4")])
    return values[np.isfinite(values)]


@pytest.mark.parametrize(("name", "archs", "function"), PAIRS, ids=[name for name, _, _ in PAIRS])
def test_pairs(name: str, archs: tuple[str, ...], function: Callable[[float], int]) -> None:
    for arch in {archs[0], archs[-1]}:
        a, b = floats(1, 100), floats(1, 100)[::-1].copy()
        got = run(arch, f"{name} v8, v0, v2", a, b)[:, 0]
        with np.errstate(over="ignore"):
            wanted = [both(function(float(x)), function(float(y))) for x, y in zip(a, b, strict=True)]
        assert [hex(x) for x in got.tolist()] == [hex(x) for x in wanted]


EIGHT = {
    ("gfx942", "fp8"): ml_dtypes.float8_e4m3fnuz,
    ("gfx942", "bf8"): ml_dtypes.float8_e5m2fnuz,
    ("gfx950", "fp8"): ml_dtypes.float8_e4m3fn,
    ("gfx950", "bf8"): ml_dtypes.float8_e5m2,
    ("gfx1201", "fp8"): ml_dtypes.float8_e4m3fn,
    ("gfx1201", "bf8"): ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize(("arch", "name"), EIGHT)
def test_eight_bit_floats(arch: str, name: str) -> None:
    """Every code to float32 from each byte; float32 of all sizes to codes in each half, keeping the other one."""
    dtype = EIGHT[arch, name]
    codes = np.arange(256, dtype=np.uint32)
    meant = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    for place in range(4):
        if arch == "gfx1201":
            text = f"v_cvt_f32_{name}_e64 v8, v0 byte_sel:{place}" if place else f"v_cvt_f32_{name}_e32 v8, v0"
        else:
            text = f"v_cvt_f32_{name}_sdwa v8, v0 src0_sel:BYTE_{place}"
        got = run(arch, text, codes << np.uint32(8 * place) | np.uint32(0x11111111 & ~(0xFF << 8 * place)))[:, 0]
        np.testing.assert_array_equal(got.view(np.float32), meant)
    high = " op_sel:[1,0]" if arch == "gfx1201" else " src0_sel:WORD_1"
    suffix = "_e64" if arch == "gfx1201" else "_sdwa"
    both_bytes = (codes | codes[::-1] << np.uint32(8)) << np.uint32(16)
    pair = run(arch, f"v_cvt_pk_f32_{name}{suffix} v[8:9], v0{high}", both_bytes).view(np.float32)
    np.testing.assert_array_equal(pair, np.stack([meant, meant[::-1]], 1))
    largest = float(ml_dtypes.finfo(dtype).max)
    values = floats(2, largest / 3)
    values = values[np.abs(values) <= largest]
    wanted = values.astype(dtype).view(np.uint8).astype(np.uint32)
    packed = wanted | wanted[::-1] << np.uint32(8)
    low = run(arch, f"v_cvt_pk_{name}_f32 v8, v0, v2", values, values[::-1].copy(), old=0xABCD1234)[:, 0]
    np.testing.assert_array_equal(low, packed | np.uint32(0xABCD0000))
    upper = run(arch, f"v_cvt_pk_{name}_f32 v8, v0, v2 op_sel:[0,0,1]", values, values[::-1].copy(), old=0xABCD1234)[
        :, 0
    ]
    np.testing.assert_array_equal(upper, packed << np.uint32(16) | np.uint32(0x1234))
    beyond = run(arch, f"v_cvt_pk_{name}_f32 v8, v0, v0", np.array([largest * 4, np.inf, np.nan], np.float32))[:, 0]
    assert not np.isfinite((beyond & np.uint32(0xFF)).astype(np.uint8).view(dtype).astype(np.float32)).any()


@pytest.mark.parametrize(("arch", "name"), EIGHT)
def test_stochastic_rounding(arch: str, name: str) -> None:
    """Without random bits numbers are cut; with all of them they go up, unless they are exact."""
    dtype = EIGHT[arch, name]
    place = " byte_sel:2" if arch == "gfx1201" else " op_sel:[0,0,0,1]"
    values = np.array([1.0, 1.3, -1.3, 0.77, 12.9, -0.01], np.float32)
    results = []
    for random in (0, M32):
        got = run(
            arch, f"v_cvt_sr_{name}_f32 v8, v0, v2{place}", values, np.full(6, random, np.uint32), old=0x55555555
        )[:, 0]
        assert {x & 0xFF00FFFF for x in got.tolist()} == {0x55005555}
        results.append((got >> np.uint32(16) & np.uint32(0xFF)).astype(np.uint8).view(dtype).astype(np.float32))
    below, above = (np.abs(part) for part in results)
    assert below[0] == above[0] == 1
    assert (below <= np.abs(values)).all()
    assert (above[1:] > np.abs(values[1:])).all()
    assert ((above[1:] / below[1:]) <= 1.34).all()


DIVISION = (  # v2 / v0, as compilers emit it
    "v_div_scale_f32 v3, {scratch}, v0, v0, v2",
    "v_rcp_f32_e32 v4, v3",
    "v_div_scale_f32 v5, {carry}, v2, v0, v2",
    "v_fma_f32 v6, -v3, v4, 1.0",
    "v_fmac_f32_e32 v4, v6, v4",
    "v_mul_f32_e32 v6, v5, v4",
    "v_fma_f32 v7, -v3, v6, v5",
    "v_fmac_f32_e32 v6, v7, v4",
    "v_fma_f32 v3, -v3, v6, v5",
    "v_div_fmas_f32 v3, v3, v4, v6",
    "v_div_fixup_f32 v8, v3, v0, v2",
)


def test_division_is_correctly_rounded() -> None:
    """Over operands of all sizes, special ones among them."""
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 1 << 32, (2, 3000), dtype=np.uint32).view(np.float32)
    near = np.float32(2.0) ** rng.integers(-149, 128, (2, 1500)).astype(np.float32) * rng.uniform(
        1, 2, (2, 1500)
    ).astype("f4")
    special = np.array([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 2.0**-149, 3.4e38, 2.0**-126], np.float32)
    pairs = np.stack([np.repeat(special, 9), np.tile(special, 9)])
    y, x = (np.concatenate(parts) for parts in zip(raw, near, pairs, strict=True))  # x / y
    for arch, carry in (("gfx942", "vcc"), ("gfx1201", "vcc_lo")):
        scratch = "s[0:1]" if arch == "gfx942" else "s0"
        lines = [line.format(scratch=scratch, carry=carry) for line in DIVISION]
        w = empty_waves(arch)
        size = w.count * w.lanes
        for begin in range(0, len(x) - size, size):
            w.u32[0][...] = y[begin : begin + size].view(np.uint32).reshape(w.count, w.lanes)
            w.u32[2][...] = x[begin : begin + size].view(np.uint32).reshape(w.count, w.lanes)
            for line in lines:
                execute(arch, line, w)
            with np.errstate(all="ignore"):
                wanted = x[begin : begin + size] / y[begin : begin + size]
            np.testing.assert_array_equal(w.f32[8].ravel(), wanted)
