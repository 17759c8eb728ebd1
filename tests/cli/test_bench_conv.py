"""`tilewright bench conv`: sweeps of every direction, recorded so that the server chooses by them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tilewright_tools.cli.console.exits import Exit

QUICK = ("--device", "cpu:0", "--repeat", "2", "--warmup", "1", "--finalists", "0", "--limit", "1")
WAYS = "fwd,bwd_data,bwd_weight"
OPERATIONS = {"conv", "conv_backward_data", "conv_backward_weight"}


@pytest.fixture
def bench(cli: Any, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TILEWRIGHT_CPU_THREADS", "1")
    return lambda *arguments: cli("bench", "conv", "--cache-dir", cache_dir, *QUICK, *arguments)


@pytest.mark.extended
def test_a_sweep_of_every_direction_writes_its_results_and_is_resumed(bench: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    shapes = ("--shapes", "2x6x8x9x7:3s2p1g2,1x4x6x11:3", "--direction", WAYS)
    ran = bench(*shapes, "--output", output)
    assert ran.code == Exit.OK, ran.err
    for label in ("fwd 2x6x8x9x7:3s2p1g2 fp32", "bwd_data 2x6x8x9x7:3s2p1g2 fp32", "bwd_weight 1x4x6x11:3s1p0 fp32"):
        assert label in ran.out
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert [row["status"] for row in rows] == ["ok"] * 6
    assert {row["operation"] for row in rows} == OPERATIONS
    assert {(row["direction"], row["size"]) for row in rows} == {
        (way, size) for way in WAYS.split(",") for size in ("9x7", "11")
    }
    before = output.read_text()
    again = bench(*shapes, "--output", output, "--resume", "--json")
    assert output.read_text() == before
    lines = json.loads(again.out)["problems"]
    assert [line["tried"] for line in lines] == [1] * 6
    assert all(line["problem"]["filter"] == "3" for line in lines)


@pytest.mark.extended
def test_what_is_recorded_can_be_listed_and_batches_can_be_changed(bench: Any, cli: Any, tmp_path: Path) -> None:
    database = tmp_path / "perf.sqlite"
    options = ("--direction", "fwd,bwd_weight", "--batch", "3", "--dtype", "bf16")
    ran = bench("--shapes", "2x4x6x8x8:3", *options, "--record", "--database", database)
    assert ran.code == Exit.OK, ran.err
    listed = cli("perf", "list", "--database", database, "--json").json
    assert {row["operation"] for row in listed} == {"conv", "conv_backward_weight"}
    assert {row["sizes"]["images"] for row in listed} == {3}
    assert all("_bf16_" in row["kernel"] for row in listed)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--shapes", "no_such_list"), "resnet50"),
        (("--shapes", "1x5x6x8x8:3g2"), "multiple"),
        (("--shapes", "1x4x6x8x8:3", "--direction", "up"), "bwd_data"),
        (("--shapes", "1x4x6x8x8:3", "--layout", "rcr"), "channels_first"),
    ],
)
def test_what_cannot_be_meant_is_refused(bench: Any, arguments: tuple[str, ...], says: str) -> None:
    ran = bench(*arguments)
    assert ran.code == Exit.USAGE
    assert says in ran.err
