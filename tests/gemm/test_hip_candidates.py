"""What is proposed for AMD GPUs: few and good kernels, and a named reason for every other."""

from __future__ import annotations

from typing import Any

import pytest
from hip_units import HIP_ARCHS

import tilewright_arch
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.pipelines import candidates
from tilewright_gemm.pipelines.candidates import MOST, with_signature
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import LAYOUTS
from tilewright_kit.conformance.check_plugin import device_of, plan_findings
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.selection.candidates import Verdicts
from tilewright_kit.selection.explain import explain
from tilewright_kit.selection.strategies import Heuristic, Selector
from tilewright_kit.tiles.choices import warp_tile_for
from tilewright_kit.types.errors import UnsupportedError
from tilewright_kit.types.tensor import TensorDesc

GEMM = GemmOperation()
of = TensorDesc.of
SHAPES = (
    (1024, 1024, 1024), (4096, 4096, 4096), (16, 4096, 4096), (1, 4096, 4096), (64, 8192, 8192), (333, 777, 1111),
    (1, 1, 1), (512, 512, 16384), (8192, 8, 8192), (128, 512, 0), (20, 30, 40),
)  # fmt: skip


def device(name: str) -> DeviceInfo:
    return device_of(tilewright_arch.load(name))


def problem_of(m: int, n: int, k: int, dtype: str = "bf16", layout: str = "rcr", **attributes: Any) -> GemmProblem:
    inputs = {
        "a": of(dtype, (m, k), (k, 1) if layout[0] == "r" else (1, m)),
        "b": of(dtype, (k, n), (n, 1) if layout[1] == "r" else (1, k)),
    }
    return GEMM.parse(OperationRequest("gemm", inputs, {}, attributes))


def best(problem: GemmProblem, target: DeviceInfo) -> GemmConfig:
    config = Selector().select(GEMM, problem, target).config
    assert isinstance(config, GemmConfig)
    return config


@pytest.mark.parametrize("name", HIP_ARCHS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp8", "int8"])
def test_every_type_and_layout_has_few_valid_kernels_in_a_fixed_order(dtype: str, name: str) -> None:
    target = device(name)
    for layout in LAYOUTS:
        for m, n, k in SHAPES[::3]:
            problem = problem_of(m, n, k, dtype, layout)
            found = GEMM.candidates(problem, target)
            if target.arch.acc_dtype(dtype, dtype) is None:
                assert found == ()
                continue
            assert 0 < len(found) <= MOST and found == GEMM.candidates(problem, target)
            assert all(GEMM.rules.allows(config, target.arch) for config in found)
            assert len({config.name for config in found}) == len(found)


@pytest.mark.parametrize("name", HIP_ARCHS)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_every_shape_has_a_kernel_and_a_plan(sizes: tuple[int, int, int], name: str) -> None:
    problem, target = problem_of(*sizes), device(name)
    found = GEMM.candidates(problem, target)
    assert found
    for config in (found[0], found[-1]):
        assert not list(plan_findings(GEMM, problem, config, target))
        assert GEMM.predict(problem, config, target).seconds > 0


@pytest.mark.parametrize("name", HIP_ARCHS)
def test_large_products_take_large_tiles_and_few_rows_take_flat_ones(name: str) -> None:
    target = device(name)
    large, flat = best(problem_of(4096, 4096, 4096), target), best(problem_of(8, 4096, 4096), target)
    assert large.tile[0] * large.tile[1] >= 128 * 64 and large.split_k == 1
    assert flat.tile[0] <= 32 and flat.tile[1] >= 32
    # Few tiles of a long K: slices fill the device.
    assert best(problem_of(256, 256, 32768), target).split_k > 1


@pytest.mark.parametrize("name", HIP_ARCHS)
def test_predictions_grow_with_the_work_and_respect_the_peak(name: str) -> None:
    target = device(name)
    config = best(problem_of(4096, 4096, 4096), target)
    seconds = [GEMM.predict(problem_of(size, 4096, 4096), config, target).seconds for size in (2048, 4096, 8192, 16384)]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    peak = target.arch.throughput.peak_flops("bf16")
    problem = problem_of(8192, 8192, 8192)
    assert peak is not None
    for item in GEMM.candidates(problem, target):
        assert problem.flops / GEMM.predict(problem, item, target).seconds <= peak


def test_what_the_caller_asks_of_k_is_done() -> None:
    target = device("gfx942")
    assert {config.split_k for config in GEMM.candidates(problem_of(512, 512, 8192, split_k=3), target)} == {3}
    assert {config.split_k for config in GEMM.candidates(problem_of(512, 512, 8192, split_k=1), target)} == {1}
    groups = {f"{item}[{g}]": of("fp16", (64, 64)) for g in range(2) for item in "ab"}
    grouped = GEMM.parse(OperationRequest("gemm", groups))
    found = GEMM.candidates(grouped, target)
    assert found and all(config.grouped and config.split_k == 1 for config in found)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"dtype_c": "fp32"}, "signature"),
        ({"layout": "rrr"}, "signature"),
        ({"pad_m": False}, "padding"),
        ({"split_k": 4}, "variant"),
    ],
)
def test_every_other_kernel_has_a_named_reason(changes: dict[str, Any], rule: str) -> None:
    target = device("gfx942")
    problem = problem_of(100, 4096, 512, split_k=1)
    config = best(problem, target).replace(**changes)
    assert rule in {item.rule for item in GEMM.mismatches(problem, config, target)}


def test_types_that_a_gpu_does_not_multiply_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError) as caught:
        best(problem_of(64, 64, 64, "fp8"), device("gfx1100"))
    assert "gfx1100" in str(caught.value)


@pytest.mark.parametrize("name", HIP_ARCHS)
def test_a_choice_can_be_explained(name: str) -> None:
    problem, target = problem_of(512, 512, 2048), device(name)
    told = explain(GEMM, problem, target, Heuristic(), limit=5)
    assert told.candidates and told.candidates[0].config == best(problem, target)
    assert set(told.candidates[0].prediction.parts) >= {"compute", "memory", "l2", "epilogue", "launch"}
    assert told.refused and all(item.violations for item in told.refused)


def test_planning_judges_a_kernel_once_and_estimates_few(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[GemmConfig] = []
    estimated: list[GemmConfig] = []
    allows, predict = type(RULES).allows, candidates.predict_gemm

    def judge(rules: Any, config: GemmConfig, arch: Any) -> bool:
        judged.append(config)
        return allows(rules, config, arch)

    def estimate(problem: GemmProblem, config: GemmConfig, target: DeviceInfo) -> Prediction:
        estimated.append(config)
        return predict(problem, config, target)

    monkeypatch.setattr(candidates, "_verdicts", Verdicts(RULES))
    monkeypatch.setattr(type(RULES), "allows", judge)
    monkeypatch.setattr(candidates, "predict_gemm", estimate)
    monkeypatch.setattr(GemmOperation, "predict", staticmethod(estimate))
    target = device("gfx942")
    for size in (4096, 4097, 4100, 640, 4096):
        estimated.clear()
        best(problem_of(size, 4096, 4096), target)
        assert 0 < len(estimated) == len(set(estimated)) <= 4 * MOST
    assert 0 < len(judged) == len(set(judged)) <= 4 * MOST


@pytest.mark.parametrize(
    ("part", "depth", "expected"),
    [((64, 64), 32, (32, 32, 16)), ((16, 64), 64, (16, 16, 32)), ((16, 64), 16, (16, 16, 16)), ((8, 8), 32, None)],
)
def test_the_warp_tile_is_the_largest_that_divides_a_waves_part(
    part: tuple[int, int], depth: int, expected: tuple[int, int, int] | None
) -> None:
    tiles = tilewright_arch.load("gfx942").warp_tiles["fp16_fp16_fp32"]
    assert warp_tile_for(tiles, part, depth) == expected


def test_the_signature_of_a_problem_is_put_on_an_algorithm() -> None:
    problem = problem_of(64, 64, 64, "int8", "crr", out_dtype="fp16")
    config = with_signature(problem, GemmConfig())
    assert (config.a, config.layout, config.c) == ("int8", "crr", "fp16")
