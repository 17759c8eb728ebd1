"""Listeners besides gRPC's Unix socket: TLS whose handshakes stall, HTTP for metrics, and one of the Open Inference
Protocol alone.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from authorities import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hostile_servers import GEMM, LIMITED, WAIT_S, bystander_lives, healthy
from rpc_harness import FAKE, ServerProcess, eventually

DESCRIPTORS = 700
HELLO = bytes.fromhex("16030102000100")
"""The beginning of a TLS handshake whose record has 512 bytes."""
STALL = """
import socket, sys
held = []
for _ in range(int(sys.argv[2])):
    way = socket.socket()
    way.settimeout(0.2)
    try:
        way.connect(("127.0.0.1", int(sys.argv[1])))
        way.send(bytes.fromhex(sys.argv[3]))
    except OSError:
        pass
    held.append(way)
print("opened", flush=True)
sys.stdin.read()
"""
"""A process with connections over which it says one thing, and reads nothing."""


@contextlib.contextmanager
def stalled(port: int, count: int, first: bytes) -> Iterator[None]:
    command = [sys.executable, "-c", STALL, str(port), str(count), first.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "opened\n"
        yield
        process.kill()


@pytest.mark.extended
@pytest.mark.parametrize("first", [b"", HELLO], ids=["silent", "half"])
def test_handshakes_that_stall_hold_up_nobody(tmp_path: Path, first: bytes) -> None:
    authority = Authority(tmp_path)
    own, who = authority.server(), authority.sign("client")
    given = {"tls_cert": own.certificate, "tls_key": own.key, "tls_client_ca": authority.path}
    command = [sys.executable, "-c", LIMITED, "RLIMIT_NOFILE", str(DESCRIPTORS), *FAKE]
    with ServerProcess(tmp_path, command, listen=f"127.0.0.1:0,unix:{tmp_path}/s", **given) as server:
        assert server.alive, server.log()
        tcp, unix = server.addresses
        port = int(tcp.rpartition(":")[2])

        def answers() -> bool:
            certificates = (item.read_bytes() for item in (authority.path, who.key, who.certificate))
            credentials = grpc.ssl_channel_credentials(*certificates)
            with grpc.secure_channel(f"localhost:{port}", credentials) as way:
                check = health_pb2_grpc.HealthStub(way).Check
                return bool(check(health_pb2.HealthCheckRequest(), timeout=WAIT_S, wait_for_ready=True).status)

        assert answers()
        before = len(server.descriptors())
        with stalled(port, DESCRIPTORS + 50, first):
            assert answers()
            bystander_lives(unix)
            assert eventually(lambda: len(server.descriptors()) < DESCRIPTORS * 3 // 4, WAIT_S)
        assert eventually(lambda: len(server.descriptors()) <= before + 2, WAIT_S), server.descriptors()
        assert answers()


@pytest.mark.extended
def test_handshakes_that_end_all_at_once_do_not_end_the_server(tmp_path: Path) -> None:
    """They had, five times of six: certificates that had not changed were given to gRPC as new ones."""
    authority = Authority(tmp_path)
    own = authority.server()
    given = {"tls_cert": own.certificate, "tls_key": own.key, "tls_client_ca": authority.path}
    with ServerProcess(tmp_path, listen=f"127.0.0.1:0,unix:{tmp_path}/s", **given) as server:
        port = int(server.addresses[0].rpartition(":")[2])
        for _ in range(4):
            with stalled(port, 700, b""):
                pass
            bystander_lives(server.addresses[1])
        assert eventually(lambda: len(server.descriptors()) < 100, WAIT_S)
        assert server.stop() == 0, server.log()


def sockets(server: ServerProcess) -> int:
    return sum(link.startswith("socket:") for link in server.descriptors())


def scraped(port: int, path: str = "/metrics") -> bytes:
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as way:
        way.send(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        parts = []
        while part := way.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.extended
def test_hundreds_of_scrapes_and_readers_that_are_slow_hold_up_nobody(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GEMM, http_listen="127.0.0.1:0", cpu_threads=1) as server:
        assert eventually(lambda: "HTTP at" in server.log())
        port = int(server.log().split("HTTP at ")[1].split()[0].rpartition(":")[2])
        assert b"tilewright_" in scraped(port)
        before = sockets(server)
        whole = b"GET /metrics HTTP/1.1\r\n\r\n"
        # Ask and do not read; ask by halves; say nothing.
        with stalled(port, 150, whole * 3), stalled(port, 150, whole[:9]), stalled(port, 150, b""):
            with ThreadPoolExecutor(16) as threads:
                pages = list(threads.map(lambda _: scraped(port), range(300)))
            assert sum(page.startswith(b"HTTP/1.0 200") and b"tilewright_" in page for page in pages) > 290
            assert scraped(port, "/healthz").startswith(b"HTTP/1.0 200")
            assert healthy(server.addresses[0])
        assert eventually(lambda: sockets(server) <= before + 2, WAIT_S), server.descriptors()
        assert server.rss_mib() < 200
        assert "Traceback" not in server.log()


@pytest.mark.extended
def test_a_listener_of_the_open_inference_protocol_is_as_guarded(tmp_path: Path) -> None:
    """Connections and streams of one process there leave health and calls everywhere to others."""
    command = [sys.executable, "-c", LIMITED, "RLIMIT_NOFILE", str(DESCRIPTORS), *FAKE]
    listen = f"unix:{tmp_path}/k"
    with ServerProcess(tmp_path, command, kserve_listen=listen) as server:
        assert server.alive, server.log()
        bystander_lives(server.addresses[0])
        live = "/inference.GRPCInferenceService/ServerLive"
        before = len(server.descriptors())
        with subprocess.Popen(
            [sys.executable, "-c", STREAMS, listen, str(DESCRIPTORS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "opened\n"
            bystander_lives(server.addresses[0])
            with grpc.insecure_channel(listen) as way:
                assert way.unary_unary(live)(b"", timeout=WAIT_S, wait_for_ready=True) == b"\x08\x01"
            assert eventually(lambda: len(server.descriptors()) < DESCRIPTORS * 3 // 4, WAIT_S)
            process.kill()
        assert eventually(lambda: len(server.descriptors()) <= before + 1, WAIT_S), server.descriptors()
        assert "Traceback" not in server.log()


STREAMS = """
import grpc, socket, sys, threading
over = threading.Event()
def nothing():
    over.wait()
    yield b""
way = grpc.insecure_channel(sys.argv[1])
stream = way.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
calls = [stream(nothing()) for _ in range(300)]
held = []
for _ in range(int(sys.argv[2])):
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(0.1)
    held.append(one)
    try:
        one.connect(sys.argv[1].removeprefix("unix:"))
    except OSError:
        pass
print("opened", flush=True)
sys.stdin.read()
"""
