"""Processes that the server starts see its modules, and none that lie where it was started."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tilewright_server.protocol.subprocess_command import run_module


def test_a_folder_that_the_server_is_started_in_has_no_say(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a module of that folder was run')")
    (tmp_path / "tilewright_server").mkdir()
    (tmp_path / "tilewright_server" / "__init__.py").touch()
    command = run_module("tilewright_tools.cli", "--version")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
