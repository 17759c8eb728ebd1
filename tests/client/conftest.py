"""Servers in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilewright as tw

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # tests are imported by path: their helpers are found here


class FakeServer:
    """``fake_server.py`` at an address; can be killed and started again."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> FakeServer:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, str(HERE / "fake_server.py"), self.target]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        assert line[:1] == ["ready"], "the fake server did not start"
        if self.target.endswith(":0"):
            self.target = self.target[:-1] + line[1]
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    running = FakeServer(f"unix:{tmp_path_factory.mktemp('fake')}/s").start()
    yield running
    running.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[FakeServer]:
    """A server that the test may kill."""
    running = FakeServer(f"unix:{tmp_path}/s").start()
    yield running
    running.kill()


@pytest.fixture(scope="session")
def tcp_server() -> Iterator[FakeServer]:
    running = FakeServer("127.0.0.1:0").start()
    yield running
    running.kill()


@pytest.fixture
def client(server: FakeServer) -> Iterator[tw.Client]:
    with tw.connect(server.target) as opened:
        yield opened
