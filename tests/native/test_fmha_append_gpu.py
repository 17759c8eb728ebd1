"""Appending to a cache on GPUs: cases and checks of the CPU kernels, in the emulation of the CUDA form and, some of
them, in the emulator of AMD instructions.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from amd_config import missing_tools
from fmha_gpu_case import AmdKernels, GpuFmhaKernel, HostKernels
from test_fmha_append_cpu import CASES as CPU_CASES
from test_fmha_append_cpu import Append, Call, check

EMULATED = {"copied": "gfx90a", "half": "gfx1100", "paged": "gfx942", "vectorized_fp8": "gfx1201", "varlen": "gfx950"}


def kernel_of(name: str, arch: str = "") -> tuple[GpuFmhaKernel, Append]:
    kernel, what = CPU_CASES[name]
    values = {field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel)}
    return GpuFmhaKernel(**{**values, "block": (64, 64)}, arch=arch), what


def run(kernels: HostKernels | AmdKernels, kernel: GpuFmhaKernel, what: Append, rng: np.random.Generator,
        status: int = 0) -> None:  # fmt: skip
    call = Call(kernel, what, rng)
    call.expected = {each: np.array(view) for each, view in call.caches.items()}
    call.outputs = [getattr(call.args, name).ptr for name in ("k", "v", "o")] + [call.args.len_k]
    kernels.launch(kernel, call, int(rng.integers(1, 100)))
    check(call, status)


@pytest.fixture(scope="session")
def appending(build_folder: Path) -> HostKernels:
    return HostKernels(build_folder, [kernel_of(name)[0] for name in CPU_CASES], each=13)


@pytest.mark.parametrize("name", CPU_CASES)
def test_rows_are_appended(appending: HostKernels, name: str, rng: np.random.Generator) -> None:
    run(appending, *kernel_of(name), rng)


def test_rows_without_room_are_dropped(appending: HostKernels, rng: np.random.Generator) -> None:
    kernel, what = kernel_of("paged")
    run(appending, kernel, dataclasses.replace(what, before=(0, 39, 17)), rng, 8 | 16)


@pytest.mark.parametrize("name", EMULATED)
@pytest.mark.extended
def test_rows_are_appended_on_amd(build_folder: Path, name: str, rng: np.random.Generator) -> None:
    if missing := missing_tools(build_folder):
        pytest.skip(f"needs {missing}")
    kernel, what = kernel_of(name, EMULATED[name])
    kernels = AmdKernels(build_folder, [kernel])
    run(kernels, kernel, what, rng)
    built, symbol = kernels.built(kernel)
    assert built.resources(symbol).scratch_bytes == 0
