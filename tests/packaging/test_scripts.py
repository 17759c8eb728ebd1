"""The small scripts behind `make doctor-dev` and continuous integration."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("lines", "last"),
    [
        (
            ["=== 10 passed, 2 skipped, 5 deselected in 3.50s (0:00:03) ===", "5 passed, 10 deselected in 1.25s"],
            "15 passed, 2 skipped in 4.75s",
        ),
        (["1 failed, 2 passed, 1 error in 2.00s", "1 error in 1.00s"], "1 failed, 2 passed, 2 errors in 3.00s"),
    ],
)
def test_runs_of_pytest_are_summed_in_a_closing_line(lines: list[str], last: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(["collected 17 items", *lines, "make: done"]) + "\n")
    done = run("closing_line.py", str(log))
    assert done.stdout.splitlines() == [*lines, last]
    assert done.returncode == 0


def test_a_log_without_a_run_is_a_failure(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("make: *** no rule\n")
    assert run("closing_line.py", str(log)).returncode == 1


def test_missing_tools_are_listed_with_the_way_to_get_them() -> None:
    lines = run("doctor_dev.py").stdout.splitlines()
    assert any(line.startswith(("ok", "missing")) and "compiler for AMD GPUs" in line for line in lines)
    torch = next(at for at, line in enumerate(lines) if "PyTorch" in line)
    if importlib.util.find_spec("torch") is None:
        assert lines[torch].startswith("missing")
        assert "pip install torch" in lines[torch + 1]
    else:
        assert lines[torch].startswith("ok")
