"""The process that terminates TLS before the relay: bytes pass as they are, and it ends and comes back as it should."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from authorities import Authority, Signed
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_harness import FAKE, REAL, ServerProcess, eventually

import tilewright as tw

WAIT_S = 60.0


@contextlib.contextmanager
def serving(
    folder: Path, command: list[str] = FAKE, **settings: object
) -> Iterator[tuple[ServerProcess, Authority, Signed]]:
    authority = Authority(folder)
    own = authority.server()
    given: dict[str, object] = {"listen": "127.0.0.1:0", "tls_cert": own.certificate, "tls_key": own.key}
    given |= {"tls_client_ca": authority.path} | settings
    with ServerProcess(folder, command, **given) as server:
        assert server.alive, server.log()
        yield server, authority, authority.sign("alice")


def healthy(server: ServerProcess, authority: Authority, who: Signed) -> bool:
    shown = (item.read_bytes() for item in (authority.path, who.key, who.certificate))
    options = [("grpc.ssl_target_name_override", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(server.addresses[0], grpc.ssl_channel_credentials(*shown), options) as way:
        check = health_pb2_grpc.HealthStub(way).Check
        return bool(check(health_pb2.HealthCheckRequest(), timeout=WAIT_S, wait_for_ready=True).status)


def terminators(server: ServerProcess) -> list[int]:
    """Children of the server that terminate TLS."""
    found = []
    for path in Path(f"/proc/{server.pid}/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            with contextlib.suppress(OSError):
                if b"tls.terminator" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
    return found


def connected(server: ServerProcess, authority: Authority, who: Signed, *, protocol: str = "h2") -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=authority.path)
    context.load_cert_chain(who.certificate, who.key)
    context.set_alpn_protocols([protocol])
    plain = socket.create_connection(("127.0.0.1", int(server.addresses[0].rpartition(":")[2])), WAIT_S)
    return context.wrap_socket(plain, server_hostname="localhost")


def test_clients_that_speak_badly_end_their_own_connections(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, authority, who):
        assert healthy(server, authority, who)
        (before,) = terminators(server)
        port = int(server.addresses[0].rpartition(":")[2])
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes.fromhex("16030102000100"), os.urandom(4096)):
            with socket.create_connection(("127.0.0.1", port), WAIT_S) as way:
                way.send(said)
        with contextlib.suppress(OSError), connected(server, authority, who, protocol="http/1.1") as way:
            assert way.recv(100) == b""
        with connected(server, authority, who) as way:  # no HTTP/2
            way.send(b"GET / HTTP/1.1\r\n\r\n")
            while way.recv(4096):
                pass
        # Cut off within a record.
        with connected(server, authority, who) as way, socket.socket(fileno=os.dup(way.fileno())) as bare:
            bare.send(b"\x17\x03\x03\x40\x00half")
        assert healthy(server, authority, who)
        assert terminators(server) == [before]
        assert eventually(lambda: len(list(Path(f"/proc/{before}/fd").iterdir())) < 12)
        assert "Traceback" not in server.log()


@pytest.mark.extended
def test_large_messages_pass_both_ways(tmp_path: Path, kernel_cache: Path) -> None:
    a = np.random.default_rng(3).integers(-4, 5, (1500, 1500)).astype(np.float32)
    with serving(tmp_path, REAL, cache_dir=kernel_cache) as (server, authority, who):
        tls = tw.Tls(ca=authority.path, certificate=who.certificate, key=who.key, server_name="localhost")
        with tw.connect(server.addresses[0], tls=tls, timeout=WAIT_S) as client:
            np.testing.assert_array_equal(client.gemm(a, a), a @ a)


@pytest.mark.extended
def test_who_reads_nothing_holds_up_nobody(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, authority, who), contextlib.ExitStack() as stack:
        ways = [stack.enter_context(connected(server, authority, who)) for _ in range(8)]
        pings = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
        pings += (b"\0\0\x08\6" + bytes(13)) * 20_000
        for way in ways:
            way.settimeout(0.5)
            with contextlib.suppress(OSError):
                way.sendall(pings)
        assert healthy(server, authority, who)
        (process,) = terminators(server)
        resident = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert resident < 100 << 20


@pytest.mark.extended
def test_a_killed_process_is_started_anew(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, authority, who):
        assert healthy(server, authority, who)
        for _ in range(2):
            (before,) = terminators(server)
            os.kill(before, signal.SIGKILL)
            assert eventually(lambda: terminators(server) not in ([], [before]), WAIT_S)  # noqa: B023
            assert healthy(server, authority, who)
        assert "has ended; it is started anew" in server.log()
        assert server.stop() == 0, server.log()


@pytest.mark.extended
def test_it_ends_with_the_server_and_not_before(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, authority, who):
        (process,) = terminators(server)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # of the group, or of a service manager
            os.kill(process, number)
        assert healthy(server, authority, who)
        server.signal(signal.SIGKILL)
        assert eventually(lambda: not Path(f"/proc/{process}").exists(), WAIT_S)


@pytest.mark.extended
def test_without_a_relay_grpc_terminates_tls(tmp_path: Path) -> None:
    with serving(tmp_path, relay=False) as (server, authority, who):
        assert healthy(server, authority, who)
        assert terminators(server) == []
