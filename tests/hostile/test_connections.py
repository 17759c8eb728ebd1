"""Connections, also such as nothing is asked over, leave room for those of others."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_servers import LIMITED, WAIT_S, bystander_lives, healthy
from rpc_harness import FAKE, ServerProcess, eventually

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""The beginning of a connection of HTTP/2: as much as gRPC waits for before it takes a client for one."""
DESCRIPTORS = 700


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """As many descriptors of our own as the server has, and more."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    if old[1] < 4 * DESCRIPTORS:
        pytest.skip(f"the system allows {old[1]} descriptors only (ulimit -n)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * DESCRIPTORS, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, old)


@pytest.mark.parametrize("first", [b"", PREFACE], ids=["silent", "greeted"])
@pytest.mark.extended
def test_connections_of_one_process_leave_descriptors_to_others(
    tmp_path: Path, many_descriptors: None, first: bytes
) -> None:
    command = [sys.executable, "-c", LIMITED, "RLIMIT_NOFILE", str(DESCRIPTORS), *FAKE]
    with ServerProcess(tmp_path, command) as server, contextlib.ExitStack() as opened:
        address = server.addresses[0]
        bystander_lives(address)
        for _ in range(DESCRIPTORS + 50):
            noise = opened.enter_context(socket.socket(socket.AF_UNIX))
            noise.settimeout(0.2)
            with contextlib.suppress(OSError):
                noise.connect(address.removeprefix("unix:"))
                noise.send(first)
        assert eventually(lambda: len(server.descriptors()) < DESCRIPTORS * 3 // 4, WAIT_S)
        bystander_lives(address)
        assert "connections of gRPC" in server.log()


@pytest.mark.extended
def test_slow_requests_of_http_give_way(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, http_listen="127.0.0.1:0") as server, contextlib.ExitStack() as opened:
        assert eventually(lambda: "HTTP at" in server.log())
        port = int(server.log().split("HTTP at ")[1].split()[0].rpartition(":")[2])
        slow = [opened.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S)) for _ in range(64)]
        for item in slow:
            with contextlib.suppress(OSError):
                item.send(b"GET /healthz HTTP/1.1\r\n")
        for _ in range(5):
            assert probe(port).startswith(b"HTTP/1.0 200")
        healthy(server.addresses[0])


def test_headers_of_http_are_not_kept_without_end(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, http_listen="127.0.0.1:0") as server:
        assert eventually(lambda: "HTTP at" in server.log())
        port = int(server.log().split("HTTP at ")[1].split()[0].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as way:
            way.send(b"GET /healthz HTTP/1.1\r\n")
            with contextlib.suppress(OSError):
                for _ in range(90):
                    way.sendall(b"x: " + b"y" * 60_000 + b"\r\n")
            with contextlib.suppress(OSError):
                assert not way.recv(4096).startswith(b"HTTP/1.0 200")
        assert probe(port).startswith(b"HTTP/1.0 200")


def probe(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as way:
        way.send(b"GET /healthz HTTP/1.1\r\n\r\n")
        return way.recv(4096)
