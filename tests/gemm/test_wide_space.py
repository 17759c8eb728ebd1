"""The wide space of Hopper's GEMM kernels as arrays: the same times, features and kernels as one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilewright_arch
import tilewright_gemm
from tilewright_gemm.commands.cases import GemmCase
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.selection.learned import LearnedModels, check_model
from tilewright_kit.selection.measured import Auto, Measured
from tilewright_kit.selection.strategies import Selector
from tilewright_kit.selection.trees import ModelFile, read_model

OPERATION = GemmOperation()
ARCH = tilewright_arch.load("sm_90a")
H200 = DeviceInfo("cuda:0", "cuda", "NVIDIA H200", ARCH, 132, 141 << 30)
FILE = Path(tilewright_gemm.__file__).parent / "measured" / "h200.npz"
CASES = [
    GemmCase(16, 4096, 4096, "bf16"),
    GemmCase(1000, 5120, 1536, "fp16"),
    GemmCase(100, 1000, 10000, "bf16"),
    GemmCase(4096, 4096, 4096, "fp8", out_dtype="bf16"),
    GemmCase(256, 512, 512, "bf16", batch=7),
]


@pytest.fixture(scope="module")
def model() -> ModelFile:
    return read_model(FILE)


def problem_of(case: GemmCase) -> GemmProblem:
    return OPERATION.parse(case.request())


def some_rows(model: ModelFile, problem: GemmProblem, every: int) -> tuple[dict[str, np.ndarray], list[GemmConfig]]:
    table = model.spaces.get(OPERATION.search_class(problem, H200))
    if table is None:  # a class that the shipped model does not choose for
        table = OPERATION.search_table(OPERATION.search_space(problem, H200), H200)
    times = OPERATION.search_times(problem, table, H200)
    rows = np.flatnonzero(np.isfinite(times))[::every]
    picked = {name: column[rows] for name, column in table.items()}
    return picked, [OPERATION.search_config(problem, picked, row, H200) for row in range(len(rows))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_times_of_arrays_are_those_of_the_cost_model(case: GemmCase, model: ModelFile) -> None:
    problem = problem_of(case)
    table, configs = some_rows(model, problem, 23)
    assert len(configs) > 20
    times = OPERATION.search_times(problem, table, H200)
    want = [OPERATION.predict(problem, config, H200).seconds for config in configs]
    assert times == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_trainer_and_planner_see_the_same_features(case: GemmCase, model: ModelFile) -> None:
    """The planner has rows of a file, the trainer configurations that were measured."""
    problem = problem_of(case)
    table, configs = some_rows(model, problem, 23)
    planner = OPERATION.search_features(problem, table, H200)
    trainer = OPERATION.search_features(problem, OPERATION.search_table(configs, H200), H200)
    assert planner.shape == (len(configs), len(OPERATION.feature_names))
    assert planner.dtype == np.float32
    assert np.array_equal(planner, trainer)
    assert np.isfinite(planner).all()


def test_the_shipped_model_is_of_this_generator(model: ModelFile) -> None:
    check_model(model, OPERATION, FILE.name)
    assert (model.operation, model.arch, model.device) == ("gemm", "sm_90a", "NVIDIA H200")


@pytest.mark.parametrize("case", CASES[:2] + CASES[3:4], ids=lambda case: case.label)
def test_kernels_of_the_shipped_space_are_valid(case: GemmCase, model: ModelFile) -> None:
    problem = problem_of(case)
    _, configs = some_rows(model, problem, 97)
    for config in configs:
        assert OPERATION.rules.allows(config, ARCH), config.name
        assert not OPERATION.mismatches(problem, config, H200), config.name


@pytest.mark.extended
def test_the_shipped_space_is_the_whole_space(model: ModelFile) -> None:
    problem = problem_of(CASES[0])
    table = model.spaces[OPERATION.search_class(problem, H200)]
    today = OPERATION.search_table(OPERATION.search_space(problem, H200), H200)
    assert {name: column.tolist() for name, column in today.items()} == {name: table[name].tolist() for name in today}


def test_a_model_decides_for_its_device_alone(model: ModelFile) -> None:
    models = LearnedModels([FILE], {"gemm": OPERATION})
    problem = problem_of(CASES[1])
    other = DeviceInfo("cuda:0", "cuda", "NVIDIA H100", ARCH, 132, 80 << 30)
    with_model, without = Selector(Auto(Measured([], models))), Selector(Auto(Measured()))
    ranked = with_model.rank(OPERATION, problem, H200)
    assert "learned model" in ranked[0].reason
    assert [item.config for item in ranked] == [item.config for item in with_model.rank(OPERATION, problem, H200)]
    assert [item.config for item in with_model.rank(OPERATION, problem, other)] == [
        item.config for item in without.rank(OPERATION, problem, other)
    ]
    for item in ranked:
        assert OPERATION.rules.allows(item.config, ARCH)
        assert not OPERATION.mismatches(problem, item.config, H200)


@pytest.mark.parametrize(
    "case",
    [
        GemmCase(1000, 5120, 1536, "bf16", layout="rrr"),
        GemmCase(64, 64, 64, "fp32"),
        GemmCase(333, 777, 1111, "bf16"),
        GemmCase(64, 4096, 4096, "bf16", groups="32+32"),
    ],
    ids=lambda case: case.label,
)
def test_problems_that_the_model_did_not_learn_are_chosen_for_as_without_it(case: GemmCase) -> None:
    models = LearnedModels([FILE], {"gemm": OPERATION})
    problem = problem_of(case)
    assert models.propose(OPERATION, problem, H200) == []
    ranked = [Selector(Auto(found)).rank(OPERATION, problem, H200) for found in (Measured([], models), Measured())]
    assert [item.config for item in ranked[0]] == [item.config for item in ranked[1]]


def test_fused_steps_and_slices_that_the_caller_asked_for_are_kept() -> None:
    models = LearnedModels([FILE], {"gemm": OPERATION})
    fused = problem_of(GemmCase(512, 4096, 4096, "bf16", bias="yes", activation="Gelu"))
    proposed = models.propose(OPERATION, fused, H200)
    assert proposed
    assert all(item.config.bias == "bf16" and item.config.unary.value == "Gelu" for item in proposed)
    sliced = problem_of(GemmCase(64, 4096, 4096, "bf16", split_k=4))
    assert {item.config.split_k for item in models.propose(OPERATION, sliced, H200)} == {4}
