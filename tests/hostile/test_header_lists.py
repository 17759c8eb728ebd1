"""Lists of headers in which one byte stands for a header that the server keeps."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from authorities import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from header_blocks import END_HEADERS, HEADERS, NEWEST, PREFACE, SETTINGS, call, frame, indexed, literal
from hostile_servers import WAIT_S, Peak, bystander_lives, channel
from rpc_harness import ServerProcess

HERE = Path(__file__).parent
SENDER = f"""
import contextlib, socket, ssl, sys
sys.path.insert(0, {str(HERE.parent / "server" / "rpc")!r})
from header_blocks import *
address, connections, streams, headers, bytes_of_each = sys.argv[1], *map(int, sys.argv[2:6])
context = None
if len(sys.argv) > 6:
    context = ssl.create_default_context(cafile=sys.argv[6])
    context.load_cert_chain(*sys.argv[7:])
    context.set_alpn_protocols(["h2"])
base = call(b"/grpc.health.v1.Health/Check")
first = literal(b"a", b"v" * bytes_of_each, remember=True)
ways = []
for _ in range(connections):
    if address.startswith("unix:"):
        way = socket.socket(socket.AF_UNIX)
        way.connect(address.removeprefix("unix:"))
    else:
        way = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
    if context is not None:
        way = context.wrap_socket(way, server_hostname="localhost")
    way.settimeout(0.3)
    ways.append(way)
    with contextlib.suppress(OSError):
        way.sendall(PREFACE + frame(SETTINGS))
        for index in range(streams):
            block = base + first * (index == 0) + indexed(NEWEST) * headers
            parts = [block[at : at + 16384] for at in range(0, len(block), 16384)]
            for at, part in enumerate(parts):
                flags = END_HEADERS if at == len(parts) - 1 else 0
                way.sendall(frame(CONTINUATION if at else HEADERS, part, 2 * index + 1, flags))
print("sent", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def sent(server: ServerProcess, *what: int, proof: Sequence[Path] = ()) -> Iterator[None]:
    """All lists were sent to the last address, or as many as were taken; no reply is read. They stay open."""
    command = [sys.executable, "-c", SENDER, server.addresses[-1], *map(str, what), *map(str, proof)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        yield
        process.kill()


@pytest.mark.parametrize("bytes_of_each", [1, 3900])
def test_lists_of_thousands_of_headers_cost_no_memory(tmp_path: Path, bytes_of_each: int) -> None:
    """Without bounds, the lists of one connection took 590 and 1,060 MiB."""
    with ServerProcess(tmp_path) as server:
        bystander_lives(server.addresses[0])
        peak = Peak(server)
        with sent(server, 1, 900, 8000, bytes_of_each):
            bystander_lives(server.addresses[0])
        assert peak.grown_mib() < 100


@pytest.mark.extended
@pytest.mark.parametrize("headers", [450, 690])
def test_lists_that_are_just_legal_take_little_while_they_are_open(tmp_path: Path, headers: int) -> None:
    """Without bounds, twelve connections of one process that read nothing took 600 to 2,800 MiB."""
    with ServerProcess(tmp_path) as server:
        bystander_lives(server.addresses[0])
        peak = Peak(server)
        with sent(server, 12, 900, headers, 1):
            bystander_lives(server.addresses[0])
        assert peak.grown_mib() < 250


def test_a_call_with_as_much_metadata_as_the_server_takes_is_answered(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, channel(server.addresses[0]) as way:
        check = health_pb2_grpc.HealthStub(way).Check
        for _ in range(3):
            reply = check(health_pb2.HealthCheckRequest(), timeout=WAIT_S, metadata=[("a", "v" * 3000)] * 5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as raised:
            check(health_pb2.HealthCheckRequest(), timeout=WAIT_S, metadata=[("a", "v" * 3000)] * 7)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)


@contextlib.contextmanager
def over_the_network(folder: Path, tls: bool, **settings: Any) -> Iterator[tuple[ServerProcess, Sequence[Path]]]:
    """A server at a Unix socket and at a port, and what a client shows there."""
    given: dict[str, Any] = {"listen": f"unix:{folder}/s,127.0.0.1:0"} | settings
    proof: list[Path] = []
    if tls:
        authority = Authority(folder)
        own, who = authority.server(), authority.sign("mallory")
        given |= {"tls_cert": own.certificate, "tls_key": own.key, "tls_client_ca": authority.path}
        proof = [authority.path, who.certificate, who.key]
    else:
        given["insecure"] = True
    with ServerProcess(folder, **given) as server:
        assert server.alive, server.log()
        bystander_lives(server.addresses[0])
        yield server, proof


TLS = [False, pytest.param(True, marks=pytest.mark.extended)]


@pytest.mark.parametrize("tls", TLS, ids=["tcp", "tls"])
def test_over_the_network_lists_of_thousands_of_headers_cost_no_memory(tmp_path: Path, tls: bool) -> None:
    """Taken by gRPC itself, those of a connection that acknowledges no settings took 0.9 to 1.2 GiB, 0.3 with TLS."""
    with over_the_network(tmp_path, tls) as (server, proof):
        peak = Peak(server)
        with sent(server, 1, 900, 8000, 1, proof=proof):
            bystander_lives(server.addresses[0])
        assert peak.grown_mib() < 100


@pytest.mark.extended
@pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
def test_over_the_network_lists_that_are_just_legal_take_little(tmp_path: Path, tls: bool) -> None:
    """Taken by gRPC itself, 20 connections with a thousand calls each took 329 MiB."""
    with over_the_network(tmp_path, tls) as (server, proof):
        peak = Peak(server)
        with sent(server, 20, 900, 470, 1, proof=proof):
            bystander_lives(server.addresses[0])
        assert peak.grown_mib() < 250


ACKNOWLEDGED = frame(SETTINGS, flags=1)
CHECK = call(b"/grpc.health.v1.Health/Check")


@contextlib.contextmanager
def over_tcp(folder: Path) -> Iterator[tuple[ServerProcess, socket.socket]]:
    """A server without a relay before it, and a connection to it that has heard of its settings."""
    with over_the_network(folder, False, relay=False) as (server, _):
        port = int(server.addresses[1].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as way:
            way.sendall(PREFACE + frame(SETTINGS))
            assert way.recv(9)[3] == SETTINGS
            yield server, way


def test_without_a_relay_who_acknowledges_no_settings_is_let_go(tmp_path: Path) -> None:
    """Until he does, gRPC takes lists of 16 MiB: 5,000 of 272 KiB had made the server grow as long as they came."""
    with over_tcp(tmp_path) as (server, way):
        began = time.monotonic()
        while way.recv(4096):
            pass
        assert time.monotonic() - began < WAIT_S / 2
        bystander_lives(server.addresses[0])


@pytest.mark.extended
def test_without_a_relay_a_connection_that_acknowledges_settings_takes_little(tmp_path: Path) -> None:
    """A thousand calls with lists of the largest size that gRPC takes, and of more than it takes; nothing is read."""
    with over_tcp(tmp_path) as (server, way):
        way.sendall(ACKNOWLEDGED)
        time.sleep(0.1)
        peak = Peak(server)
        first = literal(b"a", b"v", remember=True)
        with contextlib.suppress(OSError):
            for index in range(1000):
                block = CHECK + first * (not index) + indexed(NEWEST) * (470 if index % 2 else 8000)
                way.sendall(frame(HEADERS, block, 2 * index + 1, END_HEADERS))
        bystander_lives(server.addresses[0])
        assert peak.grown_mib() < 250
        way.sendall(frame(SETTINGS))  # the connection is there still
