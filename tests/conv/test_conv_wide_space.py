"""The wide space of Hopper's convolutions as arrays: the same times and kernels as one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilewright_arch
import tilewright_grouped_conv
from tilewright_grouped_conv.commands.cases import ConvCase
from tilewright_grouped_conv.plugin import ConvOperation
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.selection.learned import LearnedModels, check_model
from tilewright_kit.selection.trees import read_model

ARCH = tilewright_arch.load("sm_90a")
H200 = DeviceInfo("cuda:0", "cuda", "NVIDIA H200", ARCH, 132, 141 << 30)
OPERATIONS = {direction.value: ConvOperation(direction) for direction in Direction}
LAYERS = {
    "3x3": {"size": "14x14", "filter": "3", "padding": "1"},
    "pointwise": {"size": "28x28", "filter": "1"},
    "strided": {"size": "14x14", "filter": "1", "stride": "2"},
}


def case_of(direction: str, layer: str, **changes: object) -> ConvCase:
    given = {"n": 8, "c": 128, "k": 256, "dtype": "bf16", **LAYERS[layer], **changes}
    return ConvCase(direction=direction, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("direction", OPERATIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_times_and_kernels_of_arrays_are_those_of_one_by_one(direction: str, layer: str) -> None:
    operation = OPERATIONS[direction]
    problem = operation.parse(case_of(direction, layer).request())
    space = operation.search_space(problem, H200)
    table = operation.search_table(space, H200)
    times = operation.search_times(problem, table, H200)
    features = operation.search_features(problem, table, H200)
    assert features.shape == (len(space), len(operation.feature_names))
    assert np.isfinite(features).all()
    usable = np.flatnonzero(np.isfinite(times))
    assert len(usable) > 5
    for row in usable[:: max(1, len(usable) // 12)]:
        config = operation.search_config(problem, table, int(row), H200)
        assert config.replace(mapped_rows=False) == space[row].replace(mapped_rows=False)
        assert operation.predict(problem, config, H200).seconds == pytest.approx(times[row], rel=1e-9)


def test_kernels_of_the_copy_engine_may_win_where_their_narrowest_tile_is_twice_as_wide_as_the_product() -> None:
    operation = OPERATIONS["bwd_data"]
    problem = operation.parse(case_of("bwd_data", "pointwise", c=32).request())
    space = operation.search_space(problem, H200)
    times = operation.search_times(problem, operation.search_table(space, H200), H200)
    possible = [config for config, seconds in zip(space, times, strict=True) if np.isfinite(seconds)]
    assert any(config.pipeline == "ws" for config in possible)


def test_the_space_holds_what_the_server_would_choose() -> None:
    operation = OPERATIONS["fwd"]
    problem = operation.parse(case_of("fwd", "3x3").request())
    known = {item.replace(split_k=1) for item in operation.search_space(problem, H200)}
    chosen = [item.replace(split_k=1) for item in operation.candidates(problem, H200)]
    assert {item for item in chosen if item.pipeline == "ws"} <= known


@pytest.mark.parametrize(
    "changes", [{"c": 3}, {"groups": 128}, {"dtype": "fp32"}, {"layout": "channels_first"}], ids=str
)
def test_problems_that_the_space_has_no_kernels_for_are_of_no_class(changes: dict[str, object]) -> None:
    operation = OPERATIONS["fwd"]
    assert operation.search_class(operation.parse(case_of("fwd", "3x3", **changes).request()), H200) == ""


@pytest.mark.parametrize(
    ("direction", "file"),
    [
        ("fwd", "h200_conv"),
        ("bwd_weight", "h200_conv_backward_weight"),
        ("bwd_data", "h200_conv_backward_data"),
    ],
)
def test_the_shipped_model_proposes_valid_kernels_by_the_features_that_it_was_trained_with(
    direction: str, file: str
) -> None:
    operation = OPERATIONS[direction]
    path = Path(tilewright_grouped_conv.__file__).parent / "measured" / f"{file}.npz"
    model = read_model(path)
    check_model(model, operation, path.name)
    problem = operation.parse(case_of(direction, "3x3").request())
    table = model.spaces[operation.search_class(problem, H200)]
    rows = range(0, len(table["split_k"]), 19)
    configs = [operation.search_config(problem, table, row, H200) for row in rows]
    picked = {name: column[list(rows)] for name, column in table.items()}
    planner = operation.search_features(problem, picked, H200)
    assert np.array_equal(planner, operation.search_features(problem, operation.search_table(configs, H200), H200))
    proposed = LearnedModels([path], {operation.name: operation}).propose(operation, problem, H200)
    assert len(proposed) > 2
    assert all(operation.rules.allows(item.config, ARCH) for item in proposed)
    assert not any(operation.mismatches(problem, item.config, H200) for item in proposed)
