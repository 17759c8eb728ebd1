"""Attention whose keys are shared out in parts and combined afterwards, against float64."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from fmha_native_args import FmhaKernel, FmhaShape, combine_of
from fmha_native_case import FmhaCall
from grouping import wanted
from native_harness import LEVELS, Library, Runtime, missing_features

from tilewright_fmha.problem.masks import Mask

BEST = next((name for name in reversed(LEVELS) if not missing_features(name)), "")
PLAIN = FmhaKernel(family="split")
BF16 = PLAIN.replace(q="bf16", kv="bf16", o="bf16", register=(6, 32, 2))
LENGTHS = FmhaShape(batch=5, seq=(9, 330), lens_q=(7, 0, 9, 1, 3), lens_k=(265, 9, 330, 1, 0), splits=3)
DROPPED = {"softcap": 2.0, "drop_below": 77}
SCORES = {"bias": "elementwise", "softcap": True, "dropout": True, "randval": True}

CASES: dict[str, tuple[FmhaKernel, FmhaShape]] = {
    "decode": (PLAIN, FmhaShape(seq=(1, 515), heads=(8, 2), splits=4)),
    "decode_bf16": (BF16, FmhaShape(seq=(1, 515), heads=(4, 4), splits=3)),
    "more_parts_than_blocks": (PLAIN, FmhaShape(seq=(2, 70), heads=(6, 2), splits=7)),
    "one_part": (BF16.replace(mask="causal"), FmhaShape(seq=(65, 130), mask=Mask(-1, 0, True))),
    "many_rows": (PLAIN.replace(mask="causal"), FmhaShape(batch=1, seq=(450, 200), mask=Mask(-1, 0), splits=2)),
    "window": (PLAIN.replace(mask="window"), FmhaShape(seq=(9, 330), mask=Mask(100, 3, True, 5), splits=3)),
    "lengths": (PLAIN.replace(learned_sinks=True), LENGTHS),
    "lengths_skip": (BF16.replace(skip_min=True), LENGTHS.replace(min_q=4)),
    "varlen": (PLAIN.replace(varlen=True, mask="causal"), LENGTHS.replace(mask=Mask(-1, 0, True), heads=(4, 2))),
    "varlen_scores": (BF16.replace(varlen=True, learned_sinks=True, **SCORES), LENGTHS.replace(**DROPPED)),
    "scores": (PLAIN.replace(learned_sinks=True, **SCORES), LENGTHS.replace(**DROPPED)),
    "paged": (PLAIN.replace(paged=True), LENGTHS.replace(page=16, heads=(4, 2))),
    "fp8": (
        PLAIN.replace(q="fp8", kv="fp8", o="bf16", qscale="kv_blockscale", paged=True, register=(4, 32, 2)),
        LENGTHS.replace(page=32),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def library(build_folder: Path, request: pytest.FixtureRequest) -> Library:
    def stages(cases: Iterable[tuple[FmhaKernel, FmhaShape]]) -> list[FmhaKernel]:
        return [stage for kernel, _ in cases for stage in (kernel, combine_of(kernel))]

    every, first = stages(CASES.values()), stages(wanted(request, CASES))
    return Library(build_folder, every, BEST, header="fmha/forward.hpp", first=first)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(1)
def test_parts(library: Library, runtime: Runtime, name: str, rng: np.random.Generator) -> None:
    kernel, shape = CASES[name]
    call = FmhaCall(kernel, shape, rng, at_end=bool(rng.integers(2)))
    call.launch(library, runtime, int(rng.integers(1, 3)))
    call.check()


def test_parts_are_exact_whoever_computes_them(library: Library, runtime: Runtime, rng: np.random.Generator) -> None:
    kernel, shape = CASES["window"]
    call = FmhaCall(kernel, shape, rng)
    call.launch(library, runtime, 1)
    alone = call.o.copy()
    call.launch(library, runtime, 2)
    assert np.array_equal(alone, call.o)
