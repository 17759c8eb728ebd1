"""Convolutions whose steps keep within a tap, on AMD GPUs with waves of 64: in the emulator, against float64 (int8:
exactly), as ``test_conv_amd.py`` does for the others.

Channels fill whole steps; all else is odd: pixels, channels of the result, strides, dilations, edges, filters of one to
32 taps. Tiles of one slice have the loop with the barrier at a step's beginning; the others that of compv4.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from amd_config import missing_tools
from conv_gpu_case import ConvCase
from conv_gpu_config import ConvGpuConfig
from conv_tap_cases import ARCHS, CASES, config_of
from grouping import wanted
from sampling import partly

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from conv_amd_emulation import AmdConvKernels

TURNS = {f"{name}-{arch}": (name, arch) for name in CASES for arch in ARCHS if config_of(name, arch)}


def shown(turn: str) -> set[Hashable]:
    name, arch = TURNS[turn]
    return {name, (CASES[name][0].direction, arch)}


@pytest.fixture(scope="module")
def kernels(build_folder: Path, request: pytest.FixtureRequest) -> dict[str, AmdConvKernels]:
    if missing := missing_tools(build_folder):
        pytest.skip(f"needs {missing}")
    from conv_amd_emulation import AmdConvKernels

    def of(turns: Any, arch: str) -> list[ConvGpuConfig]:
        return [config for name, own in turns if own == arch and (config := config_of(name, arch))]

    first = wanted(request, TURNS)
    return {arch: AmdConvKernels(build_folder, arch, of(TURNS.values(), arch), of(first, arch)) for arch in ARCHS}


@pytest.mark.parametrize("turn", partly(TURNS, shown))
@pytest.mark.some(2)
def test_steps_within_taps_are_right(kernels: dict[str, AmdConvKernels], turn: str, rng: np.random.Generator) -> None:
    name, arch = TURNS[turn]
    config = config_of(name, arch)
    assert config is not None
    built, symbol = kernels[arch].built(config)
    facts = built.resources(symbol)
    assert facts.scratch_bytes == facts.vgpr_spills == facts.sgpr_spills == 0
    for more in CASES[name][1]:
        case = ConvCase(config, rng=rng, at_end=bool(rng.integers(0, 2)), **more)
        for operand in (case.x, case.y, case.w):  # gfx90a takes subnormal fp16 for zero
            if operand is not case.result and operand.dtype == np.float16:
                operand[np.abs(operand) < 2.0**-14] = 0
        kernels[arch].launch(case)
        case.check()
