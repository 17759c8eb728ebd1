"""Results survive files of every kind, and a sweep that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright_gemm.commands.cases import GemmCase as Case
from tilewright_kit.types.errors import InvalidArgumentError
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
    with Output(path, resume=True) as output:
        assert output.results == RESULTS[:2]
    assert read_results(path) == RESULTS[:2]
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
