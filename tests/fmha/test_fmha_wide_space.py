"""The wide space of attention on Hopper: every kernel is valid, and rows of the table are these kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilewright_arch
import tilewright_fmha
from tilewright_fmha.commands.cases import AttentionCase
from tilewright_fmha.plugin import FmhaOperation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.selection.learned import LearnedModels, check_model
from tilewright_kit.selection.trees import read_model

H200 = DeviceInfo("cuda:0", "cuda", "NVIDIA H200", tilewright_arch.load("sm_90a"), 132, 141 << 30)
CASES = [
    AttentionCase(2, 16, 1000, 128, dtype="bf16", mask="top_left"),
    AttentionCase(2, 16, 577, 64, dtype="fp16"),
    AttentionCase(8, 32, 4096, 128, seq_q=1, heads_k=8, dtype="bf16"),
    AttentionCase(8, 32, 4096, 128, seq_q=1, heads_k=8, dtype="bf16", page=64),
    AttentionCase(2, 8, 512, 128, dtype="bf16", direction="bwd"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_rows_of_the_table_are_valid_kernels_of_the_problem(case: AttentionCase) -> None:
    operation = FmhaOperation(case.operation)
    problem = operation.parse(case.request())
    assert operation.search_class(problem, H200)
    space = operation.search_space(problem, H200)
    table = operation.search_table(space, H200)
    rows = range(0, len(space), 7)
    assert [operation.search_config(problem, table, row, H200) for row in rows] == [space[row] for row in rows]
    assert all(operation.rules.allows(space[row], H200.arch) for row in rows)
    assert {item for item in operation.candidates(problem, H200) if item.pipeline == "ws"} <= set(space)
    times = operation.search_times(problem, table, H200)
    features = operation.search_features(problem, table, H200)
    assert features.shape == (len(space), len(operation.feature_names))
    assert np.isfinite(features).all()
    usable = [row for row in rows if np.isfinite(times[row])]
    assert usable
    for row in usable:
        assert operation.predict(problem, space[row], H200).seconds == pytest.approx(times[row], rel=1e-9)


@pytest.mark.parametrize("changes", [{"dtype": "fp32"}, {"bias": "yes"}, {"splits": 4}], ids=str)
def test_problems_that_the_space_has_no_kernels_for_are_of_no_class(changes: dict[str, object]) -> None:
    operation = FmhaOperation("attention")
    given = {"batch": 2, "heads": 8, "seq_k": 512, "hdim": 128, "dtype": "bf16", **changes}
    problem = operation.parse(AttentionCase(**given).request())  # type: ignore[arg-type]
    assert operation.search_class(problem, H200) == ""


def test_the_shipped_model_proposes_valid_kernels_by_the_features_that_it_was_trained_with() -> None:
    operation = FmhaOperation("attention")
    path = Path(tilewright_fmha.__file__).parent / "measured" / "h200.npz"
    model = read_model(path)
    check_model(model, operation, path.name)
    problem = operation.parse(CASES[0].request())
    table = model.spaces[operation.search_class(problem, H200)]
    rows = range(0, len(table["stages"]), 11)
    configs = [operation.search_config(problem, table, row, H200) for row in rows]
    picked = {name: column[list(rows)] for name, column in table.items()}
    planner = operation.search_features(problem, picked, H200)
    assert np.array_equal(planner, operation.search_features(problem, operation.search_table(configs, H200), H200))
    models = LearnedModels([path], {operation.name: operation})
    proposed = models.propose(operation, problem, H200)
    assert len(proposed) > 2
    assert all(operation.rules.allows(item.config, H200.arch) for item in proposed)
    assert not any(operation.mismatches(problem, item.config, H200) for item in proposed)
    featured = operation.parse(AttentionCase(2, 16, 1000, 128, dtype="bf16", softcap="30", lse="yes").request())
    assert models.propose(operation, featured, H200) == []
