"""The benchmark suites run and write what they measured. Their figures are no matter here."""

from __future__ import annotations

import json
import re
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
