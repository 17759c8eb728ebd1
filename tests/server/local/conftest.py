"""A server of the fake engine for all tests of this folder, and connections to its local socket."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rpc"))
sys.path.insert(0, str(Path(__file__).parent))

from local_harness import Wire
from rpc_harness import Client, MemoryFile, ServerProcess

LIMITS = {"local_connections": 24, "session_connections": 6, "max_bindings": 8, "max_regions": 8, "max_buffers": 8}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("server"), **LIMITS)
    assert process.ready, process.log()
    yield process
    assert process.stop() == 0, process.log()
    assert "internal error" not in process.log(), process.log()
    assert "Traceback" not in process.log(), process.log()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.addresses[0]) as made:
        yield made


@pytest.fixture
def connect(client: Client) -> Iterator[Callable[[], Wire]]:
    """Further connections of the client's session."""
    wires: list[Wire] = []

    def make() -> Wire:
        wires.append(Wire(client.opened.local_socket, client.token))
        return wires[-1]

    yield make
    for wire in wires:
        wire.close()


@pytest.fixture
def wire(connect: Callable[[], Wire]) -> Wire:
    return connect()


@pytest.fixture
def file() -> Iterator[MemoryFile]:
    made = MemoryFile(1 << 16)
    yield made
    made.close()
