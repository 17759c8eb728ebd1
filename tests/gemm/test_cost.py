"""Predictions: deterministic, growing with the work, and quick enough for an uncached plan."""

from __future__ import annotations

import dataclasses
import math

import pytest
from effort import calls_of

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_gemm.config.choices import cpu_teams
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.cost.cuda import join_seconds
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.selection.strategies import Selector
from tilewright_kit.types.tensor import TensorDesc

GEMM = GemmOperation()
CALLS = 50_000
"""Of functions, for a plan that is new: that many take five milliseconds."""


def problem(m: int, n: int, k: int, dtype: str = "fp32", letter: str = "c") -> GemmProblem:
    strides = (1, k) if letter == "c" else (n, 1)
    inputs = {"a": TensorDesc.of(dtype, (m, k)), "b": TensorDesc.of(dtype, (k, n), strides)}
    return GEMM.parse(OperationRequest("gemm", inputs))


def usable(arch: ArchSpec) -> str:
    return next(dtype for dtype in ("fp32", "fp16", "bf16") if arch.acc_dtype(dtype, dtype))


def test_predictions_are_the_same_each_time_and_made_of_their_parts(arch: ArchSpec) -> None:
    device, wanted = device_of(arch), problem(300, 200, 1000, usable(arch))
    candidates = GEMM.candidates(wanted, device)
    assert candidates
    for config in candidates[:20]:
        one, other = (GEMM.predict(wanted, config, device) for _ in range(2))
        assert one == other and math.isfinite(one.seconds) and one.seconds > 0
        assert all(value >= 0 and math.isfinite(value) for value in one.parts.values())


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_more_work_never_takes_less_time(arch: ArchSpec, axis: int) -> None:
    device, dtype = device_of(arch), usable(arch)
    config = GEMM.candidates(problem(512, 512, 512, dtype), device)[0]
    seconds = []
    for factor in (1, 2, 4, 8, 16):
        sizes = [512, 512, 512]
        sizes[axis] *= factor
        seconds.append(GEMM.predict(problem(*sizes, dtype), config, device).seconds)
    assert seconds == sorted(seconds) and seconds[-1] > seconds[0]


def test_skinny_products_stream_and_square_ones_are_blocked(device: DeviceInfo) -> None:
    def pick(m: int, n: int, k: int, letter: str = "c") -> str:
        config = Selector().select(GEMM, problem(m, n, k, letter=letter), device).config
        return str(config.pipeline)  # type: ignore[attr-defined]

    assert pick(1, 4096, 4096) == "mem"
    assert pick(4096, 1, 4096) == "mem"
    assert pick(8, 2048, 2048) == "mem"
    assert pick(4, 2048, 2048, "r") == "mem"
    assert pick(2, 4096, 4096, "r") == "mem"
    assert pick(1024, 1024, 1024) == "compv3"
    assert pick(64, 64, 64) == "compv1"


def test_big_products_use_all_units_and_tiny_ones_one(device: DeviceInfo) -> None:
    def waves(m: int, n: int, k: int) -> int:
        config = Selector().select(GEMM, problem(m, n, k), device).config
        return int(config.waves)  # type: ignore[attr-defined]

    assert waves(2048, 2048, 2048) == device.units
    assert waves(16, 16, 16) == 1


@pytest.mark.parametrize("units", [1, 2, 3, 5, 6, 12, 16, 24, 40, 64, 96, 200])
def test_machines_of_any_size_have_kernels_for_nearly_all_their_cores(units: int) -> None:
    for name in ("x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64"):
        device = dataclasses.replace(device_of(tilewright_arch.load(name)), units=units)
        for sizes in ((1, 8192, 8192), (8192, 1, 8192), (2048, 2048, 2048), (8192, 128, 1024), (128, 8192, 1024)):
            teams = {config.waves for config in GEMM.candidates(problem(*sizes), device)}
            assert teams <= {1, max(teams)} and max(teams) == cpu_teams(device.arch, units)[-1], (name, sizes)
        assert min(units, 128) * 2 / 3 < max(teams) <= units


def test_candidates_are_few_valid_and_cheap_to_rank(device: DeviceInfo) -> None:
    for sizes in (
        (1, 4096, 4096),
        (64, 64, 64),
        (256, 256, 256),
        (1024, 1024, 1024),
        (128, 4096, 1024),
        (30, 30, 3000),
    ):
        wanted = problem(*sizes)
        assert 1 <= len(GEMM.candidates(wanted, device)) <= 32

        def planned(asked: GemmProblem = wanted) -> None:
            best = Selector().select(GEMM, asked, device)
            GEMM.plan(asked, best.config, device)  # type: ignore[arg-type]

        planned()
        assert 0 < calls_of(planned) < CALLS


def test_transposed_tiles_wait_for_operands_that_are_read_element_by_element() -> None:
    fields = {
        "dtype_a": "bf16", "layout": "rcr", "pipeline": "ws", "epilogue": "cshuffle", "scheduler": "cooperative",
        "pad_m": True, "pad_n": True, "pad_k": True, "tile": [64, 64, 64], "wave": [1, 1, 1], "warp_tile": [64, 64, 16],
        "binary": "MultiDAdd", "num_d_tensors": 1,
    }  # fmt: skip

    def joins(**more: object) -> float:
        return join_seconds(GemmConfig.from_dict(fields | more), 1.755e9)

    assert joins() == joins(transpose_c=True, num_d_tensors=0, binary="PassThrough") == 0.0
    chunks, elements = joins(transpose_c=True), joins(transpose_c=True, dtype_d=["fp32"])
    assert 0.0 < chunks < elements / 8
    assert joins(transpose_c=True, num_d_tensors=2) > elements
    assert joins(transpose_c=True, tile=[16, 64, 64], warp_tile=[16, 64, 16]) == pytest.approx(chunks / 4)
