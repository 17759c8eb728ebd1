"""Kernels of attention for the matrix units of gfx942 and gfx950 alone (gpu/amd/fmha/), in the emulator of their
instructions, against float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amd_config import missing_tools
from fmha_gpu_case import AmdKernels, GpuFmhaCall, GpuFmhaKernel
from fmha_native_args import FmhaShape
from grouping import wanted
from native_harness import Guarded
from test_fmha_backward_gpu import Gradients

from tilewright_fmha.problem.masks import Mask

PLAIN = GpuFmhaKernel(
    arch="gfx942", pipeline="v3", q="bf16", kv="bf16", o="bf16", register=(1, 1, 2), hdim=(128, 128), block=(256, 64),
    waves=8, warp=(32, 32, 16), lse=True,
)  # fmt: skip
CDNA4 = PLAIN.replace(arch="gfx950")
SMALL = {"hdim": (64, 64), "block": (256, 128)}
ONE = FmhaShape(batch=1, seq=(37, 200), hdim=(128, 128), heads=(2, 1))
TWO = FmhaShape(batch=1, seq=(290, 321), hdim=(128, 128), heads=(1, 1), mask=Mask(-1, 0, True), layout="bshd")
LENGTHS = FmhaShape(batch=3, seq=(40, 270), hdim=(128, 128), heads=(2, 1), lens_q=(33, 0, 7), lens_k=(257, 9, 64))
SIXTY_FOUR = FmhaShape(batch=2, seq=(50, 390), hdim=(64, 64), heads=(1, 1))
CASES = {
    "gfx942": (PLAIN, ONE),
    "gfx942_causal": (PLAIN.replace(mask="causal"), TWO),
    "gfx942_varlen": (PLAIN.replace(mask="causal", varlen=True), LENGTHS.replace(mask=Mask(-1, 3, True))),
    # Maxima grow by more than 2^8 from block to block.
    "gfx942_peaks": (PLAIN, ONE.replace(scale=1.5)),
    "gfx950_peaks": (CDNA4.replace(mask="causal"), ONE.replace(seq=(37, 300), scale=1.5, mask=Mask(-1, 0, True))),
    "gfx942_negative": (PLAIN, ONE.replace(seq=(5, 130), scale=-0.1)),
    "gfx942_fp16": (PLAIN.replace(q="fp16", kv="fp16", o="fp16", **SMALL), SIXTY_FOUR),
    "gfx950": (CDNA4, LENGTHS),
    "gfx950_causal": (CDNA4.replace(mask="causal"), TWO.replace(seq=(270, 70))),
    "gfx950_fp16": (CDNA4.replace(q="fp16", kv="fp16", o="fp16", **SMALL), SIXTY_FOUR),
}  # fmt: skip


GRADIENT = PLAIN.replace(family="dq_dk_dv", block=(32, 128), waves=4, deterministic=False)
GRADIENTS = {
    "gfx942": (GRADIENT, FmhaShape(batch=1, seq=(70, 150), hdim=(128, 128), heads=(4, 2))),
    "gfx942_causal": (GRADIENT.replace(mask="causal"), TWO.replace(seq=(90, 200))),
    "gfx942_window": (
        GRADIENT.replace(mask="window", varlen=True, deterministic=True),
        LENGTHS.replace(mask=Mask(60, 3, True), splits=2),
    ),
    "gfx942_sinks": (
        GRADIENT.replace(mask="window"),
        FmhaShape(batch=1, seq=(150, 300), hdim=(128, 128), heads=(1, 1), mask=Mask(60, 0, True, 140)),
    ),
    "gfx950": (GRADIENT.replace(arch="gfx950", deterministic=True), LENGTHS.replace(splits=2)),
    # Blocks that the mask cuts and others, one kind after the other, of one head and the next.
    "gfx950_heads": (
        GRADIENT.replace(arch="gfx950", mask="causal", deterministic=True),
        FmhaShape(batch=1, seq=(100, 300), hdim=(128, 128), heads=(4, 2), mask=Mask(-1, 0, True), splits=2),
    ),
    # Sums below exp(-89): P of a key that does not exist is infinite.
    "gfx950_one_key": (
        GRADIENT.replace(arch="gfx950"),
        FmhaShape(batch=1, seq=(37, 1), hdim=(128, 128), heads=(1, 1), scale=12.0),
    ),
    "gfx950_causal": (GRADIENT.replace(arch="gfx950", mask="causal"), TWO.replace(seq=(130, 70))),
    "gfx950_fp16": (
        GRADIENT.replace(arch="gfx950", q="fp16", kv="fp16", o="fp16"),
        FmhaShape(batch=2, seq=(33, 129), hdim=(128, 128), heads=(1, 1), layout="bshd"),
    ),
}  # fmt: skip


class Aligned:
    """Rows are multiples of 16 bytes apart, and operands begin at such."""

    def place(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        memory = Guarded(values.nbytes, 16, self.at_end)
        array = memory.array(values.dtype, values.size)
        array[:] = values.reshape(-1)
        self.keep.append(memory)
        return array

    def tensor(
        self, name: str, dtype: str, sizes: tuple[int, ...], order: tuple[int, ...], gap: int = 8
    ) -> np.ndarray[Any, Any]:
        return super().tensor(name, dtype, sizes, order, gap)  # type: ignore[misc, no-any-return]


class AlignedCall(Aligned, GpuFmhaCall): ...


class AlignedGradients(Aligned, Gradients): ...


@pytest.fixture(scope="module")
def kernels(build_folder: Path, request: pytest.FixtureRequest) -> AmdKernels:
    if missing := missing_tools(build_folder):
        pytest.skip(f"needs {missing}")
    return AmdKernels(
        build_folder,
        [kernel for kernel, _ in (*CASES.values(), *GRADIENTS.values())],
        each=2,
        first=[kernel for kernel, _ in (*wanted(request, CASES), *wanted(request, GRADIENTS))],
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(2)
def test_attention(kernels: AmdKernels, name: str, rng: np.random.Generator) -> None:
    kernel, shape = CASES[name]
    call = AlignedCall(kernel, shape, rng, at_end=bool(rng.integers(2)))
    call.run(kernels)
    call.check()


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.some(1)
def test_gradients(kernels: AmdKernels, name: str, rng: np.random.Generator) -> None:
    call = AlignedGradients(*GRADIENTS[name], rng)
    call.run(kernels)
    call.check_gradients()


@pytest.mark.parametrize("waves", [1, -1, 5])
@pytest.mark.parametrize("name", ["gfx942", "gfx950_causal"])
@pytest.mark.some(1)
def test_waves_may_come_in_any_order_and_see_stores_late(
    kernels: AmdKernels, name: str, waves: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "waves", waves)
    call = AlignedCall(*CASES[name], rng)
    call.run(kernels)
    call.check()
    gradients = AlignedGradients(*GRADIENTS[name], rng)
    gradients.run(kernels)
    gradients.check_gradients()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(2)
def test_kernels_have_no_spills(kernels: AmdKernels, name: str) -> None:
    assert facts_of(kernels, CASES[name][0]) == (0, 0)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.some(2)
def test_gradients_have_no_spills(kernels: AmdKernels, name: str) -> None:
    assert facts_of(kernels, GRADIENTS[name][0]) == (0, 0)


def facts_of(kernels: AmdKernels, kernel: GpuFmhaKernel) -> tuple[int, int]:
    built, symbol = kernels.built(kernel)
    facts = built.resources(symbol)
    return facts.scratch_bytes, facts.vgpr_spills
