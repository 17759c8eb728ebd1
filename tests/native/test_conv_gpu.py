"""Whole convolution kernels for GPUs on the CPU, thread by thread, against float64 (int8: exactly), between guards.

The kernels are the ones that NVRTC compiles; only the platform under them differs. Values and the order of workgroups
are drawn anew in every run; the seed is shown when a test fails.
"""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
from conv_gpu_case import ConvCase
from conv_gpu_cases import CASES
from conv_gpu_emulation import ConvEmulator
from grouping import wanted


@pytest.fixture(scope="module")
def emulator(build_folder: Path, request: pytest.FixtureRequest) -> ConvEmulator:
    every, first = (list(map(itemgetter(0), cases)) for cases in (CASES.values(), wanted(request, CASES)))
    return ConvEmulator(build_folder, every, first)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(10)
@pytest.mark.extended
def test_convolutions_are_right(emulator: ConvEmulator, name: str, rng: np.random.Generator) -> None:
    config, settings = CASES[name]
    for more in settings:
        case = ConvCase(config, rng=rng, at_end=bool(rng.integers(0, 2)), **more)
        emulator.launch(case, seed=int(rng.integers(1, 1 << 30)))
        case.check()


@pytest.mark.parametrize("name", [name for name, (_, settings) in CASES.items() if "split_k" in settings[0]])
@pytest.mark.some(3)
def test_slices_add_up_and_never_vary(emulator: ConvEmulator, name: str, rng: np.random.Generator) -> None:
    config, settings = CASES[name]
    case = ConvCase(config, rng=rng, **settings[0])
    results = []
    for _ in range(3):
        emulator.launch(case, seed=int(rng.integers(1, 1 << 30)))
        results.append(case.result.tobytes())
    assert len(set(results)) == 1, "the sum does not depend on who comes last"
    case.check()
