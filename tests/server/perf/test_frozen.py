"""A frozen selection: the kernel of a problem stays, whatever is measured later and whoever asks."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.selection.measurements import Measurement, point_of
from tilewright_kit.selection.strategies import Selector
from tilewright_kit.types.errors import InvalidArgumentError, UnavailableError
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.measurements.database import PerfDatabase
from tilewright_server.engine.types import EngineOptions, Selection

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from plugin_objects import load_plugin
from vector_operation import VectorPlugin, request


def engine_of(folder: Path) -> Engine:
    plugins = PluginManager()
    load_plugin(plugins, VectorPlugin(), "vector")
    plugins.load_module("tilewright_server.devices.cpu.plugin", "cpu")
    options = EngineOptions(folder / "cache", perf_database=folder / "perf.sqlite", selection_lock=folder / "lock")
    return Engine(options, plugins)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = engine_of(tmp_path)
    yield made
    made.close()


def chosen(engine: Engine, n: int, strategy: str = "frozen") -> str:
    operation, device = engine.operations["vector"], engine.devices.info()
    problem = operation.parse(request(n))
    selector = Selector(engine.strategies[strategy])
    ranked = selector.rank(operation, problem, device)
    assert strategy != "frozen" or len(ranked) == 1  # nothing else may run
    return ranked[0].config.name


def measure(engine: Engine, n: int, best: int) -> None:
    """Record times of three kernels of ``n`` elements, ``best`` the fastest."""
    operation, device = engine.operations["vector"], engine.devices.info()
    point = point_of(operation.parse(request(n)))
    assert engine.options.perf_database is not None
    PerfDatabase(engine.options.perf_database).record(
        Measurement(
            "vector",
            point.signature,
            dict(point.sizes),
            device.arch.id,
            device.name,
            operation.config_type.from_dict({"rank": rank}).to_dict(),
            1e3 if rank == best else 9e3,
        )
        for rank in (1, 2, 3)
    )


def test_a_choice_stays_when_measurements_say_otherwise(engine: Engine, tmp_path: Path) -> None:
    assert chosen(engine, 1000) == "vector_1_1_1"
    measure(engine, 1000, best=3)
    assert chosen(engine, 1000, "auto") == "vector_3_1_1"
    assert chosen(engine, 1000) == "vector_1_1_1"
    measure(engine, 77, best=2)
    assert chosen(engine, 77) == "vector_2_1_1"  # a first choice goes by what is known then
    explained = engine.explain(request(77), Selection(strategy="frozen"), Call())
    assert (explained["strategy"], explained["candidates"][0]["kernel"]) == ("frozen", "vector_2_1_1")
    # Another server with the same file, and nothing measured.
    (tmp_path / "perf.sqlite").unlink()
    other = engine_of(tmp_path)
    try:
        assert [chosen(other, n) for n in (1000, 77)] == ["vector_1_1_1", "vector_2_1_1"]
    finally:
        other.close()
    assert len((tmp_path / "lock").read_text().splitlines()) == 2


def test_servers_that_choose_at_once_agree(tmp_path: Path) -> None:
    engines = [engine_of(tmp_path) for _ in range(4)]
    found: list[list[str]] = [[] for _ in engines]

    def ask(place: int) -> None:
        found[place] = [chosen(engines[place], n) for n in range(1, 20)]

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] and all(item == found[0] for item in found)
    lines = [json.loads(line) for line in (tmp_path / "lock").read_text().splitlines()]
    assert len(lines) == len({json.dumps(line["problem"]) for line in lines}) == 19
    for item in engines:
        item.close()


@pytest.mark.parametrize("line", ["no json", "[]", '{"format": 2}', '{"format": 1, "operation": "vector"}'])
def test_a_damaged_file_is_an_error_and_not_another_choice(engine: Engine, tmp_path: Path, line: str) -> None:
    chosen(engine, 1000)
    with (tmp_path / "lock").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InvalidArgumentError, match="no choice of a kernel") as caught:
        chosen(engine, 1001)
    assert caught.value.rule == "selection_lock"
    whole = (tmp_path / "lock").read_text().splitlines()
    (tmp_path / "lock").write_text(whole[0] + "\n")  # what the fix says
    assert chosen(engine, 1001) == "vector_1_1_1"


def test_the_beginning_of_a_line_is_no_damage(engine: Engine, tmp_path: Path) -> None:
    chosen(engine, 1000)
    lock = tmp_path / "lock"
    whole = lock.read_bytes()
    lock.write_bytes(whole[:-20])
    other = engine_of(tmp_path)
    assert chosen(other, 1000) == "vector_1_1_1"
    assert lock.read_bytes() == whole
    other.close()


def test_a_choice_that_cannot_be_kept_is_not_made(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(UnavailableError) as caught:
        chosen(engine, 1000)
    assert caught.value.rule == "selection_lock"
    (tmp_path / "lock").rmdir()
    assert chosen(engine, 1000) == "vector_1_1_1"
