"""`tilewright bench` and `tilewright perf`: from shapes to a database that the server chooses by."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tilewright_gemm.commands.cases import GemmCase
from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.problems.sweeping import _Run
from tilewright_tools.tuning.results import TIME_OVER, Result, Stamp

PLANTED = Path(__file__).parents[1] / "server" / "tuning"
QUICK = ("--device", "cpu:0", "--repeat", "4", "--warmup", "1", "--finalists", "2")


@pytest.fixture
def bench(cli: Any, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TILEWRIGHT_CPU_THREADS", "1")
    return lambda *arguments: cli("bench", "gemm", "--cache-dir", cache_dir, *QUICK, *arguments)


@pytest.fixture
def result() -> Any:
    """A result by the name of its kernel."""

    def made(kernel: str = "fast", status: str = "ok", reason: str = "") -> Result:
        stamp = Stamp("gemm", "x86-64-v3", "CPU", "", "0.1.0", {})
        return Result(case=GemmCase(8, 8, 8), kernel=kernel, config={}, status=status, reason=reason, stamp=stamp)

    return made


@pytest.mark.extended
def test_a_sweep_writes_its_results_prints_a_table_and_is_resumed(bench: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    ran = bench("--shapes", "tiny,8x24x40", "--dtype", "fp32", "--limit", "2", "--output", output)
    assert ran.code == Exit.OK, ran.err
    for label in ("16x16x16 fp32 rcr", "64x48x32 fp32 rcr", "33x17x65 fp32 rcr", "8x24x40 fp32 rcr"):
        assert label in ran.out
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert [row["status"] for row in rows] == ["ok"] * 8
    assert all(float(row["median_ns"]) > 0 for row in rows)
    before = output.read_text()
    again = bench("--shapes", "tiny,8x24x40", "--limit", "2", "--output", output, "--resume", "--json")
    assert output.read_text() == before
    record = json.loads(again.out)
    assert [line["tried"] for line in record["problems"]] == [2, 2, 2, 2]
    assert all(line["tflops"] > 0 and line["kernel"] for line in record["problems"])


@pytest.mark.extended
def test_what_is_recorded_can_be_listed_carried_over_and_chosen_by(bench: Any, cli: Any, tmp_path: Path) -> None:
    database, other = tmp_path / "perf.sqlite", tmp_path / "other.sqlite"
    ran = bench("--shapes", "32x32x32", "--limit", "3", "--record", "--database", database)
    assert ran.code == Exit.OK, ran.err
    listed = cli("perf", "list", "--database", database, "--json").json
    assert {row["operation"] for row in listed} == {"gemm"}
    assert len({row["kernel"] for row in listed}) == 3
    ((best,),) = cli("perf", "best", "--database", database, "--json").json
    assert best["sizes"]["m"] == 32
    assert "m=32" in cli("perf", "best", "--database", database).out
    export = tmp_path / "export.jsonl"
    assert cli("perf", "export", export, "--database", database).code == Exit.OK
    assert f"{len(listed)} measurements added" in cli("perf", "import", export, "--database", other).err
    assert cli("perf", "list", "--database", other, "--json").json == listed
    assert cli("perf", "prune", "--database", other).code == Exit.USAGE
    assert cli("perf", "prune", "--all", "--database", other).code == Exit.OK
    assert f"{len(listed)} measurements added" in cli("perf", "import", database, "--database", other).err
    assert cli("perf", "prune", "--all", "--database", other).code == Exit.OK
    assert cli("perf", "list", "--database", other, "--json").json == []


@pytest.mark.extended
def test_a_kernel_that_crashes_or_is_wrong_makes_the_exit_code_say_so(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_DISABLED_PLUGINS", "gemm")
    monkeypatch.setenv("PYTHONPATH", str(PLANTED))
    monkeypatch.syspath_prepend(str(PLANTED))
    ran = bench(
        "--shapes", "64x48x1100", "--plugin", "planted_gemm", "--filter", "*x[4-5]??_*", "--timeout", "5", "--json"
    )  # fmt: skip
    assert ran.code == Exit.FAILED
    assert "crashed: 64x48x1100 fp32 rcr" in ran.err
    (line,) = json.loads(ran.out)["problems"]
    assert (line["tried"], line["failed"]) == (2, 1)
    assert line["kernel"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--shapes", "no_such_list"), "decode"),
        (("--shapes", "8x8x8", "--configs", "no_such_set"), "kernel set"),
        (("--shapes", "8x8x8", "--init", "zeros"), "trunc-int"),
        (("--shapes", "8x8x8", "--timer", "sun"), "host"),
        (("--shapes", "8x8x8", "--shard", "3/2"), "2/8"),
        (("--shapes", "8x8x8", "--resume"), "--output"),
        (("--shapes", "8x8x8", "--output", "out.txt"), ".parquet"),
        (("--shapes", "8x8x8", "--dtype", "fp17"), "fp17"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(bench: Any, arguments: Any, says: str) -> None:
    ran = bench(*arguments)
    assert ran.code == Exit.USAGE
    assert says in ran.err
    assert ran.out == ""


def test_a_device_that_the_machine_has_not_is_what_it_lacks(bench: Any) -> None:
    ran = bench("--shapes", "8x8x8", "--device", "cpu:7")
    assert ran.code == Exit.MISSING
    assert "cpu:0" in ran.err


@pytest.mark.extended
def test_parts_of_a_sweep_make_the_whole(bench: Any) -> None:
    parts = [bench("--shapes", "tiny", "--limit", "1", "--shard", f"{part}/2", "--json").json for part in (1, 2)]
    sizes = [[line["problem"]["m"] for line in part["problems"]] for part in parts]
    assert sizes == [[16, 33], [64]]


def test_help_has_examples(cli: Any) -> None:
    assert "--flush-cache" in cli("bench", "gemm", "--help").out
    assert "tilewright bench gemm --shapes decode" in " ".join(cli("bench", "gemm", "--help").out.split())
    assert "tilewright perf prune --superseded" in " ".join(cli("perf", "--help").out.split())


def test_kernels_that_were_not_measured_are_told_with_the_reason(result: Any) -> None:
    """Time is one reason; that the operands of a problem cannot be made is another, which makes the sweep fail."""
    run = _Run.__new__(_Run)
    run.results = [result(), result("late", status="skipped", reason=f"the 5 {TIME_OVER}")]
    assert run._skipped() == (1, {})
    assert not run.failed
    run.results += [result(name, status="skipped", reason="its operands cannot be made") for name in ("a", "b")]
    late, others = run._skipped()
    assert (late, list(others.values())) == (1, [2])
    assert "operands" in next(iter(others))
    assert run.failed
