"""Attention kernels for GPUs in the CUDA form, on the host's emulation, against float64: every feature, alone and with
others, between guard pages, NaN wherever nothing may be read.

Values are drawn anew in every run; the seed is shown when a test fails.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fmha_gpu_case import GpuFmhaCall, GpuFmhaKernel, HostKernels
from fmha_native_args import FmhaShape
from grouping import wanted

from tilewright_fmha.problem.masks import Mask

PLAIN = GpuFmhaKernel(block=(32, 32), waves=2)
BF16 = PLAIN.replace(q="bf16", kv="bf16", o="bf16", register=(1, 1, 2))
FP16 = PLAIN.replace(q="fp16", kv="fp16", o="fp16", register=(1, 1, 2), pipeline="qr_async", block=(32, 64))
TALL = FP16.replace(block=(64, 64), waves=4)  # its loop begins with a turn that only asks for keys
FP8 = FP16.replace(q="fp8", kv="fp8", pipeline="qr")
DROPPED = {"drop_below": 77}
LENGTHS = FmhaShape(batch=4, seq=(40, 80), heads=(2, 1), lens_q=(17, 0, 40, 1), lens_k=(65, 9, 0, 1))
SPLIT, PAGED = {"family": "split"}, {"family": "paged", "paged": True}
PREFILL = {"family": "prefill", "paged": True, "varlen": True}
PAGES = LENGTHS.replace(page=16, lens_q=(17, 3, 40, 1))
ALL_SCORES = {"token_sinks": True, "mask": "window", "softcap": True, "dropout": True, "randval": True}
WINDOW = Mask(20, 4, True, 3)

CASES: dict[str, tuple[GpuFmhaKernel, FmhaShape]] = {
    "fp32": (PLAIN, FmhaShape(seq=(33, 65), hdim=(40, 64), heads=(4, 2), layout="bshd")),
    "bf16": (BF16.replace(hdim=(64, 32)), FmhaShape(seq=(33, 65), hdim=(64, 24))),
    "fp16": (FP16.replace(hdim=(128, 64)), FmhaShape(seq=(17, 130), hdim=(72, 64))),
    "columns": (BF16, FmhaShape(seq=(17, 70), layout="bhds")),
    "columns_fp32": (PLAIN, FmhaShape(seq=(17, 70), layout="bhds")),
    "one": (BF16, FmhaShape(batch=1, seq=(1, 1))),
    "causal": (FP16.replace(mask="causal"), FmhaShape(seq=(70, 100), mask=Mask(-1, 0), batch=1)),
    "bottom_right": (PLAIN.replace(mask="causal"), LENGTHS.replace(mask=Mask(-1, 0, True))),
    "window": (BF16.replace(mask="window"), FmhaShape(batch=1, seq=(70, 130), mask=Mask(20, 4))),
    "window_sinks": (FP16.replace(mask="window", token_sinks=True), FmhaShape(batch=1, seq=(33, 200), mask=WINDOW)),
    "tall": (TALL.replace(mask="window", token_sinks=True), FmhaShape(batch=1, seq=(70, 200), mask=WINDOW)),
    "lengths": (FP16, LENGTHS),
    "cache_index": (BF16, FmhaShape(batch=3, seq=(9, 65), cache_items=5, lens_k=(65, 1, 30))),
    "varlen": (FP16.replace(varlen=True, mask="causal"), LENGTHS.replace(mask=Mask(-1, 0, True))),
    "varlen_rooms": (PLAIN.replace(varlen=True), LENGTHS.replace(room=(2, 3), layout="bshd")),
    "skip_min": (BF16.replace(varlen=True, skip_min=True), LENGTHS.replace(min_q=4)),
    "no_lse": (BF16.replace(lse=False), FmhaShape(seq=(9, 30))),
    "v_columns": (BF16.replace(v_col=True), FmhaShape(seq=(17, 70), hdim=(64, 40))),
    "v_columns_varlen": (PLAIN.replace(v_col=True, varlen=True), LENGTHS),
    "bias": (PLAIN.replace(bias="elementwise"), FmhaShape(seq=(17, 70))),
    "bias_rows": (BF16.replace(bias="elementwise", bias_type="bf16"), FmhaShape(bias_axes=(False, True, True, False))),
    "bias_varlen": (FP16.replace(bias="elementwise", bias_type="fp16", varlen=True, softcap=True), LENGTHS.replace(
        bias_axes=(True, False, False, True), softcap=2.0)),
    "alibi": (BF16.replace(bias="alibi"), FmhaShape(seq=(17, 70), heads=(4, 2), mask=Mask(bottom_right=True))),
    "softcap": (PLAIN.replace(softcap=True), FmhaShape(softcap=1.5)),
    "large_softcap": (PLAIN.replace(softcap=True), FmhaShape(softcap=3e5)),
    "dropout": (PLAIN.replace(dropout=True, randval=True), FmhaShape(seq=(17, 140), **DROPPED)),
    "dropout_rng": (FP16.replace(dropout=True), FmhaShape(seq=(30, 130), rng=True, drop_below=100)),
    "dropout_varlen": (BF16.replace(dropout=True, randval=True, varlen=True), LENGTHS.replace(**DROPPED)),
    "learned_sinks": (PLAIN.replace(learned_sinks=True), LENGTHS),
    "scores": (
        BF16.replace(**ALL_SCORES, learned_sinks=True, bias="elementwise", skip_min=True),
        LENGTHS.replace(mask=WINDOW, softcap=2.0, min_q=2, **DROPPED),
    ),
    "fp8": (FP8.replace(qscale="pertensor", mask="causal"), FmhaShape(seq=(40, 70), heads=(4, 2), mask=Mask(-1, 0))),
    "fp8_plain": (FP8.replace(o="fp32", v_col=True), FmhaShape(layout="bshd")),
    "fp8_blocks": (FP8.replace(qscale="blockscale", o="bf16"), FmhaShape(seq=(40, 130), blocks=(32, 48))),
    "fp8_mixed": (BF16.replace(kv="fp8", qscale="pertensor"), FmhaShape(seq=(9, 70))),
    "decode": (BF16.replace(**SPLIT, pack_gqa=True), FmhaShape(seq=(1, 300), heads=(8, 2), splits=3)),
    "packed": (FP16.replace(pack_gqa=True, mask="causal", bias="alibi"), FmhaShape(seq=(13, 70), heads=(6, 2),
        mask=Mask(-1, 0, True))),
    "split": (FP16.replace(**SPLIT, varlen=True, learned_sinks=True), LENGTHS.replace(splits=3)),
    "split_scores": (
        PLAIN.replace(**SPLIT, **ALL_SCORES, skip_min=True),
        LENGTHS.replace(splits=2, mask=WINDOW, softcap=2.0, min_q=2, **DROPPED),
    ),
    "vllm": (FP16.replace(**PAGED), PAGES),
    "sglang": (PLAIN.replace(**PAGED, kv_lookup="sglang"), PAGES.replace(page=1)),
    "vectorized": (BF16.replace(**PAGED, kv_layout="vectorized", page_size=16), PAGES),
    "prefill": (
        FP16.replace(**PREFILL, mask="causal", kv_lookup="sglang"), PAGES.replace(mask=Mask(-1, 0, True), page=64)
    ),
    "prefill_fp8": (
        FP8.replace(**PREFILL, qscale="kv_blockscale", kv_layout="vectorized", o="bf16", pipeline="qr_async"), PAGES
    ),
    "prefill_tall": (TALL.replace(**PREFILL, mask="causal"), PAGES.replace(mask=Mask(-1, 0, True))),
    "prefill_fp8_tall": (
        FP8.replace(**PREFILL, qscale="kv_blockscale", o="bf16", pipeline="qr_async", block=(64, 64), waves=4), PAGES
    ),
    "split_pages": (BF16.replace(**SPLIT, paged=True, pack_gqa=True), PAGES.replace(splits=2, heads=(4, 2), page=8)),
}  # fmt: skip


@pytest.fixture(scope="module")
def kernels(build_folder: Path, request: pytest.FixtureRequest) -> HostKernels:
    every, first = ([kernel for kernel, _ in cases] for cases in (CASES.values(), wanted(request, CASES)))
    return HostKernels(build_folder, every, first=first)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(2)
def test_features(kernels: HostKernels, name: str, rng: np.random.Generator) -> None:
    kernel, shape = CASES[name]
    call = GpuFmhaCall(kernel, shape, rng, at_end=bool(rng.integers(2)))
    call.run(kernels, int(rng.integers(1, 100)))
    call.check()


@pytest.mark.parametrize("name", ["vllm", "sglang", "vectorized"])
def test_absent_pages_hold_nothing(kernels: HostKernels, name: str, rng: np.random.Generator) -> None:
    """Page numbers outside the cache: their columns are masked, and the status names the item."""
    kernel, shape = CASES[name]
    call = GpuFmhaCall(kernel, shape, rng)
    table, page = call.array("block_table"), shape.page
    at = 0 if kernel.kv_lookup == "vllm" else int(call.array("page_starts")[0])
    for slot, number in ((1, call.args.num_pages), (3, -1), (4, 1 << 30)):
        table[at + slot] = number
        call.present[0][page * slot : page * slot + page] = False
    call.run(kernels)
    call.check(status=2)
    assert call.status[1] == 0


def test_lengths_beyond_their_room_are_cut(kernels: HostKernels, rng: np.random.Generator) -> None:
    call = GpuFmhaCall(*CASES["lengths"], rng)
    call.array("len_k")[2] = -5
    call.run(kernels)
    call.check(status=1)
    assert list(call.status[1:3]) == [2, -5]
