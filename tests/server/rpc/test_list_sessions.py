"""The list of sessions: what each holds, for the server's own user alone, without tokens and ids."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import grpc
import pytest
from rpc_harness import Client, MemoryFile, ServerProcess, detail_of, eventually

from tilewright.session.grpc import identified
from tilewright_kit.types.errors import AccessError
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_server.clients import client as callers
from tilewright_server.endpoints.rpc.access.gate import Gate
from tilewright_server.endpoints.rpc.access.roles import Role, is_audited, role_of
from tilewright_server.endpoints.rpc.transport.threads import Starter, Threads
from tilewright_tools.cli import main


def listed(client: Client, token: bytes = b"") -> list[mp.SessionSummary]:
    return list(client.memory.ListSessions(mp.ListSessionsRequest(session=token)).sessions)


def test_each_session_is_listed_with_what_it_holds(client: Client, file: MemoryFile) -> None:
    with Client(client.address) as watcher:
        client.register(file)
        client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=4096))
        found = listed(watcher, watcher.token)
        own = [item for item in found if item.own]
        assert len(own) == 1 and not own[0].regions
        (other,) = [item for item in found if item.regions]
        assert (other.regions, other.region_bytes, other.buffers) == (1, file.nbytes, 1)
        assert other.principal == f"uid:{os.geteuid()}" and other.process.startswith(f"pid:{os.getpid()}@")
        assert (other.client_name, other.priority) == ("test", "interactive") and other.age_ns > 0


def test_tokens_and_ids_of_others_are_not_told(client: Client) -> None:
    with Client(client.address) as watcher:
        reply = watcher.memory.ListSessions(mp.ListSessionsRequest(session=watcher.token)).SerializeToString()
    assert client.token not in reply


def test_sessions_that_have_ended_are_not_listed(client: Client) -> None:
    with Client(client.address) as other:
        token = other.token
        assert len(listed(client, client.token)) >= 2
    assert eventually(lambda: len(listed(client, client.token)) == 1)
    assert token not in client.memory.ListSessions(mp.ListSessionsRequest()).SerializeToString()


def test_a_socket_that_others_reach_asks_for_a_proof_where_no_relay_asks_the_kernel(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, socket_mode="660", relay=False) as server, Client(server.addresses[0]) as client:
        for token in (b"", client.token):  # the session of ``client`` proves nothing either
            with pytest.raises(grpc.RpcError) as caught:
                listed(client, token)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert detail_of(caught.value).rule == "server_user"
        with identified(server.addresses[0], "interactive") as metadata:
            lease = client.memory.OpenSession(mp.OpenSessionRequest(), metadata=metadata)
            token = next(lease).opened.session
        assert {item.own for item in listed(client, token)} == {True, False}
        lease.cancel()


def test_another_user_of_an_open_socket_is_refused() -> None:
    gate = Gate(open_socket=True)
    gate.check_owner(callers.Client(f"uid:{os.geteuid()}", "pid:7@1", b""))
    gate.check_owner(callers.Client("uid:0", "pid:7@1", b""))
    for principal in ("uid:54321", f"uid:{os.geteuid()}@4026531836"):
        with pytest.raises(AccessError):
            gate.check_owner(callers.Client(principal, "pid:7@1", b""))


def test_the_list_takes_the_role_administer_and_is_audited() -> None:
    assert role_of("tilewright.v1.Memory/ListSessions") is Role.ADMINISTER
    assert is_audited("tilewright.v1.Memory/ListSessions")


def test_calls_that_wait_and_run_are_counted_by_session() -> None:
    starter = Starter()
    threads = Threads("test", starter, least=1, most=1)
    entered, go = threading.Event(), threading.Event()

    def job() -> None:
        entered.set()
        go.wait(30)

    one, other = (callers.Client("uid:1", "pid:1@1", token) for token in (b"one", b"two"))
    threads.submit(job, one)
    assert entered.wait(30)
    threads.submit(lambda: None, one)
    assert (threads.of_session(one), threads.of_session(other)) == ((1, 1), (0, 0))
    go.set()
    assert eventually(lambda: threads.of_session(one) == (0, 0))
    threads.close()
    starter.close()


def test_the_command_lists_all_but_its_own_session(
    client: Client, file: MemoryFile, capsys: pytest.CaptureFixture[str]
) -> None:
    address = client.address
    client.register(file)  # which proves its process
    assert main(["sessions", "--target", address, "--json", "--timeout", "30"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["client_name"] == "test"
    assert main(["sessions", "--target", address, "--timeout", "30"]) == 0
    assert f"pid:{os.getpid()}" in capsys.readouterr().out


def test_the_command_says_when_no_server_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "--target", f"unix:{tmp_path / 'nobody'}"]) == 3
    assert "server_answer" in capsys.readouterr().err
