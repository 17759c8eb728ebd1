"""Attention kernels for CPUs on every level that this machine runs, against float64, between guard pages: every feature
alone and with others, odd sizes, NaN wherever nothing may be read.

Values are drawn anew in every run; the seed is shown when a test fails.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fmha_native_case import FmhaCall, FmhaKernel, FmhaShape
from native_harness import LEVELS, Library, Runtime, missing_features

from tilewright_fmha.masks import Mask

BEST = next((name for name in reversed(LEVELS) if not missing_features(name)), "")
PLAIN = FmhaKernel()
BF16 = PLAIN.replace(q="bf16", kv="bf16", o="bf16", register=(6, 32, 2))
FP16 = PLAIN.replace(q="fp16", kv="fp16", o="fp16")
FP8 = PLAIN.replace(q="fp8", kv="fp8", o="fp16", register=(6, 32, 2))
SCORES = PLAIN.replace(mask="window", token_sinks=True, bias="elementwise", softcap=True, dropout=True, randval=True)
DROPPED = {"drop_below": 77}
LENGTHS = FmhaShape(batch=5, seq=(70, 130), lens_q=(17, 0, 70, 1, 3), lens_k=(65, 9, 130, 1, 0))
CAUSAL, BOTTOM = Mask(-1, 0), Mask(-1, 0, True)

# On every level: each type, and everything that works on scores.
EVERYWHERE: dict[str, FmhaKernel] = {
    "plain": PLAIN,
    "bf16": BF16,
    "fp16": FP16,
    "scores": SCORES,
    "scores_bf16": SCORES.replace(q="bf16", kv="bf16", o="fp32", register=(4, 16, 2), varlen=True, bias="alibi"),
}
FEATURES: dict[str, tuple[FmhaKernel, FmhaShape]] = {
    "causal": (PLAIN.replace(mask="causal"), FmhaShape(seq=(127, 200), mask=CAUSAL, heads=(3, 1))),
    "no_lse": (BF16.replace(lse=False), FmhaShape(seq=(9, 70))),
    "wide_tiles": (PLAIN.replace(register=(12, 16, 1), block=(12, 32)), FmhaShape(seq=(29, 70))),
    "hdim_192x128": (BF16.replace(hdim=(192, 128), register=(6, 64, 2)), FmhaShape(seq=(30, 70), hdim=(192, 128))),
    "hdim_256": (PLAIN.replace(hdim=(256, 256), register=(6, 64, 1)), FmhaShape(seq=(5, 65), hdim=(256, 248))),
    "hdim_72": (BF16.replace(hdim=(80, 80), register=(6, 64, 2)), FmhaShape(seq=(33, 65), hdim=(72, 72))),
    "negative_scale": (PLAIN.replace(mask="causal"), FmhaShape(seq=(20, 70), scale=-0.3, mask=BOTTOM)),
    "lengths": (PLAIN, LENGTHS),
    "lengths_causal": (BF16.replace(mask="causal"), LENGTHS.replace(mask=BOTTOM, layout="bshd")),
    "cache_index": (PLAIN, FmhaShape(batch=3, cache_items=5, lens_k=(65, 1, 30))),
    "varlen": (PLAIN.replace(varlen=True), LENGTHS),
    "varlen_causal": (BF16.replace(varlen=True, mask="causal"), LENGTHS.replace(mask=BOTTOM, heads=(4, 2))),
    "varlen_rooms": (FP16.replace(varlen=True), LENGTHS.replace(room=(2, 3), layout="bshd")),
    "skip_min": (PLAIN.replace(skip_min=True), LENGTHS.replace(min_q=4)),
    "varlen_skip_min": (BF16.replace(varlen=True, skip_min=True), LENGTHS.replace(min_q=4)),
    "v_columns": (PLAIN.replace(v_col=True), FmhaShape(seq=(17, 70), layout="bshd")),
    "v_columns_bf16": (BF16.replace(v_col=True), FmhaShape(seq=(17, 70), hdim=(64, 40))),
    "bias": (PLAIN.replace(bias="elementwise"), FmhaShape(seq=(17, 70))),
    "bias_bf16": (BF16.replace(bias="elementwise", bias_type="bf16"), FmhaShape(bias_axes=(False, True, False, True))),
    "bias_rows": (FP16.replace(bias="elementwise", bias_type="fp16"), FmhaShape(bias_axes=(True, False, True, False))),
    "bias_varlen": (PLAIN.replace(bias="elementwise", varlen=True), LENGTHS),
    "alibi": (PLAIN.replace(bias="alibi"), FmhaShape(seq=(17, 70), heads=(4, 2), mask=Mask(bottom_right=True))),
    "alibi_items": (BF16.replace(bias="alibi", mask="causal"), FmhaShape(slopes_by_item=True, mask=CAUSAL)),
    "softcap": (PLAIN.replace(softcap=True), FmhaShape(softcap=1.5)),
    "dropout": (PLAIN.replace(dropout=True, randval=True), FmhaShape(seq=(17, 200), heads=(4, 2), **DROPPED)),
    "dropout_rng": (BF16.replace(dropout=True), FmhaShape(seq=(30, 70), rng=True, drop_below=1)),
    "dropout_varlen": (PLAIN.replace(dropout=True, randval=True, varlen=True), LENGTHS.replace(**DROPPED)),
    "dropout_lengths": (PLAIN.replace(dropout=True, randval=True, skip_min=True), LENGTHS.replace(min_q=2, **DROPPED)),
    "learned_sinks": (PLAIN.replace(learned_sinks=True), LENGTHS),
    "sinks_causal": (BF16.replace(learned_sinks=True, mask="causal"), FmhaShape(mask=Mask(-1, 0), heads=(6, 2))),
    "fp8_pertensor": (FP8.replace(qscale="pertensor"), FmhaShape(heads=(4, 2))),
    "fp8_plain": (FP8.replace(o="bf16"), FmhaShape(layout="bshd")),
    "fp8_blocks": (FP8.replace(qscale="blockscale", o="fp32"), FmhaShape(seq=(70, 130), blocks=(32, 48))),
    "fp8_mixed": (FP16.replace(kv="fp8", qscale="pertensor"), FmhaShape(seq=(9, 70))),
    "fp8_mixed_bf16": (BF16.replace(kv="fp8", qscale="blockscale"), FmhaShape(seq=(9, 130), blocks=(4, 64))),
}


@pytest.fixture(scope="session")
def everywhere(build_folder: Path, level: str) -> Library:
    return Library(build_folder, list(EVERYWHERE.values()), level, header="fmha_forward.hpp")


@pytest.fixture(scope="session")
def features(build_folder: Path) -> Library:
    return Library(build_folder, [kernel for kernel, _ in FEATURES.values()], BEST, header="fmha_forward.hpp")


def run(library: Library, runtime: Runtime, kernel: FmhaKernel, shape: FmhaShape, rng: np.random.Generator) -> FmhaCall:
    call = FmhaCall(kernel, shape, rng, at_end=bool(rng.integers(2)))
    call.launch(library, runtime, int(rng.integers(1, 3)))
    call.check()
    return call


@pytest.mark.parametrize("name", ["plain", "bf16", "fp16"])
def test_sizes(everywhere: Library, runtime: Runtime, name: str, rng: np.random.Generator) -> None:
    for seq in ((1, 1), (3, 65), (127, 17), (33, 200)):
        for hdim in ((64, 64), (40, 64), (64, 40), (8, 24)):
            shape = FmhaShape(batch=1, seq=seq, hdim=hdim, layout=str(rng.choice(["bhsd", "bshd"])))
            run(everywhere, runtime, EVERYWHERE[name], shape, rng)


def test_scores(everywhere: Library, runtime: Runtime, rng: np.random.Generator) -> None:
    for kernel in ("scores", "scores_bf16"):
        shape = LENGTHS.replace(softcap=2.0, heads=(4, 2), mask=Mask(40, 9, True, 3), **DROPPED)
        run(everywhere, runtime, EVERYWHERE[kernel], shape, rng)


@pytest.mark.parametrize("name", FEATURES)
def test_features(features: Library, runtime: Runtime, name: str, rng: np.random.Generator) -> None:
    run(features, runtime, *FEATURES[name], rng)


@pytest.mark.parametrize("heads", [(2, 2), (5, 1)])
@pytest.mark.parametrize("seq", [(1, 65), (64, 17), (130, 200)])
def test_windows(everywhere: Library, runtime: Runtime, seq: tuple[int, int], heads: tuple[int, int],
                 rng: np.random.Generator) -> None:  # fmt: skip
    kernel = EVERYWHERE["scores"]
    for left, right, sink in ((0, 0, 0), (5, 0, 3), (70, 9, 0), (-1, 20, 0), (40, -1, 70), (3, -1, 0)):
        mask = Mask(left, right, bool(rng.integers(2)), sink)
        run(everywhere, runtime, kernel, FmhaShape(batch=1, seq=seq, heads=heads, mask=mask, softcap=3.0), rng)
