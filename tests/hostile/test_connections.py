"""Connections, also such as nothing is asked over, leave room for those of others."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from hostile_servers import LIMITED, WAIT_S, bystander_lives, healthy
from rpc_harness import FAKE, ServerProcess, eventually

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""The beginning of a connection of HTTP/2: as much as gRPC waits for before it takes a client for one."""
DESCRIPTORS = 700


NOISE = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
count = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 50), hard))
opened = []
for _ in range(count):
    way = socket.socket(socket.AF_UNIX)
    way.settimeout(0.2)
    try:
        way.connect(sys.argv[1])
        way.send(bytes.fromhex(sys.argv[3]))
    except OSError:
        pass
    opened.append(way)
print("opened", flush=True)
sys.stdin.read()
"""
"""A process with many connections over which it says one thing."""


@pytest.mark.parametrize("relay", [True, False], ids=["relay", "grpc"])
@pytest.mark.parametrize("first", [b"", PREFACE], ids=["silent", "greeted"])
@pytest.mark.extended
def test_connections_of_one_process_leave_descriptors_to_others(tmp_path: Path, first: bytes, relay: bool) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS + 100:
        pytest.skip(f"the system allows {hard} descriptors only (ulimit -n)")
    command = [sys.executable, "-c", LIMITED, "RLIMIT_NOFILE", str(DESCRIPTORS), *FAKE]
    with ServerProcess(tmp_path, command, relay=relay) as server:
        address = server.addresses[0]
        bystander_lives(address)
        words = [address.removeprefix("unix:"), str(DESCRIPTORS + 50), first.hex()]
        noise = [sys.executable, "-c", NOISE, *words]
        with subprocess.Popen(noise, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "opened\n"
            assert eventually(lambda: len(server.descriptors()) < DESCRIPTORS * 3 // 4, WAIT_S)
            # Until the server has looked, newcomers are closed.
            assert eventually(lambda: "connections of gRPC" in server.log(), WAIT_S)
            assert eventually(lambda: answers(address), WAIT_S)
            bystander_lives(address)
            process.kill()


def answers(address: str) -> bool:
    with contextlib.suppress(grpc.RpcError):
        return healthy(address)
    return False


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
