"""Callers over gRPC's Unix sockets are who the kernel says they are, whatever they send."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from forwarding import STRANGER, folder_for_all, forwarded
from rpc_harness import Client, MemoryFile, ServerProcess, detail_of

from tilewright.session.grpc import identified
from tilewright_proto.v1 import memory_pb2 as mp


@pytest.fixture
def place() -> Iterator[Path]:
    with folder_for_all() as folder:
        yield folder


def sessions(client: Client) -> list[mp.SessionSummary]:
    return list(client.memory.ListSessions(mp.ListSessionsRequest()).sessions)


def refusal(call: object, *arguments: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value.code(), detail_of(caught.value).rule


def test_a_session_is_of_the_user_and_process_that_connected(place: Path) -> None:
    with (
        ServerProcess(place, socket_mode="666") as server,
        Client(server.addresses[0]) as own,
        forwarded(server, place, STRANGER) as (address, pid),
        Client(address),
    ):
        found = {item.principal: item.process for item in sessions(own)}
    assert set(found) == {f"uid:{os.geteuid()}", f"uid:{STRANGER}"}
    assert found[f"uid:{os.geteuid()}"].startswith(f"pid:{os.getpid()}@")
    assert found[f"uid:{STRANGER}"].startswith(f"pid:{pid}@")


def test_what_a_client_sends_makes_it_nobody_else(place: Path) -> None:
    with (
        ServerProcess(place, socket_mode="666") as server,
        Client(server.addresses[0]) as own,
        forwarded(server, place, STRANGER) as (address, _),
        Client(address, session=False) as stranger,
        # A true proof, of this process, and names that the server might go by.
        identified(server.addresses[0], "interactive") as proof,
    ):
        forged = (("x-peer", f"uid:{os.geteuid()}"), ("tilewright-uid", "0"), ("tilewright-peer", "unix:"))
        lease = stranger.memory.OpenSession(mp.OpenSessionRequest(), metadata=(*proof, *forged))
        assert next(lease).opened.session
        assert sorted(item.principal for item in sessions(own)) == [f"uid:{os.geteuid()}", f"uid:{STRANGER}"]
        lease.cancel()


def test_the_session_of_another_user_is_not_found(place: Path, file: MemoryFile) -> None:
    with ServerProcess(place, socket_mode="666") as server, Client(server.addresses[0]) as own:
        own.register(file)
        with forwarded(server, place, STRANGER) as (address, _), Client(address, session=False) as stranger:
            request = mp.StatusRequest(session=own.token)
            known = refusal(stranger.memory.Status, request)
            unknown = refusal(stranger.memory.Status, mp.StatusRequest(session=os.urandom(16)))
            assert known == unknown and known[0] is grpc.StatusCode.NOT_FOUND
            assert refusal(stranger.memory.ListSessions, mp.ListSessionsRequest())[1] == "server_user"
        assert len(own.status().regions) == 1


def test_roles_of_users_hold_without_a_session(place: Path) -> None:
    policy = place / "policy.toml"
    policy.write_text(f'[[principal]]\nname = "app"\nroles = ["dispatch"]\nuid = [{STRANGER}]\n')
    with ServerProcess(place, socket_mode="666", policy=policy) as server:
        with forwarded(server, place, STRANGER) as (address, _), Client(address) as stranger:
            assert stranger.status() is not None
            assert refusal(stranger.memory.ListSessions, mp.ListSessionsRequest()) == (
                grpc.StatusCode.PERMISSION_DENIED,
                "role",
            )
        with forwarded(server, place, STRANGER + 1) as (address, _), Client(address, session=False) as nobody:
            assert refusal(nobody.memory.ListSessions, mp.ListSessionsRequest())[1] == "policy_principal"


def test_processes_of_one_user_are_told_apart_without_a_proof(place: Path) -> None:
    with (
        ServerProcess(place, max_sessions=16) as server,
        Client(server.addresses[0]) as own,
        forwarded(server, place, os.geteuid()) as (address, pid),
        Client(address, session=False) as other,
    ):
        leases = []
        with pytest.raises(grpc.RpcError) as caught:
            for _ in range(16):
                leases.append(other.memory.OpenSession(mp.OpenSessionRequest()))
                next(leases[-1])
        assert detail_of(caught.value).rule == "quota"
        with Client(server.addresses[0]) as second:  # what is left is for other processes
            assert second.token
        assert sum(item.process.startswith(f"pid:{pid}@") for item in sessions(own)) == len(leases) - 1


def test_nothing_leads_past_the_relay(place: Path) -> None:
    with ServerProcess(place) as server, Client(server.addresses[0]):
        assert {item.name for item in place.iterdir() if item.is_socket()} == {"s.sock", "s.sock.local"}
