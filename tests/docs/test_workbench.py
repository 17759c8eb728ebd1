"""The page about kernels of one's own: its commands and its Python, run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright_tools.cli.private_server import PrivateServer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "workbench.md").read_text("utf-8")
COMMANDS = re.findall(r"^\$ tilewright (.*)$", PAGE, re.MULTILINE)
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workbench")


@pytest.fixture(scope="module")
def environment(folder: Path) -> Iterator[dict[str, str]]:
    with PrivateServer(["--cache-dir", str(folder / "cache")]) as target:
        yield {**os.environ, "TILEWRIGHT_TARGET": target, "TILEWRIGHT_CACHE_DIR": str(folder / "cache")}


def test_the_page_has_its_commands() -> None:
    assert len(COMMANDS) == 9
    assert len(PYTHON) == 1


@pytest.mark.extended
def test_the_commands_of_the_page_run_in_its_order(folder: Path, environment: dict[str, str]) -> None:
    for line in COMMANDS:
        words = shlex.split(line)
        target = words[words.index(">") + 1] if ">" in words else ""
        words = words[: words.index(">")] if target else words
        command = [sys.executable, "-m", "tilewright_tools.cli", *words]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, (line, done.stderr)
        if target:
            (folder / target).write_text(done.stdout)


def test_the_python_of_the_page_runs(folder: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", PYTHON[0]]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
