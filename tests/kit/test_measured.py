"""Measurements decide where there are any, carry over to problems near them, and leave the rest to the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toy
from plugin_objects import load_plugin

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.loading.hookspecs import hookimpl
from tilewright_kit.loading.loader import LoadedPlugin, PluginManager
from tilewright_kit.selection.explain import explain
from tilewright_kit.selection.measured import Auto, Measured, tile_use
from tilewright_kit.selection.measurements import Measurement, ShippedMeasurements, class_of, point_of, read_lines
from tilewright_kit.selection.neighbours import SIGNATURES, Shape
from tilewright_kit.selection.strategies import Heuristic
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc

ToyConfig = toy.ToyConfig
OPERATION = toy.ToyOperation()


def problem_of(n: int, dtype: str = "fp32") -> toy.ToyProblem:
    x = TensorDesc.of(dtype, (n,))
    return OPERATION.parse(OperationRequest("toy", {"x": x, "y": x}))


def row(device: DeviceInfo, n: int, config: toy.ToyConfig, us: float, **changes: Any) -> Measurement:
    point = point_of(problem_of(n, config.dtype.value))
    found = Measurement(
        "toy", point.signature, dict(point.sizes), device.arch.id, device.name, config.to_dict(), us * 1e3, samples=5
    )
    return replace(found, **changes)


class Rows:
    """A source whose rows may change."""

    def __init__(self, *rows: Measurement) -> None:
        self.all = list(rows)
        self.reads = 0

    def generation(self) -> object:
        return len(self.all)

    def rows(self, operation: str, arch: str) -> Sequence[Measurement]:
        self.reads += 1
        return [item for item in self.all if (item.operation, item.arch) == (operation, arch)]


def ranked(source: Rows | Measured, n: int, device: DeviceInfo) -> list[Any]:
    strategy = source if isinstance(source, Measured) else Measured([source])
    problem = problem_of(n)
    return list(strategy.rank(OPERATION, problem, OPERATION.candidates(problem, device), device))


def some(device: DeviceInfo) -> list[toy.ToyConfig]:
    """Candidates, the model's favourite first."""
    problem = problem_of(1000)
    order = Heuristic().rank(OPERATION, problem, OPERATION.candidates(problem, device), device)
    return [item.config for item in order if isinstance(item.config, ToyConfig)]


def test_a_description_becomes_a_signature_and_sizes(device: DeviceInfo) -> None:
    class Described(toy.ToyProblem):
        def describe(self) -> dict[str, Any]:
            return {
                "operation": "toy", "dtype_a": "fp16", "layout": "rcr", "bias": None, "grouped": False, "alpha": 2.0,
                "products": [{"m": 8, "n": 2, "k": 4}, {"m": 64, "n": 2, "k": 4}], "split_k": 0, "flops": 9,
                "d": ["fp16", "fp32"],
            }  # fmt: skip

    plain = problem_of(4)
    point = point_of(Described(plain.x, plain.y, plain.out))
    assert point.signature == 'd=["fp16","fp32"] dtype_a=fp16 layout=rcr'
    assert dict(point.sizes) == {"m": 64, "n": 2, "k": 4, "split_k": 0}
    assert class_of(point.signature) == "dtype_a=fp16 layout=rcr"


def test_the_fastest_measured_kernel_wins_on_its_own_problem(device: DeviceInfo) -> None:
    configs = some(device)
    slow, fast = configs[0], configs[-1]
    order = ranked(Rows(row(device, 1000, slow, 9.0), row(device, 1000, fast, 3.0)), 1000, device)
    assert [item.config for item in order[:2]] == [fast, slow]
    assert order[0].reason == "measured 3 us for this problem (5 samples)"
    assert order[0].prediction.seconds == pytest.approx(3e-6)
    assert {item.config for item in order} == set(configs)
    assert len(order) == len(configs)


def test_one_kernel_that_somebody_tried_does_not_win_for_being_the_only_one(device: DeviceInfo) -> None:
    configs = some(device)
    order = ranked(Rows(row(device, 1000, configs[-1], 9.0)), 1000, device)
    assert order[0].config == configs[0]
    assert "1 measured problems" in order[0].reason


def test_what_was_fast_nearby_is_preferred_and_far_away_does_not_count(device: DeviceInfo) -> None:
    configs = some(device)
    favourite, measured = configs[0], configs[-1]
    rows = Rows(row(device, 1 << 20, favourite, 90.0), row(device, 1 << 20, measured, 30.0))
    near = ranked(rows, 1_100_000, device)
    assert near[0].config == measured
    assert "nearest: n=1048576" in near[0].reason
    far = ranked(rows, 1000, device)
    assert [item.config for item in far] == configs
    assert far[0].reason.startswith("predicted")


def test_of_two_neighbours_the_nearer_counts_more(device: DeviceInfo) -> None:
    one, other = some(device)[1:3]
    rows = Rows(
        row(device, 1000, one, 1.0), row(device, 1000, other, 2.0),
        row(device, 4000, one, 8.0), row(device, 4000, other, 4.0),
    )  # fmt: skip
    assert ranked(rows, 1100, device)[0].config == one
    assert ranked(rows, 3900, device)[0].config == other


@pytest.fixture
def resizable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy.ToyOperation, "resized", lambda self, problem, sizes: problem_of(sizes["n"]), raising=False)


def modelled(seconds: Any) -> Any:
    """The operation with another model: ``seconds`` of a configuration and a size."""
    return type(
        "Modelled",
        (toy.ToyOperation,),
        {"predict": lambda self, problem, config, device: Prediction(seconds(config, problem.out.size) * 1e-6)},
    )()


@pytest.mark.usefixtures("resizable")
def test_a_model_that_was_right_nearby_is_followed_where_it_says_that_things_change(device: DeviceInfo) -> None:
    one, other = some(device)[:2]

    def seconds(config: Any, n: int) -> float:
        return {one: n * 1.0, other: 1000 + n * 0.5}.get(config, n * 3.0)

    rows = Rows(*(row(device, n, config, seconds(config, n)) for n in (1000, 1500) for config in (one, other)))
    operation, problem = modelled(seconds), problem_of(3000)
    order = Measured([rows]).rank(operation, problem, [one, other], device)
    assert order[0].config == other
    assert "2 of 2 measured problems near it and the model" in order[0].reason


@pytest.mark.usefixtures("resizable")
def test_a_model_that_was_wrong_nearby_is_corrected(device: DeviceInfo) -> None:
    one, other, third = some(device)[:3]
    operation = modelled(lambda config, n: {one: 1.0, other: 2.0, third: 1.5}[config] * n)
    rows = Rows(*(row(device, n, config, us * n) for n in (1000, 2000) for config, us in ((one, 1.5), (other, 1.0))))
    order = Measured([rows]).rank(operation, problem_of(1400), [one, other, third], device)
    assert order[0].config == other
    far = Measured([rows]).rank(operation, problem_of(1 << 20), [one, other, third], device)
    assert [item.config for item in far] == [one, third, other]


def test_a_valid_kernel_that_was_not_proposed_is_added_and_an_invalid_one_is_not(device: DeviceInfo) -> None:
    proposed = some(device)
    stranger = ToyConfig(tile=(512, 1, 1), vector=8)
    assert stranger not in proposed
    invalid = ToyConfig(tile=(1000, 1, 1), vector=16)
    assert OPERATION.rules.check(invalid, device.arch)
    rows = Rows(row(device, 1000, stranger, 1.0), row(device, 1000, invalid, 0.1))
    order = ranked(rows, 1000, device)
    assert order[0].config == stranger
    assert invalid not in [item.config for item in order]


def test_a_record_of_an_unknown_configuration_is_passed_over(device: DeviceInfo) -> None:
    config = some(device)[-1]
    strange = replace(row(device, 1000, config, 0.1), config={"no_such_field": 1})
    favourite = row(device, 1000, some(device)[0], 6.0)
    assert ranked(Rows(strange, favourite, row(device, 1000, config, 5.0)), 1000, device)[0].config == config


def test_a_later_layer_replaces_what_an_earlier_one_has_of_a_problem(device: DeviceInfo) -> None:
    one, other = some(device)[1:3]
    shipped = Rows(row(device, 1000, one, 1.0), row(device, 2000, one, 1.0))
    own = Rows(row(device, 1000, other, 7.0))
    strategy = Measured([shipped, own])
    assert ranked(strategy, 1000, device)[0].config == other
    assert ranked(strategy, 2000, device)[0].config == one


def test_the_newest_of_two_measurements_counts(device: DeviceInfo) -> None:
    one, other = some(device)[1:3]
    rows = Rows(
        row(device, 1000, one, 1.0, date="2026-01-01T00:00:00Z"),
        row(device, 1000, one, 9.0, date="2026-02-01T00:00:00Z"),
        row(device, 1000, other, 5.0),
    )
    assert ranked(rows, 1000, device)[0].config == other


def test_measurements_of_another_device_count_as_a_neighbours(device: DeviceInfo) -> None:
    favourite, *_, config = some(device)
    rows = [row(device, 1000, favourite, 9.0), row(device, 1000, config, 1.0)]
    order = ranked(Rows(*(replace(item, device="another one") for item in rows)), 1000, device)
    assert order[0].config == config
    assert "on another one" in order[0].reason


def test_sources_are_read_once_and_again_when_they_change(device: DeviceInfo) -> None:
    one, other = some(device)[1:3]
    source = Rows(row(device, 1000, one, 5.0))
    strategy = Measured([source])
    ranked(strategy, 1000, device)
    ranked(strategy, 2000, device)
    assert source.reads == 1
    source.all.append(row(device, 1000, other, 2.0))
    assert ranked(strategy, 1000, device)[0].config == other
    assert source.reads == 2


def test_auto_is_the_heuristic_until_something_was_measured(device: DeviceInfo) -> None:
    source = Rows()
    auto = Auto(Measured([source]))
    problem = problem_of(1000)
    candidates = OPERATION.candidates(problem, device)
    assert auto.rank(OPERATION, problem, candidates, device) == Heuristic().rank(OPERATION, problem, candidates, device)
    favourite, *_, slowest = some(device)
    source.all += [row(device, 1000, favourite, 2.0), row(device, 1000, slowest, 1.0)]
    assert auto.rank(OPERATION, problem, candidates, device)[0].config == slowest


def test_an_explanation_says_what_was_measured(device: DeviceInfo) -> None:
    favourite, *_, config = some(device)
    rows = Rows(row(device, 1000, favourite, 4.0), row(device, 1000, config, 2.0))
    found = explain(OPERATION, problem_of(1000), device, Measured([rows])).to_dict()
    assert found["chosen"] == str(config.key(device.arch.id))
    assert found["decided"].startswith("measured: measured 2 us for this problem")
    assert found["candidates"][0]["predicted_seconds"] == pytest.approx(2e-6)


def test_tiles_that_reach_past_the_problem_and_idle_units_count(device: DeviceInfo) -> None:
    gpu = replace(device, kind="cuda", units=100)
    config = ToyConfig(tile=(128, 128, 64))
    assert tile_use(config, {"m": 1280, "n": 1280}, gpu) == 1.0
    assert tile_use(config, {"m": 64, "n": 12800}, gpu) == 0.5
    assert tile_use(config, {"m": 1280, "n": 1290}, gpu) == pytest.approx(1290 / 1408 * 110 / 200)
    assert tile_use(config, {"m": 1280, "n": 1280, "batch": 3}, gpu) == 1.0
    assert tile_use(config, {"n": 7}, gpu) == 1.0
    assert tile_use(config, {"m": 64, "n": 64}, device) == 1.0


def test_records_survive_json(device: DeviceInfo) -> None:
    found = row(device, 1000, some(device)[0], 2.5, error=1e-3, conditions={"init": "normal", "rotating": 4})
    again = Measurement.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found
    assert again.point == point_of(problem_of(1000))


@pytest.mark.parametrize(
    ("changes", "entry"),
    [
        ({"median_ns": "fast"}, "median_ns"),
        ({"median_ns": -1.0}, "median_ns"),
        ({"sizes": {"n": 1.5}}, "sizes"),
        ({"config": [1]}, "config"),
        ({"device": 3}, "device"),
        ({"samples": True}, "samples"),
    ],
)
def test_a_damaged_record_is_refused_by_line_and_entry(device: DeviceInfo, changes: dict[str, Any], entry: str) -> None:
    line = json.dumps(row(device, 1000, some(device)[0], 1.0).to_dict() | changes)
    with pytest.raises(InvalidArgumentError) as caught:
        list(read_lines(["", line], "file"))
    assert caught.value.field == f"file:2.{entry}"


def test_shipped_files_are_found_beside_a_plugin_and_damage_in_one_stops_no_other(
    device: DeviceInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "measured"
    folder.mkdir()
    good = row(device, 1000, some(device)[0], 1.0)
    (folder / "a.jsonl").write_text("{broken\n")
    (folder / "b.jsonl").write_text(json.dumps(good.to_dict()) + "\n")
    (tmp_path / "toy_with_data.py").write_text("from toy import *\n__version__ = '1'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins = PluginManager(archs=[device.arch])
    loaded = plugins.load_module("toy_with_data")
    assert isinstance(loaded, LoadedPlugin), loaded
    assert [path.name for path in plugins.measurements] == ["a.jsonl", "b.jsonl"]
    shipped = ShippedMeasurements(plugins.measurements)
    assert list(shipped.rows("toy", device.arch.id)) == [good]
    assert len(shipped.damage) == 1
    assert shipped.damage[0].startswith("a.jsonl")


def test_a_hook_may_name_files_and_nothing_else(device: DeviceInfo, tmp_path: Path) -> None:
    class Brings:
        def __init__(self, *files: Any) -> None:
            self.files = files

        @hookimpl
        def tilewright_measurements(self) -> Sequence[Any]:
            return self.files

    plugins = PluginManager(archs=[device.arch])
    file = tmp_path / "own.jsonl"
    assert isinstance(load_plugin(plugins, Brings(file), "paths"), LoadedPlugin)
    assert plugins.measurements == (file,)
    refused = load_plugin(plugins, Brings("own.jsonl"), "texts")
    assert not isinstance(refused, LoadedPlugin)
    assert "is no path" in refused.reason


def test_opinions_of_many_kinds_of_problem_do_not_pile_up(device: DeviceInfo) -> None:
    """Clients make kinds of problem as they like, and a server runs for long."""
    shape = Shape(point_of(problem_of(64)), device.name, {})
    for number in range(10 * SIGNATURES):
        shape.remembered(f"unary=u{number}")[ToyConfig()] = 1.0
        assert shape.remembered(f"unary=u{number}")[ToyConfig()] == 1.0
        assert len(shape.predicted) <= SIGNATURES


def test_an_explanation_says_what_was_measured_how_surely_and_what_the_model_expected(device: DeviceInfo) -> None:
    problem = problem_of(1000)
    configs = [
        item.config for item in Heuristic().rank(OPERATION, problem, OPERATION.candidates(problem, device), device)
    ]
    rows = [
        row(device, 1000, config, us, p10_ns=us * 900, p90_ns=us * 1100)
        for config, us in zip(configs[:3], (8.0, 5.0, 6.0), strict=False)
    ]
    told = explain(OPERATION, problem, device, Auto(Measured([Rows(*rows)]))).to_dict()
    first, second = told["candidates"][:2]
    assert first["source"] == second["source"] == "measured"
    assert first["predicted_seconds"] == pytest.approx(5e-6)
    assert first["spread_seconds"] == pytest.approx([4.5e-6, 5.5e-6])
    expected = OPERATION.predict(problem, configs[1], device).seconds
    assert first["modelled_seconds"] == pytest.approx(expected)
    assert told["runner_up"] == {"kernel": second["kernel"], "slower_by": pytest.approx(0.2)}
    unmeasured = explain(OPERATION, problem, device, Heuristic()).to_dict()
    assert {item["source"] for item in unmeasured["candidates"]} == {"model"}
    assert unmeasured["runner_up"]["slower_by"] >= 0
