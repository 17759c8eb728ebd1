"""Nothing that a server started to compile outlives it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

COMPILES = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from tilewright_server.build.workers.process import Limits, run_limited
script = "echo $$ > driver; (echo $PPID > shell; exec sh -c 'echo $$ > child; exec sleep 600')"
run_limited(["/bin/sh", "-c", script + "; true"], folder=Path({folder!r}), env=dict(PATH={search!r}), limits=Limits())
"""
ASKS = """
import sys
sys.path[:0] = {path!r}
from tilewright_server.build.workers.helper import Helper
from tilewright_server.build.workers.process import Limits
helper = Helper("endless_worker", Limits())
helper.ask({{"ask": "compile", "name": {folder!r} + "/child", "options": []}})
"""


def alive(pid: int) -> bool:
    """True if it runs. A zombie has ended, whether somebody waits for it or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition) -> bool:
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(("script", "files"), [(COMPILES, ["driver", "shell", "child"]), (ASKS, ["child"])])
def test_compilers_end_with_a_killed_server(script: str, files: list[str], tmp_path: Path) -> None:
    path = [str(Path(__file__).parent), *sys.path]
    text = textwrap.dedent(script).format(path=path, folder=str(tmp_path), search=os.environ["PATH"])
    server = subprocess.Popen([sys.executable, "-c", text])
    try:
        written = [tmp_path / name for name in files]
        assert eventually(lambda: all(file.exists() and file.read_text().strip() for file in written))
        pids = [int(file.read_text()) for file in written]
        assert all(map(alive, pids))
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
    assert eventually(lambda: not any(map(alive, pids)))
