"""Conversions and element-wise functions of core/, on every level, against ml_dtypes and float64."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_case import UNARY
from native_harness import DTYPES, LEVELS, build_once

SOURCE = """
#include "tilewright/core/types.hpp"
#include "tilewright/core/elementwise.hpp"
using namespace tw;
#define EXPORT extern "C" __attribute__((visibility("default"))) void
template <class F> static void map(const float* in, float* out, int64_t n, F f) {
  for (int64_t i = 0; i < n; i += kLanes)
    store_f32_partial<fp32>(out + i, f(load_f32_partial<fp32>(in + i, n - i)), n - i);
}
#define CONVERSIONS(E)                                                                                              \\
  EXPORT decode_##E(const void* in, float* out, int64_t n) {                                                        \\
    for (int64_t i = 0; i < n; i += kLanes)                                                                         \\
      store_f32_partial<fp32>(out + i, load_f32_partial<E>((const char*)in + i * size_of<E>, n - i), n - i);        \\
  }                                                                                                                 \\
  EXPORT decode_generic_##E(const void* in, float* out, int64_t n) {                                                \\
    for (int64_t i = 0; i + kLanes <= n; i += kLanes)                                                               \\
      store_as(out + i, decode_lanes<E>(load_raw<E>((const char*)in + i * size_of<E>)));                            \\
  }                                                                                                                 \\
  EXPORT encode_##E(const float* in, void* out, int64_t n) {                                                        \\
    for (int64_t i = 0; i < n; i += kLanes)                                                                         \\
      store_f32_partial<E>((char*)out + i * size_of<E>, load_f32_partial<fp32>(in + i, n - i), n - i);              \\
  }
CONVERSIONS(fp16) CONVERSIONS(bf16) CONVERSIONS(fp8) CONVERSIONS(bf8)
#define INTEGERS(E)                                                                                                 \\
  EXPORT encode_##E(const float* in, void* out, int64_t n) {                                                        \\
    for (int64_t i = 0; i < n; i += kLanes)                                                                         \\
      store_f32_partial<E>((char*)out + i * size_of<E>, load_f32_partial<fp32>(in + i, n - i), n - i);              \\
  }
INTEGERS(int8) INTEGERS(int32)
EXPORT map_exp(const float* in, float* out, int64_t n) { map(in, out, n, [](f32v x) { return tw::exp(x); }); }
EXPORT map_exp2(const float* in, float* out, int64_t n) { map(in, out, n, [](f32v x) { return tw::exp2(x); }); }
EXPORT map_log(const float* in, float* out, int64_t n) { map(in, out, n, [](f32v x) { return tw::log(x); }); }
EXPORT map_erf(const float* in, float* out, int64_t n) { map(in, out, n, [](f32v x) { return tw::erf(x); }); }
#define UNARY(OP) EXPORT map_##OP(const float* in, float* out, int64_t n) {                                          \\
    map(in, out, n, [](f32v x) { return apply_unary<Unary::OP>(x, -0.5f, 0.75f); }); }
UNARY(PassThrough) UNARY(Relu) UNARY(Gelu) UNARY(FastGelu) UNARY(Silu)
UNARY(Sigmoid) UNARY(Tanh) UNARY(HardSwish) UNARY(Clamp)
UNARY(LeakyRelu) UNARY(Elu) UNARY(Softplus) UNARY(Mish)
"""


@pytest.fixture(scope="module")
def library(build_folder: Path, level: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(build_once(build_folder, SOURCE, LEVELS[level][0])))


def call(function: Any, values: np.ndarray[Any, Any], result: np.dtype[Any]) -> np.ndarray[Any, Any]:
    out = np.empty(values.size, result)
    function(ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(values.size))
    return out


def all_values(name: str) -> np.ndarray[Any, Any]:
    bits = 8 * DTYPES[name].itemsize
    return np.arange(1 << bits, dtype=f"u{bits // 8}").view(DTYPES[name])


def interesting_floats(name: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Every value of the format, midpoints between neighbours and what is next to those, and random bits."""
    exact = all_values(name).astype(np.float32)
    ordered = np.unique(exact[np.isfinite(exact)])
    middle = ((ordered[:-1].astype(np.float64) + ordered[1:]) / 2).astype(np.float32)
    near = np.concatenate([np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))])
    random = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e38, -1e38, 1e-45], np.float32)
    return np.concatenate([exact, middle, near, random, special])


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8", "bf8"])
def test_every_value_decodes_exactly(library: ctypes.CDLL, name: str) -> None:
    values = all_values(name)
    want = values.astype(np.float32)
    for function in ("decode_", "decode_generic_"):
        got = call(getattr(library, function + name), values, DTYPES["fp32"])
        assert np.array_equal(np.isnan(got), np.isnan(want))
        number = ~np.isnan(want)
        assert np.array_equal(got.view(np.uint32)[number], want.view(np.uint32)[number])


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8", "bf8"])
def test_encoding_rounds_to_nearest_even(library: ctypes.CDLL, name: str, rng: np.random.Generator) -> None:
    values = interesting_floats(name, rng)
    got = call(getattr(library, f"encode_{name}"), values, DTYPES[name])
    with np.errstate(over="ignore", invalid="ignore"):
        if name in ("fp8", "bf8"):  # ours saturate
            biggest = {"fp8": 448.0, "bf8": 57344.0}[name]
            want = np.clip(values, -biggest, biggest).astype(DTYPES[name])
        else:
            want = values.astype(DTYPES[name])
    nan = np.isnan(values)
    assert np.all(np.isnan(got[nan].astype(np.float32)))
    bits = f"u{DTYPES[name].itemsize}"
    assert np.array_equal(got[~nan].view(bits), want[~nan].view(bits))


@pytest.mark.parametrize("name", ["int8", "int32"])
def test_integers_round_to_even_and_saturate(library: ctypes.CDLL, name: str, rng: np.random.Generator) -> None:
    info = np.iinfo(DTYPES[name])
    halves = np.arange(-300, 300, dtype=np.float32) / 2
    edges = np.array(
        [2.0**31, 2.0**31 - 128, -(2.0**31), -(2.0**31) - 256, 8388607.5, 8388608.0, 1e30, -1e30, np.inf, -np.inf],
        np.float32,
    )
    values = np.concatenate(
        [
            halves,
            edges,
            rng.standard_normal(5000).astype(np.float32) * np.float32(1e9),
            rng.standard_normal(5000).astype(np.float32),
        ]
    )
    got = call(getattr(library, f"encode_{name}"), values, DTYPES[name])
    want = np.clip(np.rint(values.astype(np.float64)), info.min, info.max).astype(DTYPES[name])
    assert np.array_equal(got, want)
    assert call(getattr(library, f"encode_{name}"), np.full(5, np.nan, np.float32), DTYPES[name]).tolist() == [0] * 5


def test_exp_keeps_its_stated_error(library: ctypes.CDLL, rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(-87, 88.7, 100_000), rng.uniform(-1, 1, 20_000)]).astype(np.float32)
    want = np.exp(x.astype(np.float64))
    assert np.max(np.abs(call(library.map_exp, x, DTYPES["fp32"]) - want) / want) < 2e-7
    ends = np.array([-np.inf, -200, 0, 89, 200, np.inf, np.nan], np.float32)
    assert np.array_equal(
        call(library.map_exp, ends, DTYPES["fp32"]),
        np.array([0, 0, 1, np.inf, np.inf, np.inf, np.nan], np.float32),
        equal_nan=True,
    )


def test_exp2_keeps_its_stated_error(library: ctypes.CDLL, rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(-125.9, 127.4, 100_000), rng.uniform(-1, 1, 20_000)]).astype(np.float32)
    want = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(call(library.map_exp2, x, DTYPES["fp32"]) - want) / want) < 2e-7
    tiny = call(library.map_exp2, rng.uniform(-130, -126, 1000).astype(np.float32), DTYPES["fp32"])
    assert np.all((tiny >= 0) & (tiny <= 2.0**-126))
    ends = np.array([-np.inf, -200, -127, 0, 1, 128, 200, np.inf, np.nan], np.float32)
    assert np.array_equal(
        call(library.map_exp2, ends, DTYPES["fp32"]),
        np.array([0, 0, 0, 1, 2, np.inf, np.inf, np.inf, np.nan], np.float32),
        equal_nan=True,
    )


def test_log_keeps_its_stated_error(library: ctypes.CDLL, rng: np.random.Generator) -> None:
    x = np.concatenate([np.exp(rng.uniform(-87, 88, 100_000)), rng.uniform(0.5, 2, 20_000)]).astype(np.float32)
    want = np.log(x.astype(np.float64))
    assert np.max(np.abs(call(library.map_log, x, DTYPES["fp32"]) - want) / np.maximum(np.abs(want), 1)) < 2e-7
    ends = np.array([0, 1, np.inf, -1, -np.inf, np.nan], np.float32)
    assert np.array_equal(
        call(library.map_log, ends, DTYPES["fp32"]),
        np.array([-np.inf, 0, np.inf, np.nan, np.nan, np.nan], np.float32),
        equal_nan=True,
    )


def test_erf_keeps_its_stated_error(library: ctypes.CDLL, rng: np.random.Generator) -> None:
    x = rng.uniform(-6, 6, 50_000).astype(np.float32)
    want = np.array([math.erf(v) for v in x.tolist()])
    assert np.max(np.abs(call(library.map_erf, x, DTYPES["fp32"]) - want)) < 5e-7


@pytest.mark.parametrize("name", list(UNARY))
def test_activations_match_float64(library: ctypes.CDLL, name: str, rng: np.random.Generator) -> None:
    chosen = [0.0, -0.0, 30.0, -30.0, -5.552961, -5.6456485]  # the last two: the worst of Gelu, of 8 million
    x = np.concatenate([rng.uniform(-8, 8, 20_000), rng.uniform(-0.01, 0.01, 2000), chosen]).astype(np.float32)
    bound = 1.5e-6 if name == "Gelu" else 3e-7
    want = UNARY[name](x.astype(np.float64))
    got = call(getattr(library, f"map_{name}"), x, DTYPES["fp32"])
    assert np.max(np.abs(got - want) / np.maximum(1.0, np.abs(want))) < bound
    assert np.isnan(call(getattr(library, f"map_{name}"), np.array([np.nan], np.float32), DTYPES["fp32"])[0])


@pytest.mark.parametrize("name", ["Elu", "Softplus", "Mish"])
def test_activations_lose_no_digits_where_they_are_small(
    library: ctypes.CDLL, name: str, rng: np.random.Generator
) -> None:
    small = [rng.uniform(-1, 1, 20_000) * 2.0**exponent for exponent in (-20, -6, 0, 3)]
    x = np.concatenate([*small, [-60.0, -30.0, 60.0, 1e4]]).astype(np.float32)
    x = x[x != 0]
    want = UNARY[name](x.astype(np.float64))
    got = call(getattr(library, f"map_{name}"), x, DTYPES["fp32"])
    assert np.max(np.abs(got - want) / np.abs(want)) < 6e-7
    ends = np.array([np.inf, -1e30], np.float32)
    assert np.array_equal(call(getattr(library, f"map_{name}"), ends, DTYPES["fp32"]), [np.inf, 0.5 * (name == "Elu")])
