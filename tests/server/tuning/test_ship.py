"""From a sweep's measurements to the file that a plugin ships, and to a judgement of the strategies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tilewright_arch
from tilewright_gemm.commands.cases import GemmCase as Case
from tilewright_gemm.plugin import GemmOperation
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.selection.measured import Measured
from tilewright_kit.selection.measurements import ShippedMeasurements, point_of
from tilewright_server.engine.measurements.database import PerfDatabase
from tilewright_server.engine.measurements.exchange import write_file
from tilewright_tools.tuning import evaluate
from tilewright_tools.tuning import export as ship
from tilewright_tools.tuning.results import Output, Result, Stamp

ARCH = tilewright_arch.load("x86-64-v3")
DEVICE = device_of(ARCH)
OPERATION = GemmOperation()


def results_of(case: Case, count: int = 6) -> list[Result]:
    """As if the model's favourites were the slowest, by a fifth each."""
    problem = OPERATION.parse(case.request())
    point = point_of(problem)
    stamp = Stamp("gemm", ARCH.id, DEVICE.name)
    return [
        Result(
            case, config.name, config.to_dict(), "ok", place=place, median_ns=1e4 * case.m * 1.2 ** (count - place),
            samples=9, flops=problem.flops, signature=point.signature, sizes=dict(point.sizes),
            date="2026-11-20T12:00:00Z", stamp=stamp, key=str(config.key(ARCH.id)),
        )
        for place, config in enumerate(OPERATION.candidates(problem, DEVICE)[:count], 1)
    ]  # fmt: skip


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "perf.sqlite"
    rows = [item.measurement() for m in (256, 300) for item in results_of(Case(m, 256, 256))]
    PerfDatabase(path).record([row for row in rows if row is not None])
    return path


def test_the_fastest_three_of_every_problem_are_shipped_and_choose_again(
    database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "measured" / "some.jsonl"
    assert ship.main(["--operation", "gemm", "--database", str(database), "--arch", ARCH.id, "--out", str(out)]) == 0
    assert "6 of 12 measurements" in capsys.readouterr().err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["sizes"]["m"] for line in lines] == [256] * 3 + [300] * 3
    assert "grouped" not in lines[0]["config"]
    problem = OPERATION.parse(Case(256, 256, 256).request())
    measured = Measured([ShippedMeasurements([out])])
    best = measured.rank(OPERATION, problem, OPERATION.candidates(problem, DEVICE), DEVICE)[0]
    assert best.config.name == results_of(Case(256, 256, 256))[-1].kernel


def test_an_export_ships_like_its_database_and_twice_the_same(database: Path, tmp_path: Path) -> None:
    export = tmp_path / "export.jsonl"
    write_file(export, PerfDatabase(database).select())
    texts = []
    for source in (database, export):
        out = tmp_path / "out.jsonl"
        assert (
            ship.main(
                ["--operation", "gemm", "--database", str(source), "--arch", ARCH.id, "--out", str(out), "--top", "2"]
            )
            == 0
        )
        texts.append(out.read_text())
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 4


@pytest.mark.parametrize("arguments", [{"--arch": "no_such_arch"}, {"--database": "none.sqlite"}, {"--device": "H*"}])
def test_nothing_to_ship_is_an_error(
    database: Path, tmp_path: Path, arguments: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "--operation": "gemm",
        "--database": str(database),
        "--arch": ARCH.id,
        "--out": str(tmp_path / "out.jsonl"),
    } | arguments
    assert ship.main([part for pair in given.items() for part in pair]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "out.jsonl").exists()


def test_strategies_are_judged_on_problems_that_they_have_not_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.jsonl"
    with Output(path) as output:
        for m in (192, 256, 300, 384, 512):
            for item in results_of(Case(m, 256, 256)):
                output.add(item)
    assert evaluate.main([str(path), "--units", "4"]) == 0
    lines = {line[:17].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {"heuristic", "measured", "measured, shipped"}
    means = {name: float(line.split("mean ")[1].split()[0]) for name, line in lines.items()}
    assert means["measured"] > means["heuristic"]
    assert evaluate.main([str(tmp_path / "none.jsonl")]) == 1
