"""The portable kernels of GPUs: in fibers on the CPU as on an NVIDIA GPU, and in the emulator of AMD GPUs."""

from __future__ import annotations

import dataclasses
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gemm_runner import INCLUDE, compiler
from hip_runner import HipRunner
from hip_units import HAVE_HIP, WITHOUT_HIP, toolchain
from libraries import Libraries
from moe_runner import COLUMNS, SQUARES, check, problem_of
from test_gpu_emulated import FLAGS, Emulated

import tilewright_arch
from tilewright_gemm.config.config import GemmConfig
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_moe.codegen import generate
from tilewright_moe.config import MoeConfig, fused_with
from tilewright_moe.problem import MoeProblem

UNITS = 3
"""So few that workgroups have several tiles each."""
COUNTS = ((0, 33, 0, 17, 1), (64, 0, 0, 0, 0), (1, 1, 1, 1, 1), (0, 0, 0, 0, 0), (16, 32, 5, 0, 11))
WRONG = ((60, -3, 9, 9, 9), (2**31 - 1, 2**31 - 1, 1, 1, 1), (0, 0, 0, 0, 65))


class Fibers(Emulated):
    """Builds kernels of CUDA devices for the CPU, and runs plans."""

    def __init__(self, folder: Path) -> None:
        self._units = Libraries(compiler(), [*FLAGS, f"-I{INCLUDE}"], folder)

    def function(self, config: GemmConfig, device: DeviceInfo) -> Any:
        assert isinstance(config, MoeConfig)
        unit = generate(config, device.arch)
        return getattr(self._units.load(unit), unit.entries["main"])


class Emulator(HipRunner):
    """Builds each kernel once."""

    def image(self, config: Any) -> tuple[bytes, str]:
        unit = generate(config, self.arch)
        if unit.text not in self._built:
            with tempfile.TemporaryDirectory() as folder:
                compiled = toolchain().compile(unit, Path(folder), self.arch)
                self._built[unit.text] = compiled.binary.read_bytes(), unit.entries["main"]
        return self._built[unit.text]


@pytest.fixture(scope="module")
def fibers(tmp_path_factory: pytest.TempPathFactory) -> Fibers:
    return Fibers(tmp_path_factory.mktemp("fibers"))


@cache
def hopper() -> DeviceInfo:
    return dataclasses.replace(device_of(tilewright_arch.load("sm_90a")), units=UNITS)


def small(problem: MoeProblem, warp: tuple[int, int, int], **fields: Any) -> MoeConfig:
    """A kernel of small tiles that computes the problem."""
    product = problem.typical
    made = MoeConfig(
        dtype_a=product.dtype_a,
        dtype_c=product.dtype_c.value,
        layout=product.layout,
        tile=(32, 32, 64 // product.dtype_a.bytes),
        wave=(2, 2, 1),
        warp_tile=warp,
        persistent=True,
        stages=3,
        scale_a=product.scale_a,
        scale_b=product.scale_b,
    )
    return made.replace(**fields)


@pytest.mark.parametrize("room", [False, True], ids=["sorted", "room"])
@pytest.mark.parametrize("counts", [*COUNTS, *WRONG], ids=str)
@pytest.mark.some(6)
def test_every_count_is_right_in_fibers(fibers: Fibers, counts: tuple[int, ...], room: bool) -> None:
    problem = problem_of("bf16", 5, 64, 40, 72, room=room, gap=3, alpha=0.5)
    config = small(problem, (16, 8, 16))
    check(problem, config, hopper(), counts, lambda plan, inputs: fibers.run(plan, inputs, hopper()))


@pytest.mark.extended
@pytest.mark.parametrize(("dtype", "warp"), [("fp32", (16, 8, 4)), ("fp16", (16, 8, 16)), ("fp8", (16, 8, 32))])
def test_every_type_is_right_in_fibers(fibers: Fibers, dtype: str, warp: tuple[int, int, int]) -> None:
    problem = problem_of(dtype, 5, 64, 40, 64)
    config = small(problem, warp)
    check(problem, config, hopper(), COUNTS[0], lambda plan, inputs: fibers.run(plan, inputs, hopper()))


@pytest.mark.parametrize(("block", "room"), [(SQUARES, True), (COLUMNS, False)])
@pytest.mark.some(1)
def test_each_block_is_scaled_by_its_own_factor_in_fibers(fibers: Fibers, block: str, room: bool) -> None:
    problem = problem_of("fp8", 5, 64, 140, 260, room=room, scale_block=block, out_dtype="bf16")
    config = small(problem, (16, 8, 32))
    check(problem, config, hopper(), COUNTS[0], lambda plan, inputs: fibers.run(plan, inputs, hopper()))


STEPS: dict[str, dict[str, str]] = {
    "swiglu": {"activation": "swiglu"},
    "fp8": {"out_scale_block": "1x128"},
    "swiglu-fp8": {"activation": "swiglu", "out_scale_block": "1x128"},
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.some(1)
def test_steps_behind_the_sums_are_right_in_fibers(fibers: Fibers, steps: dict[str, str]) -> None:
    problem = problem_of("bf16", 5, 64, 168, 72, gap=3, alpha=0.5, **steps)
    config = fused_with(problem, small(problem, (16, 8, 16)), hopper().arch)
    check(problem, config, hopper(), COUNTS[0], lambda plan, inputs: fibers.run(plan, inputs, hopper()))


def test_blocks_are_scaled_before_and_behind_the_steps_in_fibers(fibers: Fibers) -> None:
    problem = problem_of("fp8", 5, 64, 168, 200, room=True, scale_block=SQUARES, **STEPS["swiglu-fp8"])
    config = fused_with(problem, small(problem, (16, 8, 32)), hopper().arch)
    check(problem, config, hopper(), COUNTS[0], lambda plan, inputs: fibers.run(plan, inputs, hopper()))


def test_more_experts_than_lanes(fibers: Fibers) -> None:
    problem = problem_of("bf16", 70, 100, 40, 32)
    counts = [0] * 30 + [3] * 20 + [0] * 19 + [40]
    config = small(problem, (16, 8, 16))
    check(problem, config, hopper(), counts, lambda plan, inputs: fibers.run(plan, inputs, hopper()))


@pytest.mark.some(1)
@pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)
@pytest.mark.parametrize("room", [False, True], ids=["sorted", "room"])
def test_amd_kernels_are_right_in_the_emulator(room: bool) -> None:
    device = dataclasses.replace(device_of(tilewright_arch.load("gfx942")), units=UNITS)
    emulator = Emulator(device.arch)
    problem = problem_of("bf16", 5, 64, 96, 64, room=room)
    config = small(problem, (32, 32, 8), pipeline="compv3", tile=(64, 64, 32), stages=0)
    for counts in (COUNTS[0], WRONG[0]):
        check(problem, config, device, counts, emulator.run)


@pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)
@pytest.mark.extended
def test_amd_kernels_scale_each_block_by_its_own_factor_in_the_emulator() -> None:
    device = dataclasses.replace(device_of(tilewright_arch.load("gfx942")), units=UNITS)
    problem = problem_of("fp8", 3, 40, 140, 260, scale_block=SQUARES, out_dtype="bf16")
    config = small(problem, (16, 16, 32), pipeline="compv3", tile=(32, 64, 64), wave=(1, 2, 1), stages=0)
    check(problem, config, device, (9, 0, 31), Emulator(device.arch).run)


@pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)
@pytest.mark.parametrize("steps", [STEPS["swiglu"], pytest.param(STEPS["swiglu-fp8"], marks=pytest.mark.extended)])
def test_steps_behind_the_sums_are_right_in_the_emulator(steps: dict[str, str]) -> None:
    device = dataclasses.replace(device_of(tilewright_arch.load("gfx942")), units=UNITS)
    problem = problem_of("bf16", 3, 40, 136, 40, **steps)
    made = small(problem, (32, 32, 8), pipeline="compv3", tile=(32, 64, 32), wave=(1, 1, 1), stages=0)
    config = fused_with(problem, made, device.arch)
    check(problem, config, device, (9, 0, 31), Emulator(device.arch).run)
