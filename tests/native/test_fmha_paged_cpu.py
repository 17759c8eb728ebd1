"""Attention over caches in pages: both tables, both layouts, pages of any size, and tables that are wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fmha_native_args import FmhaKernel, FmhaShape
from fmha_native_case import FmhaCall
from grouping import wanted
from native_harness import LEVELS, Library, Runtime, missing_features

from tilewright_fmha.problem.masks import Mask

BEST = next((name for name in reversed(LEVELS) if not missing_features(name)), "")
PLAIN = FmhaKernel(family="paged", paged=True)
BF16 = PLAIN.replace(q="bf16", kv="bf16", o="bf16", register=(6, 32, 2))
LENGTHS = FmhaShape(batch=4, seq=(9, 200), lens_q=(7, 9, 1, 3), lens_k=(165, 200, 1, 0), heads=(4, 2))
PREFILL = {"family": "prefill", "varlen": True}

KERNELS: dict[str, FmhaKernel] = {
    "vllm": PLAIN,
    "sglang": BF16.replace(kv_lookup="sglang"),
    "sglang_fixed": PLAIN.replace(kv_lookup="sglang", page_size=8),
    "vectorized": PLAIN.replace(kv_layout="vectorized"),
    "vectorized_bf16": BF16.replace(kv_layout="vectorized", kv_lookup="sglang"),
    "prefill": BF16.replace(**PREFILL, mask="causal"),
    "prefill_vectorized": PLAIN.replace(**PREFILL, kv_layout="vectorized", mask="window", bias="alibi", softcap=True),
    "prefill_fp8": BF16.replace(**PREFILL, kv="fp8", qscale="kv_blockscale", kv_layout="vectorized"),
    "mixed": PLAIN.replace(q="fp16", kv="fp8", o="fp16", qscale="pertensor", learned_sinks=True),
}


@pytest.fixture(scope="module")
def library(build_folder: Path, request: pytest.FixtureRequest) -> Library:
    first = wanted(request, KERNELS)
    return Library(build_folder, list(KERNELS.values()), BEST, header="fmha/forward.hpp", first=first)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.some(4)
@pytest.mark.extended
def test_pages(library: Library, runtime: Runtime, name: str, rng: np.random.Generator) -> None:
    kernel = KERNELS[name]
    sizes = (16, 64) if kernel.kv_layout == "vectorized" else (1, 2, 16, 128)
    for page in (kernel.page_size,) if kernel.page_size else sizes:
        shape = LENGTHS.replace(page=page, softcap=2.0)
        if kernel.mask != "no":
            shape = shape.replace(mask=Mask(-1, 0, True) if kernel.mask == "causal" else Mask(30, 4, True, 2))
        call = FmhaCall(kernel, shape, rng, at_end=bool(rng.integers(2)))
        call.launch(library, runtime, int(rng.integers(1, 3)))
        call.check()


@pytest.mark.parametrize("name", ["vllm", "sglang", "vectorized"])
def test_absent_pages_hold_nothing(library: Library, runtime: Runtime, name: str, rng: np.random.Generator) -> None:
    """Page numbers outside the cache: their columns are masked, and the status names the item."""
    kernel = KERNELS[name]
    call = FmhaCall(kernel, LENGTHS.replace(page=16), rng)
    table = call.array("block_table")
    for slot, number in ((2, call.args.num_pages), (5, -1), (6, 1 << 30), (7, -(1 << 30))):
        at = call.args.table_stride if kernel.kv_lookup == "vllm" else int(call.array("page_starts")[1])
        table[at + slot] = number
        call.present[1][16 * slot : 16 * slot + 16] = False
    call.launch(library, runtime, 2)
    call.check(status=2)
    assert call.status[1] == 1


def test_lengths_beyond_the_table_are_cut(library: Library, runtime: Runtime, rng: np.random.Generator) -> None:
    call = FmhaCall(PLAIN, LENGTHS.replace(page=16, lens_k=(165, 200, 1, 30)), rng)
    call.array("len_k")[1] = 100000
    call.array("len_k")[3] = -5
    call.lens_k[3] = 0
    call.k[3], call.v[3], call.present[3] = call.k[3][:, :0], call.v[3][:, :0], call.present[3][:0]
    call.launch(library, runtime, 2)
    call.check(status=1)
    assert list(call.status[1:]) == [1, 100000, 0]
