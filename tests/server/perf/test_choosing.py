"""An engine chooses by its database, and as the model says where that is empty."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.selection.measurements import Measurement, point_of
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.measurements.database import PerfDatabase
from tilewright_server.engine.types import EngineOptions, Selection

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from plugin_objects import load_plugin
from vector_operation import VectorPlugin, request


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    plugins = PluginManager()
    load_plugin(plugins, VectorPlugin(), "vector")
    plugins.load_module("tilewright_server.devices.cpu.plugin", "cpu")
    return Engine(EngineOptions(tmp_path / "cache", perf_database=tmp_path / "perf.sqlite"), plugins)


def chosen(engine: Engine, n: int, strategy: str = "") -> str:
    return str(engine.explain(request(n), Selection(strategy=strategy), Call())["candidates"][0]["kernel"])


def measured(engine: Engine, n: int, rank: int, us: float) -> Measurement:
    operation = engine.operations["vector"]
    point = point_of(operation.parse(request(n)))
    device = engine.devices.info()
    config = operation.config_type.from_dict({"rank": rank})
    return Measurement(
        "vector", point.signature, dict(point.sizes), device.arch.id, device.name, config.to_dict(), us * 1e3
    )


def test_measurements_decide_as_soon_as_there_are_any(engine: Engine) -> None:
    assert {"auto", "measured", "heuristic", "first_fit"} <= set(engine.strategies)
    assert chosen(engine, 1000) == chosen(engine, 1000, "heuristic") == "vector_1_1_1"
    assert engine.explain(request(1000), Selection(), Call())["strategy"] == "auto"
    assert engine.options.perf_database is not None
    database = PerfDatabase(engine.options.perf_database)
    database.record([measured(engine, 1000, rank, us) for rank, us in ((1, 9.0), (3, 2.0), (2, 5.0))])
    assert chosen(engine, 1000) == chosen(engine, 1000, "measured") == "vector_3_1_1"
    assert chosen(engine, 1000, "heuristic") == "vector_1_1_1"
    assert chosen(engine, 1010) == "vector_3_1_1"
    assert chosen(engine, 100_000_000) == "vector_1_1_1"
    engine.close()


def test_plans_are_made_anew_once_when_measurements_have_changed_and_are_quiet(engine: Engine) -> None:
    assert engine.options.perf_database is not None
    database = PerfDatabase(engine.options.perf_database)
    assert not engine.remeasured()
    database.record([measured(engine, 1000, rank, us) for rank, us in ((1, 9.0), (3, 2.0), (2, 5.0))])
    looks = [engine.remeasured() for _ in range(5)]
    assert looks.count(True) == 1 and not looks[0], "the first look cannot tell that nobody goes on writing"
    engine.close()
