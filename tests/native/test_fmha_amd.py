"""Attention kernels for AMD GPUs, in the emulator of their instructions, against float64. What all devices share is
tested in the CUDA form (test_fmha_gpu.py): here every arch has its atoms, and features take turns.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from amd_config import ARCHS, WAVE, missing_tools
from fmha_gpu_case import AmdKernels, GpuFmhaCall, GpuFmhaKernel
from fmha_native_args import FmhaShape
from grouping import wanted

from tilewright_fmha.problem.masks import Mask

LENGTHS = FmhaShape(batch=3, seq=(20, 70), heads=(2, 1), lens_q=(17, 0, 3), lens_k=(65, 9, 1))
SMALL = FmhaShape(batch=1, seq=(33, 65), hdim=(40, 64), heads=(2, 1), layout="bshd")
WINDOW = Mask(20, 4, True, 3)
PAGED = {"family": "paged", "paged": True}
SCORES = {"mask": "window", "token_sinks": True, "softcap": True, "dropout": True, "randval": True}


def cases(arch: str) -> dict[str, tuple[GpuFmhaKernel, FmhaShape]]:
    wide = WAVE[arch] == 64
    plain = GpuFmhaKernel(arch=arch, block=(32, 32), waves=2, warp=(16, 16, 4) if wide else (16, 8, 4))
    half = {"register": (1, 1, 2), "warp": (16, 16, 16)}
    bf16 = plain.replace(q="bf16", kv="bf16", o="bf16", **half)
    fp16 = plain.replace(q="fp16", kv="fp16", o="fp16", **half, pipeline="qr_async")
    large = {"block": (64, 32), "warp": (32, 32, 8)} if wide else {"block": (64, 32), "waves": 4}
    fp8 = fp16.replace(q="fp8", kv="fp8", pipeline="qr")
    split = bf16.replace(family="split", pack_gqa=True)
    return {
        "fp32": (plain, SMALL),
        "bf16": (bf16.replace(**large), SMALL.replace(seq=(70, 33))),
        "fp16": (fp16, SMALL),
        "varlen": (
            fp16.replace(varlen=True, mask="causal", learned_sinks=True), LENGTHS.replace(mask=Mask(-1, 0, True))
        ),
        "scores": (plain.replace(**SCORES), LENGTHS.replace(mask=WINDOW, softcap=2.0, drop_below=77)),
        "scores_bf16": (
            bf16.replace(**SCORES, bias="elementwise"), LENGTHS.replace(mask=WINDOW, softcap=2.0, drop_below=77)
        ),
        "alibi": (fp16.replace(bias="alibi", v_col=True, skip_min=True), LENGTHS.replace(min_q=4)),
        "fp8": (fp8.replace(qscale="pertensor"), FmhaShape(batch=1, seq=(20, 40), heads=(2, 1))),
        "split": (split, FmhaShape(batch=1, seq=(1, 130), heads=(4, 2), splits=3)),
        "odd_heads": (split, FmhaShape(batch=1, seq=(9, 70), hdim=(37, 51), heads=(4, 2), splits=2)),
        "paged": (bf16.replace(**PAGED, kv_lookup="sglang"), LENGTHS.replace(page=8)),
        "vectorized": (fp16.replace(**PAGED, kv_layout="vectorized", varlen=True), LENGTHS.replace(page=16)),
    }  # fmt: skip


EVERY = ("gfx942",)
"""Archs that have every feature; others have the products."""
PRODUCTS = ("fp32", "bf16", "varlen", "scores_bf16", "odd_heads")
CASES = {
    f"{arch}_{name}": case
    for arch in ARCHS
    for name, case in cases(arch).items()
    if arch in EVERY or name in PRODUCTS or (arch == "gfx90a" and name == "fp8")
}


@pytest.fixture(scope="module")
def kernels(build_folder: Path, request: pytest.FixtureRequest) -> AmdKernels:
    if missing := missing_tools(build_folder):
        pytest.skip(f"needs {missing}")
    return AmdKernels(
        build_folder,
        [kernel for kernel, _ in CASES.values()],
        each=12,
        first=[kernel for kernel, _ in wanted(request, CASES)],
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(6)
@pytest.mark.extended
def test_features(kernels: AmdKernels, name: str, rng: np.random.Generator) -> None:
    kernel, shape = CASES[name]
    call = GpuFmhaCall(kernel, shape, rng, at_end=bool(rng.integers(2)))
    call.run(kernels)
    call.check()


@pytest.mark.parametrize("waves", [1, -1, 5])
@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(("_varlen", "odd_heads", "_split"))])
@pytest.mark.some(1)
def test_waves_may_come_in_any_order_and_see_stores_late(
    kernels: AmdKernels, name: str, waves: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "waves", waves)
    kernel, shape = CASES[name]
    call = GpuFmhaCall(kernel, shape, rng, at_end=bool(rng.integers(2)))
    call.run(kernels)
    call.check()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(3)
def test_kernels_have_no_spills(kernels: AmdKernels, name: str) -> None:
    built, symbol = kernels.built(CASES[name][0])
    facts = built.resources(symbol)
    assert facts.scratch_bytes == facts.vgpr_spills == 0, CASES[name][0]
