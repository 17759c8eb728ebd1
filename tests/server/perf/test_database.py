"""Measurements survive processes, writers at the same time, damage and the way to another machine."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilewright_kit.selection.measurements import Measurement
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError
from tilewright_server.engine.measurements.database import Filter, PerfDatabase, best_rows
from tilewright_server.engine.measurements.exchange import read_file, write_file


def row(m: int = 64, us: float = 5.0, tile: int = 128, **changes: Any) -> Measurement:
    found = Measurement(
        "gemm", "dtype_a=fp16 layout=rcr", {"m": m, "n": 32, "k": 16}, "sm_90a", "NVIDIA H200", {"tile": [tile, 64, 9]},
        us * 1e3, us * 900, us * 1200, 20, f"gemm_{tile}", f"gemm_{tile}@sm_90a#0", 1000, 2000, 1e-4,
        "CUDA 13.0", "NVRTC 13.0", "0.1.0", "2026-11-20T12:00:00Z", {"init": "normal", "rotating": 4},
    )  # fmt: skip
    return replace(found, **changes)


@pytest.fixture
def database(tmp_path: Path) -> PerfDatabase:
    return PerfDatabase(tmp_path / "data" / "perf.sqlite")


def test_rows_come_back_as_they_were(database: PerfDatabase) -> None:
    rows = [row(), row(128, error=None, conditions={}, date="2026-11-20T12:00:01Z")]
    assert database.record(rows) == 2
    assert database.select() == rows
    assert len(database) == 2
    assert database.rows("gemm", "sm_90a") == rows
    assert database.rows("gemm", "gfx942") == []


def test_nothing_is_made_before_the_first_write(database: PerfDatabase) -> None:
    assert database.select() == []
    assert database.prune() == 0
    assert len(database) == 0
    assert database.generation() == ()
    assert database.record([]) == 0
    assert not database.path.parent.exists()


def test_a_database_that_is_being_made_has_no_rows_yet(database: PerfDatabase) -> None:
    database.path.parent.mkdir()
    with closing(sqlite3.connect(database.path)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        assert database.select() == [] and len(database) == 0
    assert database.record([row()]) == 1


def test_the_generation_changes_with_the_rows_and_not_with_reading(database: PerfDatabase) -> None:
    database.record([row()])
    first = database.generation()
    database.select()
    assert database.generation() == first
    database.record([row(128)])
    assert database.generation() != first


def test_measuring_again_keeps_both_unless_it_was_the_same_second(database: PerfDatabase) -> None:
    later = row(us=4.0, date="2026-11-21T12:00:00Z")
    assert database.record([row(us=5.0), later]) == 2
    assert database.record([row(us=6.0)]) == 0
    assert [item.median_ns for item in database.select()] == [6000.0, 4000.0]
    ((best,),) = best_rows(database.select())
    assert best == later


def test_filters_narrow_and_pruning_removes_what_matches(database: PerfDatabase) -> None:
    database.record(
        [row(), row(128, tile=256), row(device="NVIDIA H100"), row(arch="gfx942"), row(operation="conv"),
         row(date="2026-01-01T00:00:00Z", us=9.0)]
    )  # fmt: skip
    assert len(database.select(Filter(operation="conv"))) == 1
    assert len(database.select(Filter(arch="gfx942"))) == 1
    assert len(database.select(Filter(device="*H1*"))) == 1
    assert len(database.select(Filter(kernel="*_256"))) == 1
    assert len(database.select(limit=2)) == 2
    assert database.prune(superseded=True) == 1
    assert database.prune(Filter(before="2026-06-01T00:00:00Z")) == 0
    assert database.prune(Filter(arch="gfx942")) == 1
    assert database.prune() == 4
    assert len(database) == 0


def test_the_best_are_the_fastest_of_each_problem_and_device() -> None:
    rows = [row(us=3, tile=1), row(us=1, tile=2), row(us=2, tile=3), row(128, us=7), row(device="other", us=9)]
    found = best_rows(rows, top=2)
    assert [[item.median_ns / 1e3 for item in group] for group in found] == [[1, 2], [7], [9]]


def test_writers_in_many_processes_lose_nothing(database: PerfDatabase) -> None:
    script = (
        "import sys, json\n"
        "from pathlib import Path\n"
        "from tilewright_kit.selection.measurements import Measurement\n"
        "from tilewright_server.engine.measurements.database import PerfDatabase\n"
        "record, base = json.loads(sys.argv[2]), int(sys.argv[3])\n"
        "for index in range(25):\n"
        "    record['sizes']['m'] = base + index\n"
        "    PerfDatabase(Path(sys.argv[1])).record([Measurement.from_dict(record)])\n"
    )
    text = json.dumps(row().to_dict())
    commands = [[sys.executable, "-c", script, str(database.path), text, str(base)] for base in (1, 1001, 2001)]
    running = [subprocess.Popen(command) for command in commands]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert len(database) == 75


def test_a_failed_write_leaves_nothing_behind(database: PerfDatabase) -> None:
    database.record([row()])
    with pytest.raises(TypeError):
        database.record([row(1), row(2, conditions={"what": object()})])
    assert len(database) == 1


def test_a_file_that_is_no_database_is_told_to_people_and_passed_over_by_strategies(
    database: PerfDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    database.path.parent.mkdir()
    database.path.write_text("this is no database, however one looks at it" * 100)
    with pytest.raises(InvalidArgumentError, match="no database of measurements"):
        database.select()
    assert database.rows("gemm", "sm_90a") == ()
    assert database.rows("gemm", "sm_90a") == ()
    assert sum("cannot be read" in record.message for record in caplog.records) == 1


def test_a_database_of_a_later_format_is_not_touched(database: PerfDatabase) -> None:
    database.record([row()])
    with sqlite3.connect(database.path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(InvalidArgumentError, match="format 99"):
        database.record([row(2)])


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_rows_travel_in_files(tmp_path: Path, ending: str) -> None:
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    rows = [row(), row(128, error=None, conditions={}), row(operation="conv", sizes={"c": 3})]
    file = tmp_path / f"rows{ending}"
    assert write_file(file, rows) == 3
    assert read_file(file) == rows


def test_files_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\.jsonl or \.parquet"):
        write_file(tmp_path / "rows.txt", [row()])
    with pytest.raises(NotFoundError):
        read_file(tmp_path / "none.jsonl")
    damaged = tmp_path / "rows.jsonl"
    damaged.write_text(json.dumps(row().to_dict()) + '\n{"operation": "gemm"}\n')
    with pytest.raises(InvalidArgumentError) as caught:
        read_file(damaged)
    assert caught.value.field == "rows.jsonl:2.signature"
