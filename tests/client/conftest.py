"""Servers in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import tilewright as tw

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "kernels"))
sys.path.insert(0, str(HERE))  # tests are imported by path: their helpers are found here


class Server:
    """A server process at an address; can be killed and started again. It says ``ready`` when it can be reached."""

    def __init__(self, target: str, command: list[str]) -> None:
        self.target = target
        self.command = command
        self.process: subprocess.Popen[str] | None = None
        self.ready = ""
        """What it said."""

    def start(self) -> Server:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, *self.command]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready"), "the server did not start"
        self.ready = line
        if self.target.endswith(":0"):
            self.target = self.target[:-1] + line.split()[1]
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None


def fake(target: str) -> Server:
    return Server(target, [str(HERE / "fake_server.py"), target])


def service(folder: Path, cache: Path, *more: str) -> Server:
    """The service itself."""
    if not entry_points(group="tilewright.plugins"):
        pytest.skip("the distribution is not installed, so the service has no plugins")
    target = f"unix:{folder}/s"
    flags = ["--listen", target, "--cache-dir", str(cache), "--log-level", "warning", *more]
    return Server(target, ["-m", "tilewright_tools.cli", "serve", *flags])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = fake(f"unix:{tmp_path_factory.mktemp('fake')}/s").start()
    yield running
    running.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server that the test may kill."""
    running = fake(f"unix:{tmp_path}/s").start()
    yield running
    running.kill()


@pytest.fixture(scope="session")
def tcp_server() -> Iterator[Server]:
    running = fake("127.0.0.1:0").start()
    yield running
    running.kill()


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[Server]:
    running = service(tmp_path_factory.mktemp("service"), kernel_cache).start()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def empty_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The service with a cache that has no kernels yet, over TCP too."""
    folder = tmp_path_factory.mktemp("empty")
    running = service(folder, folder / "cache", "--listen", "127.0.0.1:0", "--insecure").start()
    yield running
    running.kill()


@pytest.fixture
def remote_target(tmp_path: Path, kernel_cache: Path) -> Iterator[str]:
    """Where the service can be reached without shared memory."""
    running = service(tmp_path, kernel_cache, "--listen", "127.0.0.1:0", "--insecure").start()
    yield next(word for word in running.ready.split() if word.startswith("127.0.0.1:"))
    running.kill()


@pytest.fixture
def isolating_server(tmp_path: Path, kernel_cache: Path) -> Iterator[Server]:
    """The service with its CPU in a process of its own, as GPUs are: connections are attached to that process."""
    running = service(tmp_path, kernel_cache, "--cpu-isolated").start()
    yield running
    running.kill()


@pytest.fixture
def forbidding(tmp_path: Path, kernel_cache: Path) -> Iterator[str]:
    """Where a server is whose operator forbids launches in clients."""
    running = service(tmp_path, kernel_cache, "--no-allow-caller-launch").start()
    yield running.target
    running.kill()


@pytest.fixture
def measured_server(tmp_path: Path, kernel_cache: Path) -> Iterator[tuple[Server, Path]]:
    """The service, over TCP too, and the file of its measurements."""
    database = tmp_path / "perf.sqlite"
    tcp = ("--listen", "127.0.0.1:0", "--insecure")
    running = service(tmp_path, kernel_cache, "--perf-database", str(database), *tcp).start()
    yield running, database
    running.kill()


@pytest.fixture
def own_real_server(tmp_path: Path, kernel_cache: Path) -> Iterator[Server]:
    running = service(tmp_path, kernel_cache).start()
    yield running
    running.kill()


@pytest.fixture(params=["fake", "service"])
def client(request: pytest.FixtureRequest) -> Iterator[tw.Client]:
    """A client of the fake server, and one of the service."""
    name = "server" if request.param == "fake" else "real_server"
    with tw.connect(request.getfixturevalue(name).target) as opened:
        yield opened


@pytest.fixture(params=["fake", "service"])
def served(request: pytest.FixtureRequest) -> Iterator[tw.Client]:
    """The same clients, that launch nothing themselves."""
    name = "server" if request.param == "fake" else "real_server"
    with tw.connect(request.getfixturevalue(name).target, launch="server") as opened:
        yield opened


@pytest.fixture
def fake_client(server: Server) -> Iterator[tw.Client]:
    with tw.connect(server.target) as opened:
        yield opened
