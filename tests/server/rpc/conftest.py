"""A server of the fake engine for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rpc_harness import Client, MemoryFile, ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("server"), workers=16, max_streams=18)
    yield process
    assert process.stop() == 0, process.log()
    assert "internal error" not in process.log()
    assert "Traceback" not in process.log(), process.log()


@pytest.fixture
def connect(server: ServerProcess) -> Iterator[Callable[[], Client]]:
    clients: list[Client] = []

    def make() -> Client:
        clients.append(Client(server.addresses[0]))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Callable[[], Client]) -> Client:
    return connect()


@pytest.fixture
def file() -> Iterator[MemoryFile]:
    made = MemoryFile(1 << 16)
    yield made
    made.close()
