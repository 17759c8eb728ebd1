"""The benchmark suites run and write what they measured. Their figures are no matter here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "bench" / "run.py"


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["gemm", "conv", "selection", "build", "service"])
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
