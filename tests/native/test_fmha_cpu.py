"""Attention kernels for CPUs on every level that this machine runs, against float64, between guard pages: every feature
alone and with others, odd sizes, NaN wherever nothing may be read.

Values are drawn anew in every run; the seed is shown when a test fails.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
from fmha_native_args import FmhaKernel, FmhaShape
from fmha_native_case import FmhaCall
from grouping import wanted
from native_harness import LEVELS, Library, Runtime, build_once, missing_features

from tilewright_fmha.problem.masks import Mask

sys.path.insert(0, str(Path(__file__).parents[1] / "fmha"))

from philox_answers import ANSWERS

pytestmark = pytest.mark.slow

RANDOM = """
#include "tilewright/cpu/blocks/philox.hpp"
extern "C" __attribute__((visibility("default"))) void random_row(int64_t seed, int64_t offset, int64_t head,
                                                                  int64_t row, int64_t first, int64_t count,
                                                                  uint8_t* to) {
  uint8_t bytes[4096];
  const tw::FmhaSeed drawn = {(uint32_t)seed, (uint32_t)((uint64_t)seed >> 32), (uint32_t)offset};
  __builtin_memcpy(to, tw::fmha_random_row(drawn, head, row, first, count, bytes), (size_t)count);
}
"""
BEST = next((name for name in reversed(LEVELS) if not missing_features(name)), "")
PLAIN = FmhaKernel()
BF16 = PLAIN.replace(q="bf16", kv="bf16", o="bf16", register=(6, 32, 2))
FP16 = PLAIN.replace(q="fp16", kv="fp16", o="fp16")
FP8 = PLAIN.replace(q="fp8", kv="fp8", o="fp16", register=(6, 32, 2))
SCORES = PLAIN.replace(mask="window", token_sinks=True, bias="elementwise", softcap=True, dropout=True, randval=True)
DROPPED = {"drop_below": 77}
LENGTHS = FmhaShape(batch=5, seq=(70, 130), lens_q=(17, 0, 70, 1, 3), lens_k=(65, 9, 130, 1, 0))
CAUSAL, BOTTOM = Mask(-1, 0), Mask(-1, 0, True)

# On every level: each type, and what works on scores.
EVERYWHERE: dict[str, FmhaKernel] = {
    "plain": PLAIN,
    "fp16": FP16,
    "scores": SCORES.replace(q="bf16", kv="bf16", o="fp32", register=(4, 16, 2), varlen=True, bias="alibi"),
}
# Kernels that several cases share are compiled once.
CAUSAL_GQA = PLAIN.replace(mask="causal", learned_sinks=True)
VARLEN = BF16.replace(varlen=True, mask="causal", skip_min=True, learned_sinks=True)
DROPPING = PLAIN.replace(dropout=True, randval=True, skip_min=True)
BIASED = PLAIN.replace(bias="elementwise", varlen=True, dropout=True, randval=True)
FEATURES: dict[str, tuple[FmhaKernel, FmhaShape]] = {
    "bf16": (BF16, FmhaShape(seq=(127, 200), heads=(3, 1))),
    "bf16_rows": (BF16, FmhaShape(seq=(1, 130), hdim=(40, 24), heads=(6, 2), layout="bshd")),
    "causal": (CAUSAL_GQA, FmhaShape(seq=(127, 200), mask=CAUSAL, heads=(3, 1))),
    "negative_scale": (CAUSAL_GQA, FmhaShape(seq=(20, 70), scale=-0.3, mask=BOTTOM)),
    "causal_lengths": (CAUSAL_GQA, LENGTHS.replace(mask=BOTTOM, layout="bshd")),
    "wide_tiles": (PLAIN.replace(register=(12, 16, 1), block=(12, 32), lse=False), FmhaShape(seq=(29, 70))),
    "hdim_192x128": (BF16.replace(hdim=(192, 128), register=(6, 64, 2)), FmhaShape(seq=(30, 70), hdim=(192, 128))),
    "hdim_256": (PLAIN.replace(hdim=(256, 256), register=(6, 64, 1)), FmhaShape(seq=(9, 65), hdim=(256, 248))),
    "hdim_72": (BF16.replace(hdim=(80, 80), register=(6, 64, 2)), FmhaShape(seq=(33, 65), hdim=(72, 72))),
    "cache_index": (BF16, FmhaShape(batch=3, cache_items=5, lens_k=(65, 1, 30))),
    "varlen": (VARLEN, LENGTHS.replace(mask=BOTTOM, heads=(4, 2))),
    "varlen_rooms": (VARLEN, LENGTHS.replace(room=(2, 3), layout="bshd", mask=CAUSAL, min_q=4)),
    "v_columns": (PLAIN.replace(v_col=True), FmhaShape(seq=(17, 70), layout="bshd")),
    "v_columns_bf16": (BF16.replace(v_col=True), FmhaShape(seq=(17, 70), hdim=(64, 40))),
    "bias_bf16": (BF16.replace(bias="elementwise", bias_type="bf16"), FmhaShape(bias_axes=(False, True, False, True))),
    "bias_rows": (FP16.replace(bias="elementwise", bias_type="fp16"), FmhaShape(bias_axes=(True, False, True, False))),
    "bias_varlen": (BIASED, LENGTHS.replace(**DROPPED)),
    "alibi": (PLAIN.replace(bias="alibi"), FmhaShape(seq=(17, 70), heads=(4, 2), mask=Mask(bottom_right=True))),
    "alibi_items": (PLAIN.replace(bias="alibi"), FmhaShape(seq=(70, 17), slopes_by_item=True)),
    "scores": (SCORES, FmhaShape(seq=(130, 200), heads=(4, 2), mask=Mask(40, 9, True, 3), softcap=2.0, **DROPPED)),
    "softcap": (PLAIN.replace(softcap=True), FmhaShape(softcap=1.5)),
    "dropout": (DROPPING, FmhaShape(seq=(17, 200), heads=(4, 2), **DROPPED)),
    "dropout_rng": (DROPPING, FmhaShape(seq=(30, 70), rng=True, drop_below=1)),
    "dropout_lengths": (DROPPING, LENGTHS.replace(min_q=2, **DROPPED)),
    "fp8_pertensor": (FP8.replace(qscale="pertensor"), FmhaShape(heads=(4, 2))),
    "fp8_blocks": (FP8.replace(qscale="blockscale", o="fp32"), FmhaShape(seq=(70, 130), blocks=(32, 48))),
    "fp8_mixed": (FP16.replace(kv="fp8", qscale="pertensor"), FmhaShape(seq=(9, 70), layout="bshd")),
    "fp8_mixed_bf16": (BF16.replace(kv="fp8", qscale="blockscale"), FmhaShape(seq=(9, 130), blocks=(4, 64))),
}


@pytest.fixture(scope="module")
def everywhere(build_folder: Path, level: str, request: pytest.FixtureRequest) -> Library:
    first = wanted(request, EVERYWHERE)
    return Library(build_folder, list(EVERYWHERE.values()), level, header="fmha/forward.hpp", first=first)


@pytest.fixture(scope="module")
def features(build_folder: Path, request: pytest.FixtureRequest) -> Library:
    every, first = ([kernel for kernel, _ in cases] for cases in (FEATURES.values(), wanted(request, FEATURES)))
    return Library(build_folder, every, BEST, header="fmha/forward.hpp", first=first)


def run(library: Library, runtime: Runtime, kernel: FmhaKernel, shape: FmhaShape, rng: np.random.Generator) -> FmhaCall:
    call = FmhaCall(kernel, shape, rng, at_end=bool(rng.integers(2)))
    call.launch(library, runtime, int(rng.integers(1, 3)))
    call.check()
    return call


@pytest.mark.parametrize("name", ["plain", "fp16"])
@pytest.mark.extended
def test_sizes(everywhere: Library, runtime: Runtime, name: str, rng: np.random.Generator) -> None:
    for seq in ((1, 1), (3, 65), (127, 17), (33, 200)):
        for hdim in ((64, 64), (40, 24)):
            shape = FmhaShape(batch=1, seq=seq, hdim=hdim, layout=str(rng.choice(["bhsd", "bshd"])))
            run(everywhere, runtime, EVERYWHERE[name], shape, rng)


def test_scores(everywhere: Library, runtime: Runtime, rng: np.random.Generator) -> None:
    shape = LENGTHS.replace(softcap=2.0, heads=(4, 2), mask=Mask(40, 9, True, 3), **DROPPED)
    run(everywhere, runtime, EVERYWHERE["scores"], shape, rng)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.some(8)
@pytest.mark.extended
def test_features(features: Library, runtime: Runtime, name: str, rng: np.random.Generator) -> None:
    run(features, runtime, *FEATURES[name], rng)


@pytest.mark.parametrize("seq", [(1, 65), (64, 17), (130, 200)])
def test_windows(features: Library, runtime: Runtime, seq: tuple[int, int], rng: np.random.Generator) -> None:
    for left, right, sink in ((0, 0, 0), (5, 0, 3), (70, 9, 0), (-1, 20, 0), (40, -1, 70), (3, -1, 0)):
        mask, heads = Mask(left, right, bool(rng.integers(2)), sink), (5, 1) if rng.integers(2) else (2, 2)
        run(features, runtime, SCORES, FmhaShape(batch=1, seq=seq, heads=heads, mask=mask, softcap=3.0), rng)


def test_blocks_that_are_nearly_whole(features: Library, runtime: Runtime, rng: np.random.Generator) -> None:
    """The first row of 24 does not see the last column of a block of 64, or the last row not its first one."""
    for right in range(12, 17):
        run(features, runtime, SCORES, FmhaShape(batch=1, seq=(60, 74), mask=Mask(-1, right), softcap=3.0), rng)
    for left in range(5, 10):
        run(features, runtime, SCORES, FmhaShape(batch=1, seq=(96, 130), mask=Mask(left, -1), softcap=3.0), rng)


def test_random_bytes(build_folder: Path, level: str) -> None:
    """A vector of calls draws what every device draws."""
    handle = ctypes.CDLL(str(build_once(build_folder, RANDOM, LEVELS[level][0])))
    for seed, offset, b, h, heads, row, column, byte in ANSWERS:
        for first in (column, max(column - 70, 0)):
            got = np.full(4096, 0x7F, np.uint8)
            arguments = (*(ctypes.c_int64(x) for x in (seed, offset, b * heads + h, row, first, column + 1 - first)),)
            handle.random_row(*arguments, ctypes.c_void_p(got.ctypes.data))
            assert got[column - first] == byte


@pytest.mark.parametrize("name, index, value, bit", [
    ("cu_q", 2, 1 << 30, 4), ("cu_q", 3, -9, 4), ("cu_q", 2, 1, 4), ("cu_k", 0, 1 << 30, 4), ("cu_k", 5, -1, 4),
    ("len_q", 1, 99999, 1), ("len_k", 4, -3, 1), ("cache_index", 2, 5, 32), ("cache_index", 0, -1, 32),
])  # fmt: skip
def test_wrong_lengths_reach_nothing(features: Library, runtime: Runtime, name: str, index: int, value: int, bit: int,
                                     rng: np.random.Generator) -> None:  # fmt: skip
    """Nothing outside the operands is touched (they lie between guard pages), and the status says what was wrong."""
    kernel, shape = FEATURES["cache_index" if name == "cache_index" else "varlen"]
    if name.startswith("len"):
        shape = shape.replace(room=(2, 3))
    call = FmhaCall(kernel, shape, rng)
    call.array(name)[index] = value
    call.launch(features, runtime, 2)
    assert call.status[0] & bit, list(call.status)
    assert index - 1 <= call.status[1] <= index
    for each in ("q", "k", "v"):
        assert np.array_equal(call.flats[each].view(np.uint8), call.before[each]), each
