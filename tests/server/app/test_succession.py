"""Servers that follow one another at their sockets without losing a call."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
from authorities import Authority
from rpc_harness import FAKE, Client, eventually, free_port
from successors import Inferences, Load, Probes, Server, ended, upgrade

import tilewright as tw


@pytest.mark.parametrize("local_socket", [True, False])
@pytest.mark.some(1)
def test_an_upgrade_under_load_loses_no_call(tmp_path: Path, local_socket: bool) -> None:
    with Server(tmp_path, local_socket=local_socket) as server, Load(server.addresses[0], 4) as load:
        upgrade(server, load, 2)
    assert server.wait() == 0
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith("s.sock")] == []


@pytest.mark.extended
def test_an_upgrade_over_tcp_loses_no_call(tmp_path: Path, kernel_cache: Path) -> None:
    listen, own = (f"127.0.0.1:{free_port()}" for _ in range(2))
    settings = {"listen": listen, "kserve_listen": own, "insecure": True, "cache_dir": kernel_cache}
    with Server(tmp_path, **settings) as server, Load(listen, 2) as load, Inferences(own, 2) as inferences:
        upgrade(server, load, 1)
        assert inferences.more()
        assert inferences.errors == []
        server.succeed(server.successors()[-1])
        assert load.more()
        assert inferences.more()
    assert load.errors == inferences.errors == []
    assert server.log().count("serves now, this one ends") == 2
    assert "a socket was given" not in server.log()


@pytest.mark.extended
def test_an_upgrade_over_tls_loses_no_call(tmp_path: Path, kernel_cache: Path) -> None:
    authority = Authority(tmp_path)
    own, who = authority.server(), authority.sign("alice")
    tls = tw.Tls(ca=authority.path, certificate=who.certificate, key=who.key, server_name="localhost")
    listen = f"127.0.0.1:{free_port()}"
    settings = {"tls_cert": own.certificate, "tls_key": own.key, "tls_client_ca": authority.path}
    with Server(tmp_path, listen=listen, cache_dir=kernel_cache, **settings) as server, Load(listen, 2, tls) as load:
        upgrade(server, load, 2)
    assert "a socket was given" not in server.log()


def test_a_handshake_that_has_begun_is_served_by_whoever_accepted_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, who = authority.server(), authority.sign("alice")
    context = ssl.create_default_context(cafile=authority.path)
    context.load_cert_chain(who.certificate, who.key)
    context.set_alpn_protocols(["h2"])
    port = free_port()
    settings = {"tls_cert": own.certificate, "tls_key": own.key, "tls_client_ca": authority.path}
    with Server(tmp_path, FAKE, listen=f"127.0.0.1:{port}", **settings) as server:
        with socket.create_connection(("127.0.0.1", port), 60) as way:
            time.sleep(0.5)  # accepted
            server.signal(signal.SIGUSR2)
            assert eventually(lambda: "serves now, this one ends" in server.log(), 60)
            time.sleep(2)
            with context.wrap_socket(way, server_hostname="localhost") as tls:
                tls.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
                assert tls.recv(9)[3:4] == b"\4", "settings of HTTP/2"
        assert eventually(lambda: ended(server.pid), 60)


def listening(pid: int, port: int) -> int:
    """Descriptors of a process for the socket that listens at a port."""
    rows = (line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:])
    inodes = {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    links = []
    for item in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(item.readlink()))
    return sum(link == f"socket:[{inode}]" for inode in inodes for link in links)


def test_probes_over_grpc_are_answered_throughout_an_upgrade(tmp_path: Path) -> None:
    port = free_port()
    with Server(tmp_path, FAKE, health_listen=f"127.0.0.1:{port}") as server, Probes(port) as probes:
        assert eventually(lambda: len(probes.answers) > 5, 60)
        held = listening(server.pid, port)
        pid = server.succeed(server.pid)
        assert listening(pid, port) == held == 1, "no second descriptor keeps the port"
        before = len(probes.answers)
        assert eventually(lambda: len(probes.answers) > before + 5, 60)
        assert set(probes.answers) == {"SERVING"}, (probes.answers, server.log())
        os.kill(pid, signal.SIGTERM)
        assert eventually(lambda: ended(pid), 60)
        assert probes.ask() == "StatusCode.UNAVAILABLE", "the last one takes the port with it"
    assert server.log().count(f"health checks over gRPC at 127.0.0.1:{port}") == 2


def test_a_server_goes_on_if_its_successor_cannot_start(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("")
    with Server(tmp_path, policy=policy) as server, Client(server.addresses[0]) as client:
        policy.write_text("nonsense")
        server.signal(signal.SIGUSR2)
        assert eventually(lambda: "before it served; this server goes on" in server.log(), 60)
        assert client.status() is not None
        with Client(server.addresses[0]) as other:
            assert other.status() is not None
        policy.write_text("")
        server.succeed(server.pid)


CHOSEN = "the system has chosen the port"
TCP = {"listen": "127.0.0.1:0", "insecure": True}


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({**TCP, "relay": False}, ("gRPC gives the socket that it listens on to nobody",)),
        (TCP, (CHOSEN, "[listen=127.0.0.1:")),
        ({"http_listen": 0}, (CHOSEN, "[http_listen=0]")),
        ({"health_listen": 0}, (CHOSEN, "[health_listen=127.0.0.1:")),
    ],
    ids=["relay", "port", "http", "health"],
)
def test_a_server_says_why_it_cannot_be_followed(tmp_path: Path, settings: Any, reasons: tuple[str, ...]) -> None:
    with Server(tmp_path, FAKE, **settings) as server:
        server.signal(signal.SIGUSR2)
        assert eventually(lambda: "no successor is started, this server goes on" in server.log(), 60), server.log()
        assert all(reason in server.log() for reason in reasons), server.log()
        with Client(server.addresses[0]) as client:
            assert client.status() is not None
        assert not server.successors()
