"""`tilewright bench attention`: sweeps that check what they time."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tilewright_tools.cli.console.exits import Exit

QUICK = ("--device", "cpu:0", "--repeat", "2", "--warmup", "1", "--finalists", "0", "--limit", "1")


@pytest.fixture
def bench(cli: Any, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TILEWRIGHT_CPU_THREADS", "1")
    return lambda *arguments: cli("bench", "attention", "--cache-dir", cache_dir, *QUICK, *arguments)


@pytest.mark.extended
def test_a_sweep_checks_and_writes_its_results(bench: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    ran = bench("--shapes", "2x4/2x17/29x32,1x2x33x32c", "--output", output)
    assert ran.code == Exit.OK, ran.err
    for label in ("fwd 2x4/2x17/29x32 fp32", "fwd 1x2x33x32 fp32 top_left"):
        assert label in ran.out
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert [row["status"] for row in rows] == ["ok"] * 2
    assert {row["operation"] for row in rows} == {"attention"}


@pytest.mark.extended
def test_gradients_and_pages_are_swept(bench: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    ran = bench("--shapes", "2x4/2x17/29x32c", "--direction", "fwd,bwd", "--dtype", "fp32,bf16", "--output", output)
    assert ran.code == Exit.OK, ran.err
    ran = bench("--shapes", "2x4/2x1/300x32", "--page", "0,16")
    assert ran.code == Exit.OK, ran.err
    assert "pages of 16" in ran.out
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert {row["operation"] for row in rows} == {"attention", "attention_backward"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--shapes", "no_such_list"), "decode"),
        (("--shapes", "1x2x33x32", "--layout", "sbhd"), "bshd"),
        (("--shapes", "1x2x33x32", "--mask", "diagonal"), "bottom_right"),
        (("--shapes", "1x2x33x32", "--direction", "sideways"), "bwd"),
        (("--shapes", "1x2x33x32", "--direction", "bwd", "--page", "16"), "no gradients of pages"),
    ],
)
def test_what_cannot_be_meant_is_refused(bench: Any, arguments: tuple[str, ...], says: str) -> None:
    ran = bench(*arguments)
    assert ran.code == Exit.USAGE
    assert says in ran.err


@pytest.mark.extended
def test_lengths_dropout_and_new_rows_of_caches_are_swept(bench: Any) -> None:
    steps = ("--dropout", "0.1", "--bias", "alibi", "--sinks")
    ran = bench("--shapes", "2x4/2x7/19x16", "--varlen", "no,yes", *steps)
    assert ran.code == Exit.OK, ran.err
    assert "varlen dropout 0.1 alibi +sinks" in ran.out
    ran = bench("--shapes", "2x4/2x3/29x16", "--direction", "append", "--page", "0,16", "--rope", "half")
    assert ran.code == Exit.OK, ran.err
    assert "append 2x4/2x3/29x16 fp32 pages of 16 rope half" in ran.out
