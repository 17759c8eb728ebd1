"""Convolution kernels for AMD GPUs, executed in the project's emulator, against float64 (int8: exactly).

Kernels take turns on the archs, with the warp tiles of each; every arch runs every direction. Operands end where
allocations end; LDS, registers, outputs and workspace begin poisoned; the emulator refuses races and reads of what has
not arrived. Values are drawn anew in every run; the seed is shown when a test fails.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from amd_config import ARCHS, missing_tools
from conv_gpu_case import ConvCase
from conv_gpu_cases import CASES
from conv_gpu_config import ConvGpuConfig
from grouping import wanted
from sampling import partly

import tilewright_arch

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from conv_amd_emulation import AmdConvKernels

PIPELINES = ("compv3", "compv4", "mem")
EVERYWHERE = ("forward", "data_phases", "weight_two_stages", "depthwise", "groups_weight")
"""Run on all archs; the others on one or two each."""


def turns() -> dict[str, tuple[str, str]]:
    """Case and arch by the test's name."""
    found = {}
    for n, name in enumerate(name for name, (config, _) in CASES.items() if not config.merged):
        some = (ARCHS[n % 5], ARCHS[(n + 2) % 5]) if n % 3 == 0 else (ARCHS[n % 5],)
        for arch in ARCHS if name in EVERYWHERE else some:
            found[f"{name}-{arch}"] = (name, arch)
    return found


def config_of(name: str, arch: str) -> ConvGpuConfig | None:
    """The case's kernel on an arch; None if the arch has no instruction for it."""
    from conv_amd_emulation import for_arch

    config, n = CASES[name][0], list(CASES).index(name)
    if config.is_matrix:
        config = config.replace(pipeline=PIPELINES[n % 3], epilogue=("cshuffle", "default")[n % 2])
    return for_arch(config, arch, n)


TURNS = turns()


def shown(turn: str) -> set[Hashable]:
    """What every run has: each case on one arch at least, each direction on each arch."""
    name, arch = TURNS[turn]
    return {name, (CASES[name][0].direction, arch)}


ORDERED = partly(TURNS, shown)


@pytest.fixture(scope="module")
def kernels(build_folder: Path, request: pytest.FixtureRequest) -> dict[str, AmdConvKernels]:
    if missing := missing_tools(build_folder):
        pytest.skip(f"needs {missing}")
    from conv_amd_emulation import AmdConvKernels

    def of(turns: Iterable[tuple[str, str]], arch: str) -> list[ConvGpuConfig]:
        return [config for name, own in turns if own == arch and (config := config_of(name, arch))]

    first = wanted(request, TURNS)
    return {arch: AmdConvKernels(build_folder, arch, of(TURNS.values(), arch), of(first, arch)) for arch in ARCHS}


@pytest.mark.parametrize("turn", ORDERED)
@pytest.mark.some(1)
def test_convolutions_are_right(kernels: dict[str, AmdConvKernels], turn: str, rng: np.random.Generator) -> None:
    name, arch = TURNS[turn]
    config = config_of(name, arch)
    if config is None:
        pytest.skip(f"{arch} has no matrix instruction for {CASES[name][0].a}")
    built, symbol = kernels[arch].built(config)
    facts = built.resources(symbol)
    assert facts.scratch_bytes == facts.vgpr_spills == facts.sgpr_spills == 0
    assert facts.vgprs <= tilewright_arch.load(arch).max_vgprs
    for more in CASES[name][1][:2]:
        case = ConvCase(config, rng=rng, at_end=bool(rng.integers(0, 2)), **more)
        for operand in (case.x, case.y, case.w):  # gfx90a takes subnormal fp16 for zero
            if operand is not case.result and operand.dtype == np.float16:
                operand[np.abs(operand) < 2.0**-14] = 0
        kernels[arch].launch(case)
        case.check()
