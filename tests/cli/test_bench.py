"""The benchmark suites run and write what they measured. Their figures are no matter here."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright_arch import detect_cpu

RUN = Path(__file__).resolve().parents[2] / "bench" / "run.py"


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["gemm", "conv", "selection", "build", "service"])
@pytest.mark.some(1)
@pytest.mark.extended
def test_suite_writes_tables_for_people_and_programs(suite, tmp_path):
    output = tmp_path / "figures"
    command = [sys.executable, str(RUN), "--quick", "--suite", suite, "--threads", "1", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(output.with_suffix(".json").read_text())
    assert record["machine"]["cpu"]
    assert record["machine"]["versions"]["numpy"]
    assert record["tables"]
    for table in record["tables"]:
        assert table["rows"], table["title"]
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
        assert f"### {table['title']}" in output.with_suffix(".md").read_text()


MACHINE = {
    "date": "2026-11-29 00:13:22 +0000",
    "cpu": "a processor of a long name",
    "cores": 2,
    "arch": "x86-64-v4",
    "load": 0.1,
    "kernel": "6.1",
    "python": "3.11",
    "compiler": "c++ (Debian 12.2.0-14+deb12u1) 12.2.0",
    "versions": {"numpy": "2.4.6"},
    "commit": "abc",
}


def test_tables_go_into_their_part_of_a_page(tmp_path):
    bench = runpy.run_path(str(RUN))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- load -->\nold\n<!-- end of load -->\nafter\n")
    table = {"title": "t" * 30 + " word" * 20, "columns": ["a" * 60, "b" * 60], "rows": [[1, 2.5]], "notes": ["- n"]}
    for _ in range(2):
        bench["put_into_page"](page, "load", bench["markdown"](MACHINE, [table]))
    before, text, after = re.split("<!-- load -->\n|<!-- end of load -->\n", page.read_text())
    assert (before, after) == ("before\n", "after\n")
    assert "old" not in text and text.count("| 1 | 2.50 |") == 1
    assert all(len(line) <= 100 or line.startswith("|") for line in text.splitlines())
    with pytest.raises(SystemExit, match="no part between"):
        bench["put_into_page"](page, "other", "")
    assert "<!-- load -->\n" in (RUN.parents[1] / "docs" / "benchmarks.md").read_text()


def test_quick_figures_are_not_put_into_a_page(tmp_path):
    result = tmp_path / "quick.json"
    result.write_text(json.dumps({"machine": MACHINE, "quick": True, "tables": []}))
    for words in (("--quick", "--suite", "load"), ("--result", str(result))):
        command = [sys.executable, str(RUN), "--page", "load", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
        assert (done.returncode, "figures of record" in done.stderr or "no figure of record" in done.stderr) == (
            2,
            True,
        )


def compile_set(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN.with_name("compile_set.py")), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.extended
def test_every_kernel_of_a_set_is_compiled_and_the_slowest_are_named():
    done = compile_set("conv", "--arch", detect_cpu().id, "--set", "tiny")
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: longer than promised, on a busy machine
    assert re.search(r"conv for \S+: 1 kernels, median \d+\.\d\d s", done.stdout), done.stdout
    assert re.search(r"^  \d+\.\d\d s grouped_conv_fwd_", done.stdout, re.MULTILINE), done.stdout


def test_kernels_that_do_not_exist_are_refused_with_what_there_is():
    done = compile_set("gem", "--arch", detect_cpu().id)
    assert done.returncode == 2
    assert "operations: " in done.stderr
    assert "gemm" in done.stderr
