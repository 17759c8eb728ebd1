"""The user's own server: started by the first program that connects, ended by a command or when nobody needs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilewright as tw
from tilewright_tools.cli.private_server import is_listening

README = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
FIRST = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[0]


@pytest.fixture
def environment(tmp_path: Path, kernel_cache: Path) -> dict[str, str]:
    """A user without a server."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("TILEWRIGHT_")}
    own = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    return {**given, **own, "TILEWRIGHT_CACHE_DIR": str(kernel_cache)}


def python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def command(*words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tilewright_tools.cli", *words],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_readmes_first_python_starts_a_server_that_the_next_program_uses_and_stop_ends(
    environment: dict[str, str], tmp_path: Path
) -> None:
    target = f"unix:{tmp_path}/tilewright/tilewright.sock"
    try:
        first = python(FIRST, environment)
        assert first.returncode == 0, first.stderr
        assert "started your server in the background" in first.stderr
        assert is_listening(target)
        second = python("import tilewright as tw\nwith tw.connect() as client: print(client.target)", environment)
        assert (second.stdout.strip(), second.stderr) == (target, "")
    finally:
        stopped = command("stop", environment=environment)
    assert stopped.returncode == 0, stopped.stderr
    assert not is_listening(target)
    assert command("stop", environment=environment).returncode == 3


@pytest.mark.parametrize(
    ("given", "call"), [({}, "tw.connect(start=False)"), ({"TILEWRIGHT_START": "0"}, "tw.connect()")]
)
def test_no_server_is_started_where_that_is_not_wanted(
    environment: dict[str, str], given: dict[str, str], call: str
) -> None:
    done = python(f"import tilewright as tw\n{call}", {**environment, **given})
    assert done.returncode == 1
    assert "UnavailableError" in done.stderr
    assert "started your server" not in done.stderr


@pytest.mark.extended
def test_a_server_ends_when_it_has_had_no_client_for_a_while(environment: dict[str, str], tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "tilewright_tools.cli", "serve", "--idle-exit-s", "0.3"]
    with subprocess.Popen(serve, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("ready")
        with tw.connect(f"unix:{tmp_path}/tilewright/tilewright.sock") as client:
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(1.2)
            assert not client.closed
        assert server.wait(60) == 0
