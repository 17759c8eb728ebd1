"""Who may connect to the local socket, how many, and how it begins and ends."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import BEGUN, FakeEngine
from local_harness import (
    HELLO,
    REPLY,
    Wire,
    bind_request,
    expect,
    launches,
    session_of,
)
from rpc_harness import Client, MemoryFile, ServerProcess, eventually, in_region

from tilewright_kit.types.errors import UnavailableError
from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_server.endpoints.local import connection, listener
from tilewright_server.endpoints.local import seqpacket as packets
from tilewright_server.endpoints.local.listener import LocalListener, local_path
from tilewright_server.endpoints.local.server import LocalServer
from tilewright_server.service import Service
from tilewright_server.session.quotas import Quotas, Resource
from tilewright_server.session.sessions import Sessions


class House:
    """A local socket of this very process, with one session."""

    def __init__(self, folder: Path, connections: int = 18, per_session: int = 4) -> None:
        """One process may have 8 of 18 connections: some are left to other users, and half of the rest to others."""
        engine: Any = FakeEngine()
        self.sessions = Sessions(quotas=Quotas({Resource.CONNECTIONS: connections}))
        self.service = Service(engine, self.sessions, 4096, 8192)
        self.session = self.sessions.open("", local=True)
        self.server = LocalServer(self.service, folder / "s.sock.local", per_session)
        self.server.start()

    def connect(self, token: bytes | None = None) -> Wire:
        return Wire(str(self.server.path), self.session.token if token is None else token)

    def close(self) -> None:
        assert self.server.close(timeout=5)
        self.service.close()
        assert self.sessions.close_all(timeout=30)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.close()
    assert not made.server.path.exists()


@pytest.mark.extended
def test_another_user_is_told_so_and_let_go(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "peer_uid", lambda _: os.geteuid() + 4711)
    with Wire(str(house.server.path)) as wire:
        error = expect(wire.ask(HELLO, 1, house.session.token), "permission_denied", "peer_user")
        assert "4711" not in str(error)
        assert wire.is_closed()
    with monkeypatch.context() as patch:
        patch.setattr(house.server, "_allowed", (os.geteuid() + 4711,))
        with house.connect() as wire:
            expect(wire.launch(4711), "not_found", "binding_id")
    monkeypatch.setattr(listener, "peer_uid", lambda _: 0)
    with house.connect() as wire:
        assert eventually(lambda: len(house.server) == 1)  # the refused one goes after its client saw the end


def test_the_kernel_names_the_user() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        assert listener.peer_uid(one) == os.geteuid()


def test_who_says_nothing_is_let_go(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HELLO_TIMEOUT_S", 0.2)
    with Wire(str(house.server.path)) as wire:
        expect(wire.receive(), "invalid_argument", "packet_format")
        assert wire.is_closed()


def test_connections_are_counted(house: House) -> None:
    wires = [house.connect() for _ in range(4)]
    with Wire(str(house.server.path)) as fifth:
        error = expect(fifth.ask(HELLO, 1, house.session.token), "resource_exhausted", "session_quota")
        assert (error.field, error.value, error.retry_after_ms) == ("session_connections", "4", 0)
        assert fifth.is_closed()
    other = house.sessions.open("", local=True)
    wires += [house.connect(other.token) for _ in range(4)]
    with Wire(str(house.server.path)) as ninth:
        error = expect(ninth.receive(), "resource_exhausted", "quota")
        assert error.retry_after_ms == 1000
        assert ninth.is_closed()
    wires[0].close()
    assert eventually(lambda: len(house.server) == 7)
    house.connect().close()
    for wire in wires:
        wire.close()
    assert eventually(lambda: len(house.server) == 0)


def test_a_session_of_a_tcp_client_has_no_local_connections(house: House) -> None:
    remote = house.sessions.open("", local=False)
    with Wire(str(house.server.path)) as wire:
        expect(wire.ask(HELLO, 1, remote.token), "permission_denied", "region_transport")


def test_a_client_that_never_reads_holds_up_only_itself(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets.Wire.__init__, "__defaults__", (0.5,))
    with house.connect() as stuck, house.connect() as healthy:
        stuck.socket.settimeout(0.05)
        for _ in range(10_000):
            try:
                stuck.send(launches(*[77] * 64))
            except (TimeoutError, BrokenPipeError):  # noqa: PERF203 - this is the point
                break
        else:
            raise AssertionError("the server read everything without being read")
        for _ in range(20):
            expect(healthy.launch(77), "not_found", "binding_id")
        assert eventually(lambda: len(house.server) == 1)
        expect(healthy.launch(77), "not_found", "binding_id")


def test_the_end_of_the_session_ends_its_connections(house: House) -> None:
    with house.connect() as wire:
        house.sessions.close(house.session)
        assert wire.is_closed()
    assert eventually(lambda: len(house.server) == 0)


def test_a_stale_socket_is_replaced_and_a_live_one_kept(tmp_path: Path) -> None:
    path = local_path(tmp_path / "s.sock")
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(str(path))
    dead.close()
    assert stat.S_ISSOCK(path.lstat().st_mode)
    live = LocalListener(path)
    with pytest.raises(UnavailableError, match="another server listens there"):
        LocalListener(path)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    live.close()
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(UnavailableError):
        LocalListener(path)
    assert path.read_text() == "precious"


# Life cycle


def test_a_server_stops_with_connections_open(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, session_of(server.addresses[0]) as (client, wire):
        file = MemoryFile(4096)
        region = wire.register(file)
        binding = wire.bind(client.plan(seconds=0.3), in_region(region), in_region(region, 64))
        wire.send(launches(binding, flags=REPLY))
        assert eventually(lambda: file.bytes[64] == BEGUN)
        server.signal()
        reply = wire.receive()
        assert reply is not None
        assert reply.error is None, "work in flight is finished, and answered"
        assert wire.is_closed()
        assert server.wait() == 0
        assert not list(tmp_path.glob("s.sock*"))
        assert "still" not in server.log()
        file.close()


def test_a_reply_on_its_way_arrives_though_the_server_closes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    sending = threading.Event()
    send = packets.Wire.send

    def slowly(wire: packets.Wire, data: bytes, descriptor: int = -1) -> None:
        sending.set()
        time.sleep(0.2)
        send(wire, data, descriptor)

    with house.connect() as wire:
        monkeypatch.setattr(packets.Wire, "send", slowly)
        wire.send(launches(4711))
        assert sending.wait(5)
        assert house.server.close(timeout=5)
        expect(wire.receive(), "not_found")
        assert wire.is_closed()


def test_grpc_is_complete_without_the_local_socket(tmp_path: Path) -> None:
    file = MemoryFile(4096)
    with ServerProcess(tmp_path, local_socket="off") as server, Client(server.addresses[0]) as client:
        assert client.opened.local_socket == ""
        assert not Path(f"{server.socket}.local").exists()
        region = client.register(file).region
        file.bytes[:64] = bytes(range(64))
        request = bind_request(client.plan(), in_region(region), in_region(region, 64))
        request.session = client.token
        bound = client.dispatch.Bind(request)
        execution = dp.Execution(binding=bound.binding)
        assert client.dispatch.Execute(dp.ExecuteRequest(session=client.token, executions=[execution])).results
        assert file.bytes[64:128] == bytes(range(64))
        assert server.stop() == 0
    file.close()


def test_a_path_that_is_too_long_leaves_grpc_alone(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tw-") as short:  # pytest's own folders are too deep for a socket
        folder = Path(short)
        path = folder / ("s" * (105 - len(str(folder)) - 1))
        with ServerProcess(tmp_path, listen=f"unix:{path}") as server, Client(server.addresses[0]) as client:
            assert client.opened.local_socket == ""
            assert "no local socket" in server.log()


def test_clients_over_tcp_are_not_told_of_it(tmp_path: Path) -> None:
    listen = f"127.0.0.1:0,unix:{tmp_path}/s.sock"
    with ServerProcess(tmp_path, listen=listen, insecure=True) as server, Client(server.addresses[0]) as client:
        assert client.opened.local_socket == ""
        assert [item.id for item in client.opened.devices] == ["cpu:0"]
        with Client(server.addresses[1]) as local:
            assert local.opened.local_socket == f"{tmp_path}/s.sock.local"
