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


def test_the_screens_of_the_readme_are_recorded_in_their_places() -> None:
    """Two screens, of 80 and of 120 columns, as wide as that at most, and the day on which they were recorded."""
    spec = importlib.util.spec_from_file_location("record_screens", ROOT / "scripts" / "record_screens.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "README.md").read_text("utf-8")
    blocks = [found[2].splitlines() for found in script._SCREEN.finditer(page)]
    screens = dict(zip((80, 120), blocks, strict=True))
    assert set(screens) == set(script.WIDTHS)
    for columns, lines in screens.items():
        assert len(lines) > 5
        assert columns - 10 < max(map(len, lines)) <= columns
    found = script.recorded(page, lambda columns: [f"of {columns}", "columns"], "2031-02-03")
    assert "console\n$ tilewright demo --dtype fp32\nof 80\ncolumns\n```" in found
    assert "console\n$ tilewright demo --dtype fp32\nof 120\ncolumns\n```" in found
    assert "Recorded on 2031-02-03" in found
    assert script.recorded(found, screens.__getitem__, "2026-01-01") == script._DATE.sub("Recorded on 2026-01-01", page)
    with pytest.raises(ValueError, match="2 expected"):
        script.recorded(page.replace("demo --dtype fp32", "demo"), screens.__getitem__, "2026-01-01")
    assert script.shown("50 %\r\x1b[2K100 %  \r\n\r\n\x1b[1mrow\x1b[0m  1 \r\n") == ["100 %", "row  1"]
