"""Measurements of one server reach the others, once each, and nothing that is wrong does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilewright_kit.selection.measurements import Measurement
from tilewright_kit.types.errors import UnavailableError
from tilewright_server.engine.measurements.database import PerfDatabase
from tilewright_server.hosting.fleet.breaker import Breaker
from tilewright_server.hosting.fleet.measurements import SharedMeasurements
from tilewright_server.hosting.fleet.seal import Seal
from tilewright_server.hosting.fleet.store import Store

Make = Callable[..., SharedMeasurements]


def row(m: int = 64, **changes: Any) -> Measurement:
    found = Measurement(
        "gemm", "dtype_a=fp16", {"m": m, "n": 32, "k": 16}, "sm_90a", "NVIDIA H200", {"tile": [128, 64]}, 5000.5, 4000,
        6000, 20, "gemm_128", "gemm_128@sm_90a#0", 1000, 2000, 1e-4, "CUDA 13.0", "NVRTC 13.0", "0.1.0",
        "2026-11-20T12:00:00Z", {"init": "normal"},
    )  # fmt: skip
    return replace(found, **changes)


@pytest.fixture
def server(tmp_path: Path, url: str) -> Make:
    """Makes servers with a database each, of one storage."""
    made: list[SharedMeasurements] = []

    def make(*rows: Measurement, **options: Any) -> SharedMeasurements:
        database = PerfDatabase(tmp_path / f"{len(made)}.sqlite")
        database.record(rows)
        store = Store(url, 30.0, Breaker(failures=1, rest_s=1000))
        told = options.pop("told", [])
        made.append(SharedMeasurements(database, store, Seal(), lambda: told.append(1), **options))
        return made[-1]

    return make


def objects(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "storage" / "measurements").iterdir())


def test_rows_reach_the_other_server_once(server: Make, tmp_path: Path) -> None:
    told: list[int] = []
    first, second = server(row(1), row(2)), server(row(3), told=told)
    first.look()
    second.look()
    first.look()
    assert {item.sizes["m"] for item in first._database.select()} == {1, 2, 3}
    assert second._database.select() == first._database.select()
    assert (first.counters.written, first.counters.read) == (2, 1)
    assert (second.counters.written, second.counters.read) == (1, 2)
    assert told == [1]
    for item in (first, second, first, second):
        item.look()
    assert len(objects(tmp_path)) == 2, "what came from the fleet does not go there again"


def test_a_server_that_starts_again_writes_nothing_twice(server: Make, tmp_path: Path) -> None:
    server(row(1), row(2)).look()
    again = server(row(1), row(2), row(3))
    again.look()
    assert again.counters.written == 1
    assert len(objects(tmp_path)) == 2


def test_new_rows_go_with_the_next_look(server: Make) -> None:
    first, second = server(), server()
    first.look()
    first._database.record([row(5)])
    first.look()
    second.look()
    assert second._database.select() == [row(5)]


def test_a_server_that_may_not_write_reads(server: Make, tmp_path: Path) -> None:
    server(row(1)).look()
    reader = server(row(2), write=False)
    reader.look()
    assert len(reader._database) == 2
    assert len(objects(tmp_path)) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not sealed",
        Seal().close(b"not json\n"),
        Seal().close(b"\xff\xfe\n"),
        Seal().close(b"[" * 100_000),
        Seal().close(json.dumps(row().to_dict() | {"median_ns": -1}).encode()),
        Seal().close(json.dumps(row().to_dict() | {"samples": 10**30}).encode()),
        Seal().close(json.dumps(row().to_dict() | {"sizes": 3}).encode()),
    ],
)
def test_an_object_that_is_wrong_is_refused_once_and_the_others_are_read(
    server: Make, tmp_path: Path, content: bytes
) -> None:
    server(row(1)).look()
    (tmp_path / "storage" / "measurements" / "00000000T000000Z-0.jsonl").write_bytes(content)
    second = server()
    second.look()
    second.look()
    assert second._database.select() == [row(1)]
    assert second.counters.refused == 1


def test_rows_that_could_not_be_written_are_written_later(server: Make, tmp_path: Path) -> None:
    first = server(row(1))
    blocked = tmp_path / "storage"
    blocked.write_text("a file where a folder should be")
    with pytest.raises(UnavailableError):
        first.look()
    blocked.unlink()
    first._store.breaker.succeeded()
    first.look()
    assert first.counters.written == 1


def test_the_thread_looks_by_itself_and_ends(server: Make) -> None:
    server(row(1)).look()
    second = server(interval_s=0.05)
    second.start()
    while not len(second._database):
        time.sleep(0.01)
    second.close()
    assert second._database.select() == [row(1)]
