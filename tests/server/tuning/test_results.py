"""Results survive files of every kind, and a sweep that was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright_gemm.commands.cases import GemmCase as Case
from tilewright_kit.types.errors import InvalidArgumentError, UnavailableError
from tilewright_tools.tuning.results import Output, Result, Stamp, read_results
from tilewright_tools.tuning.summary import summarise
from tilewright_tools.tuning.sweep import PeerTime

STAMP = Stamp("gemm", "sm_90a", "NVIDIA H200", "CUDA 13.0", "0.1.0", {"init": "normal", "rotating": 4})


def result(kernel: str = "fast", us: float = 2.0, **changes: object) -> Result:
    found = Result(
        case=Case(64, 32, 16, "bf16", bias="yes"), kernel=kernel, config={"tile": [128, 64, 32], "persistent": True},
        status="ok", place=1, median_ns=us * 1e3, p10_ns=us * 900, p90_ns=us * 1100, samples=20, error=1e-3,
        flops=65536, bytes_moved=7168, ideal_ns=500.0, key=f"{kernel}@sm_90a#0", signature="dtype_a=bf16",
        sizes={"m": 64, "n": 32, "k": 16}, toolchain="NVRTC 13.0", date="2026-11-20T12:00:00Z", stamp=STAMP,
    )  # fmt: skip
    return found.replace(**changes)


RESULTS = [
    result(),
    result("slow", 6.0, place=2, cut=True),
    result("bad", 0.0, status="wrong", reason='off, "really"', error=None, samples=0, p10_ns=0.0, p90_ns=0.0),
]


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_results_come_back_as_they_were(tmp_path: Path, ending: str) -> None:
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"out{ending}"
    with Output(path) as output:
        for item in RESULTS:
            output.add(item)
        output.add(result(us=1.0))
    expected = [result(us=1.0), *RESULTS[1:]]
    assert read_results(path) == expected
    assert sorted(item.name for item in tmp_path.iterdir()) == [path.name]
    with Output(path, resume=True) as output:
        assert output.results == expected
    with Output(path) as output:
        assert output.results == []


def test_what_a_killed_sweep_had_is_in_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    killed = Output(path)
    killed.add(RESULTS[0])
    killed.add(RESULTS[1])
    killed._journal.close()
    journal = tmp_path / "out.csv.journal"
    journal.write_text(journal.read_text() + '{"m": 64, "cut o')
    again = Output(path, resume=True)
    again.add(RESULTS[2])  # and is killed, too
    again._journal.close()
    with Output(path, resume=True) as output:
        assert output.results == RESULTS
    assert read_results(path) == RESULTS
    assert not journal.exists()


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="files"):
        Output(tmp_path / "out.txt")
    path = tmp_path / "out.csv"
    path.write_text("m,n,k,kernel\n1,2,x,y\n")
    with pytest.raises(InvalidArgumentError):
        Output(path, resume=True)


def test_a_summary_compares_with_the_model_the_peak_and_the_peer() -> None:
    case = RESULTS[0].case
    other = Case(1, 1, 1)
    (line, empty) = summarise(
        [case, other], [result(us=3.0), *RESULTS, result("model", 4.0)], {case: PeerTime(case, "torch", 1000.0)}
    )
    assert line.best == RESULTS[0]
    assert line.model_efficiency == 1.0
    assert line.over_peer == 0.5
    assert line.to_dict()["share_of_peak"] == 0.25
    assert (line.tried, line.failed) == (4, 1)
    assert line.cells()[1:7] == ("2", "0.03277", "3.584", "25%", "100%", "0.50")
    assert empty.best is None
    assert empty.cells()[7] == "none was right"


def test_two_sweeps_do_not_write_one_output(tmp_path: Path) -> None:
    with Output(tmp_path / "rows.jsonl") as first:
        first.add(result())
        with pytest.raises(UnavailableError, match="another sweep") as caught:
            Output(tmp_path / "rows.jsonl")
        assert "of its own" in caught.value.fix
    assert [item.kernel for item in read_results(tmp_path / "rows.jsonl")] == ["fast"]


def test_a_disk_that_fills_keeps_what_was_written_and_says_so(tmp_path: Path) -> None:
    """In a process whose files may not grow beyond some results."""
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from test_results import Output, result\n"
        "from tilewright_kit.types.errors import UnavailableError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))\n"
        "kept = 0\n"
        "try:\n"
        "    with Output(Path(sys.argv[1])) as output:\n"
        "        for number in range(100):\n"
        "            output.add(result().replace(kernel=f'k{number}'))\n"
        "            kept += 1\n"
        "except UnavailableError as error:\n"
        "    print(kept, error.rule, error.fix)\n"
    )
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, "-c", script, str(path), str(Path(__file__).parent)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kept = int(told.split()[0])
    assert 1 < kept < 100
    assert "results_file" in told and "free space" in told
    with Output(path, resume=True) as again:
        assert [item.kernel for item in again.results] == [f"k{number}" for number in range(kept)]
        again.add(result())
    assert len(read_results(path)) == kept + 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("median_ns", "nan"), ("median_ns", -3.0), ("median_ns", 0.0), ("p10_ns", "inf"), ("samples", -1)],
)
def test_figures_that_nothing_can_have_measured_are_refused(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(result().to_record() | {field: value}) + "\n")
    with pytest.raises(InvalidArgumentError, match="is no result of a sweep") as caught:
        read_results(path)
    assert "rows.jsonl:1" in caught.value.reason
