"""The Multi-Process Service of a server: whose daemon it uses, when that ends, what is said where there is none. The
daemon is ``fake_mps_control.py``; ``tests/gpu/test_mps.py`` has the real one.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilewright_kit.types.errors import UnavailableError
from tilewright_server.devices.cuda.mps import daemon as control
from tilewright_server.hosting.mps import Mps

FAKE = Path(__file__).with_name("fake_mps_control.py")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of what lives as long as a server; CUDA's own variable names a folder where nothing is. Sockets have short
    paths."""
    with tempfile.TemporaryDirectory(prefix="tw-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", f"{folder}/users")
        yield Path(folder) / "runtime"


@pytest.fixture
def installed(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / control.CONTROL
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


@pytest.fixture
def absent(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def users_daemon(installed: None, runtime: Path) -> Iterator[Path]:
    folder = runtime.with_name("users")
    folder.mkdir()
    subprocess.run([control.CONTROL, "-d"], check=True)
    yield folder
    control.ask(folder, "quit")


def comes(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def lives(pipe: Path) -> bool:
    return control.ask(pipe, "get_server_list")


def test_a_daemon_of_its_own_begins_and_ends_with_the_server(installed: None, runtime: Path) -> None:
    before = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
    mps = Mps("auto", runtime)
    mps.start(has_gpu=True)
    pipe = Path(mps.folder)
    assert pipe.is_relative_to(runtime) and lives(pipe)
    assert pipe.stat().st_mode & 0o777 == 0o700
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(pipe), "processes of devices do not see it"
    mps.close()
    mps.close()
    assert not lives(pipe) and not pipe.exists()
    assert list(runtime.iterdir()) == []
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == before


def test_a_runtime_folder_whose_path_is_too_long_for_sockets_is_left(installed: None, runtime: Path) -> None:
    mps = Mps("require", runtime / ("long" * 20))
    mps.start(has_gpu=True)
    pipe = Path(mps.folder)
    assert not pipe.is_relative_to(runtime) and lives(pipe)
    mps.close()
    assert not pipe.parent.exists()


def test_a_daemon_that_runs_for_the_user_is_used_and_stays(users_daemon: Path, runtime: Path) -> None:
    mps = Mps("require", runtime)
    mps.start(has_gpu=True)
    assert mps.folder == str(users_daemon)
    mps.close()
    assert lives(users_daemon)


@pytest.mark.extended
def test_a_daemon_ends_with_a_server_that_is_killed(installed: None, runtime: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tilewright_server.hosting.mps import Mps;"
        "mps = Mps('require', Path(sys.argv[1])); mps.start(True); print(mps.folder, flush=True); time.sleep(600)"
    )
    server = subprocess.Popen([sys.executable, "-c", script, str(runtime)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server.stdout:
        pipe = Path(server.stdout.readline().strip())
    assert lives(pipe)
    server.send_signal(signal.SIGKILL)
    server.wait()
    assert comes(lambda: not lives(pipe)) and comes(lambda: list(runtime.iterdir()) == [])


def test_nobody_who_uses_the_gpu_is_cut_off(installed: None, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright_server.hosting.mps._END_S", 0.2)
    mps = Mps("auto", runtime)
    mps.start(has_gpu=True)
    pipe = Path(mps.folder)
    client = pipe / "client"
    client.touch()
    mps.close()  # does not wait for it
    time.sleep(0.3)
    assert lives(pipe)
    client.unlink()
    assert comes(lambda: not pipe.exists())


def test_nothing_is_started_unasked_or_without_a_gpu(installed: None, runtime: Path) -> None:
    for wish, has_gpu in (("off", True), ("auto", False)):
        mps = Mps(wish, runtime)
        mps.start(has_gpu)
        assert mps.folder == "" and not runtime.exists()
        mps.close()


def test_a_missing_program_is_a_line_or_an_error(absent: None, runtime: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tilewright"):
        Mps("auto", runtime).start(has_gpu=True)
    assert len(caplog.records) == 1
    assert "is not installed" in caplog.text and "0.3 ms" in caplog.text
    with pytest.raises(UnavailableError) as caught:
        Mps("require", runtime).start(has_gpu=True)
    assert (caught.value.field, caught.value.rule) == ("mps", "mps")
    assert control.CONTROL in caught.value.fix
    with pytest.raises(UnavailableError, match="no NVIDIA GPU"):
        Mps("require", runtime).start(has_gpu=False)


def test_a_daemon_that_does_not_start_says_why(
    installed: None, runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_MPS_BROKEN", "Failed to start: insufficient permissions")
    with pytest.raises(UnavailableError, match="insufficient permissions"):
        Mps("require", runtime).start(has_gpu=True)
    with caplog.at_level(logging.INFO, "tilewright"):
        mps = Mps("auto", runtime)
        mps.start(has_gpu=True)
    assert mps.folder == "" and "insufficient permissions" in caplog.text
    assert comes(lambda: list(runtime.iterdir()) == [])


def test_doctor_says_what_runs_and_what_its_absence_costs(users_daemon: Path) -> None:
    assert str(users_daemon) in control.describe()
    assert "Fix:" not in control.describe()
    control.ask(users_daemon, "quit")
    assert comes(lambda: "no daemon runs" in control.describe())
    assert "--mps auto" in control.describe().partition("Fix: ")[2]


def test_doctor_says_how_to_get_the_program(absent: None) -> None:
    assert "not installed" in control.describe()
    assert control.INSTALL in control.describe()


@pytest.mark.extended
def test_a_server_that_requires_it_does_not_start_without(absent: None, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tilewright_tools.cli", "serve", "--listen", f"unix:{tmp_path}/s", "--mps"]
    done = subprocess.run([*command, "require"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "the Multi-Process Service is required" in done.stderr
    done = subprocess.run([*command, "maybe"], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "require" in done.stderr


SERVER = """
import runpy, sys
from tilewright_server.hosting.mps import Mps
start = Mps.start
Mps.start = lambda self, has_gpu: start(self, True)  # as on a machine with a GPU
sys.argv[0] = "tilewright"
runpy.run_module("tilewright_tools.cli", run_name="__main__")
"""
CLIENT = """
import os, sys
import tilewright as tw
tw.connect(sys.argv[1]).close()
print(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "none"))
"""


@pytest.mark.extended
def test_clients_on_this_machine_are_told_where_to_join(installed: None, runtime: Path, tmp_path: Path) -> None:
    def joined(target: str) -> str:
        env = {key: value for key, value in os.environ.items() if key != "CUDA_MPS_PIPE_DIRECTORY"}
        argv = [sys.executable, "-c", CLIENT, target]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=120).stdout.strip()

    socket = f"unix:{runtime.parent}/s"
    listen = ["--listen", socket, "--listen", "127.0.0.1:0", "--insecure", "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-c", SERVER, "serve", *listen, "--mps", "require", "--device", "cpu:0"]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(runtime.parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdout is not None
        addresses = server.stdout.readline().split()[1:]
        pipe = Path(joined(socket))
        assert lives(pipe)
        assert joined(next(item for item in addresses if not item.startswith("unix:"))) == "none"
        server.terminate()
        assert server.wait(60) == 0
    assert comes(lambda: not pipe.exists())
