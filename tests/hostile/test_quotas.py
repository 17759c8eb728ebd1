"""No process takes all of anything: another one always finds room."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from hostile_servers import WAIT_S, SparseFile, bystander_lives
from local_harness import HELLO, Wire
from rpc_harness import Client, MemoryFile, ServerProcess, detail_of, eventually, inline, refused

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

RETURNED = tp.Location(return_inline=tp.ReturnInline())


def another_process_lives(address: str) -> None:
    """The library, in a process of its own, opens a session with its local connection."""
    code = "import sys, tilewright; client = tilewright.connect(sys.argv[1]); client.close(); print('lives')"
    done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, timeout=60)
    assert done.stdout == "lives\n", done.stderr


@pytest.mark.extended
def test_one_process_cannot_have_all_sessions(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, max_sessions=64) as server, contextlib.ExitStack() as clients:
        address = server.addresses[0]
        attacker = clients.enter_context(Client(address))
        leases = []
        with pytest.raises(grpc.RpcError) as error:
            for _ in range(64):
                leases.append(attacker.memory.OpenSession(mp.OpenSessionRequest(), timeout=60))
                next(leases[-1])
        detail = detail_of(error.value)
        assert (detail.rule, detail.field, detail.value) == ("quota", "sessions", "64")
        assert detail.retry_after_ms and len(leases) == 28
        another_process_lives(address)
        for lease in leases:
            lease.cancel()
        bystander = clients.enter_context(Client(address, session=False))
        assert eventually(lambda: opens(bystander))


def opens(client: Client) -> bool:
    lease = client.memory.OpenSession(mp.OpenSessionRequest(), timeout=WAIT_S)
    try:
        return bool(next(lease).opened.session)
    except grpc.RpcError:
        return False
    finally:
        lease.cancel()


@pytest.mark.extended
def test_one_process_cannot_have_all_streams(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, max_streams=32) as server, Client(server.addresses[0]) as attacker:
        hold = threading.Event()
        request = attacker.execution(attacker.plan(4), inline(bytes(16)), RETURNED)

        def requests(first: bool) -> Iterator[dp.ExecuteRequest]:
            if first:
                yield request
            hold.wait(60)

        # Streams that say nothing give way to new ones, streams in use do not.
        silent = [attacker.dispatch.ExecuteStream(requests(False)) for _ in range(40)]
        assert eventually(lambda: sum(stream.done() for stream in silent) == 40 - 14)
        used = [attacker.dispatch.ExecuteStream(requests(True)) for _ in range(14)]
        for stream in used:
            assert next(stream).results
        assert eventually(lambda: all(stream.done() for stream in silent))
        with refused("resource_exhausted", "quota"):
            next(attacker.dispatch.ExecuteStream(requests(True)))
        another_process_lives(server.addresses[0])
        hold.set()
        for stream in used:
            assert list(stream) == []


@pytest.mark.extended
def test_one_process_cannot_have_all_local_connections(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, local_connections=64) as server, Client(server.addresses[0]) as client:
        path = client.opened.local_socket
        wires = [Wire(path) for _ in range(28)]
        with Wire(path) as late:
            answer = late.receive()
            assert answer is not None and answer.error is not None
            assert (answer.error.rule, answer.error.field, answer.error.value) == ("quota", "connections", "64")
        another_process_lives(server.addresses[0])
        for wire in wires:
            wire.close()
        assert eventually(lambda: greets(path, client.token))


def greets(path: str, token: bytes) -> bool:
    with Wire(path) as wire:
        try:
            return wire.ask(HELLO, 1, token).error is None
        except OSError:
            return False


@pytest.mark.extended
def test_sparse_memory_does_not_fill_the_address_space(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, region_bytes=1 << 40) as server, Client(server.addresses[0]) as client:
        files = []
        try:
            with refused("resource_exhausted", "quota") as details:
                for _ in range(16):
                    files.append(SparseFile(1 << 36))
                    client.register(files[-1])
            assert details[0].field == "region_bytes"
            assert len(files) == 8  # seven are half of seven eighths of 16
            bystander_lives(server.addresses[0])
            another_process_lives(server.addresses[0])
        finally:
            for file in files:
                file.close()
        client.close()
        assert eventually(lambda: server.regions() == (0, 0))


@pytest.mark.extended
def test_128_tib_of_sparse_memory_leave_threads_and_calls_their_address_space(tmp_path: Path) -> None:
    """With the settings as they are: 97 files of one client, and 24 callers."""
    with ServerProcess(tmp_path) as server, contextlib.ExitStack() as ends:
        client = ends.enter_context(Client(server.addresses[0]))
        rules = set()
        for _ in range(97):
            file = SparseFile((1 << 47) // 97 & -4096)
            ends.callback(file.close)
            try:
                client.register(file)
            except grpc.RpcError as error:
                rules.add((detail_of(error).rule, detail_of(error).field))
        assert rules == {("quota", "region_bytes")}
        callers = [ends.enter_context(Client(server.addresses[0])) for _ in range(24)]
        request = [item.execution(item.plan(4, seconds=0.1), inline(bytes(16)), RETURNED) for item in callers]
        calls = [item.dispatch.Execute.future(what) for item, what in zip(callers, request, strict=True)]
        bystander_lives(server.addresses[0])
        assert all(call.result(WAIT_S).results for call in calls)


def test_a_process_that_calls_too_often_is_told_so(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, call_rate=20) as server, Client(server.addresses[0]) as client:
        with refused("resource_exhausted", "quota") as details:
            for _ in range(200):
                client.status()
        assert details[0].field == "call_rate" and 0 < details[0].retry_after_ms <= 50
        another_process_lives(server.addresses[0])
        assert eventually(lambda: calls(client))


def calls(client: Client) -> bool:
    try:
        client.status()
    except grpc.RpcError:
        return False
    return True


@pytest.mark.extended
def test_who_connects_and_says_nothing_is_let_go(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, Client(server.addresses[0]) as client:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            silent.connect(client.opened.local_socket)
            silent.settimeout(WAIT_S)
            assert silent.recv(4096)  # the error
            assert not silent.recv(4096)
        bystander_lives(server.addresses[0])


def test_one_process_cannot_have_all_mappings(tmp_path: Path) -> None:
    """The system gives a process so many mappings, and memory, threads and kernels are mappings as well."""
    with ServerProcess(tmp_path, all_regions=64) as server, Client(server.addresses[0]) as client:
        files = []
        with refused("resource_exhausted", "quota") as details:
            for _ in range(64):
                files.append(MemoryFile(4096))
                client.register(files[-1])
        assert (details[0].field, details[0].value, len(files)) == ("regions", "64", 29)
        bystander_lives(server.addresses[0])
        client.close()
        assert eventually(lambda: server.regions() == (0, 0))
        with Client(server.addresses[0]) as again:
            again.register(files[0])
        for file in files:
            file.close()


@pytest.mark.extended
def test_buffers_of_one_process_leave_memory_to_others(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, host_buffer_bytes=64 << 20) as server, Client(server.addresses[0]) as client:
        buffers = []
        with refused("resource_exhausted", "quota") as details:
            for _ in range(64):
                request = mp.CreateBufferRequest(session=client.token, bytes=1 << 20)
                buffers.append(client.memory.CreateBuffer(request).buffer)
        assert (details[0].field, len(buffers)) == ("host_buffer_bytes", 28)
        bystander_lives(server.addresses[0])
        for buffer in buffers:
            client.memory.FreeBuffer(mp.FreeBufferRequest(session=client.token, buffer=buffer))
        client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=28 << 20))


def test_plans_of_one_process_leave_memory_to_others(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, all_plan_bytes=64 << 10) as server, Client(server.addresses[0]) as client:
        plans = []
        with refused("resource_exhausted", "quota") as details:
            plans.extend(client.plan(size) for size in range(1, 1000))
        assert details[0].field == "plan_bytes" and plans
        bystander_lives(server.addresses[0])
        for plan in plans:
            client.dispatch.ReleasePlan(dp.ReleasePlanRequest(session=client.token, plan=plan))
        client.plan(4)


def test_refusals_say_which_quota_its_value_who_holds_it_and_when_to_come_back(tmp_path: Path) -> None:
    given = {"all_buffers": 16, "all_buffer_bytes": 16 << 20, "all_plans": 16}
    with ServerProcess(tmp_path, **given) as server, Client(server.addresses[0]) as client:

        def buffer(nbytes: int) -> None:
            client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=nbytes))

        takes = {
            "buffer_bytes": lambda: buffer(3 << 20),
            "buffers": lambda: buffer(64),
            "plans": lambda: client.plan(4),
        }
        for quota, take in takes.items():
            with pytest.raises(grpc.RpcError) as raised:
                for _ in range(17):
                    take()
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
            detail = detail_of(raised.value)
            assert (detail.rule, detail.field, detail.value) == ("quota", quota, str(given[f"all_{quota}"]))
            assert "of this client's user hold" in detail.message or "client's process holds" in detail.message
            pushback = dict(raised.value.trailing_metadata())["grpc-retry-pushback-ms"]  # type: ignore[attr-defined]
            assert pushback == str(detail.retry_after_ms) and detail.retry_after_ms
        bystander_lives(server.addresses[0])
