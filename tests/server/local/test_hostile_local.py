"""Clients of the local socket that lie, flood, stall and die."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import BEGUN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_harness import (
    BIND,
    CALL,
    HEADER,
    HELLO,
    LAUNCH,
    REGISTER,
    REPLY,
    UNBIND,
    UNREGISTER,
    Wire,
    bind_request,
    descriptors,
    expect,
    launches,
    session_of,
)
from rpc_harness import Client, MemoryFile, ServerProcess, eventually, in_region

import tilewright as tw
from tilewright.session.recovery import Patience
from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import error_pb2
from tilewright_proto.v1 import memory_pb2 as mp

# Packets


@pytest.mark.parametrize("size", [1, 2, 8, 15])
def test_half_a_header_gets_an_error(wire: Wire, size: int) -> None:
    wire.send(bytes([CALL]) + bytes(size - 1))
    reply = wire.receive()
    assert reply is not None
    assert (reply.kind, reply.sequence) == (0x80 | CALL, 0)
    expect(reply, "invalid_argument", "packet_format")
    expect(wire.launch(1), "not_found", "binding_id")


@pytest.mark.parametrize("size", [17, 31, 33, 64 * 16 + 1, 65536])
def test_launches_are_whole(wire: Wire, size: int) -> None:
    wire.send(HEADER.pack(LAUNCH, REPLY, 3, 5, 1) + bytes(size - 16))
    reply = wire.receive()
    assert reply is not None
    assert (reply.slot, reply.sequence) == (3, 5)
    expect(reply, "invalid_argument", "packet_format")
    expect(wire.launch(1), "not_found", "binding_id")


def test_a_packet_of_launches_holds_nothing_else(client: Client, wire: Wire, file: MemoryFile) -> None:
    region = wire.register(file)
    binding = wire.bind(client.plan(), in_region(region), in_region(region, 64))
    wire.send(launches(binding, flags=REPLY) + HEADER.pack(CALL, 0, 0, 9, UNBIND) + launches(binding, flags=REPLY))
    first, second, third = wire.receive(), wire.receive(), wire.receive()
    assert first is not None and third is not None
    assert (first.flags, third.flags) == (0, 0)
    expect(second, "invalid_argument", "packet_format")


def test_a_packet_that_is_too_large_gets_an_error(wire: Wire) -> None:
    wire.send(HEADER.pack(CALL, 0, 2, 11, BIND) + bytes(70_000))
    reply = wire.receive()
    assert reply is not None
    assert (reply.slot, reply.sequence) == (2, 11)
    expect(reply, "invalid_argument", "packet_format")
    expect(wire.launch(1), "not_found", "binding_id")


def test_hello_comes_once(client: Client, wire: Wire) -> None:
    expect(wire.ask(HELLO, 1, client.token), "invalid_argument", "packet_format")
    expect(wire.launch(1), "not_found", "binding_id")


def test_an_empty_packet_ends_the_connection(wire: Wire) -> None:
    wire.send(b"")
    assert wire.is_closed()


def test_descriptors_that_nobody_wants_are_closed(server: ServerProcess, wire: Wire, file: MemoryFile) -> None:
    wire.launch(1)
    before = descriptors(server.pid)
    request = mp.RegisterRegionRequest(attached={}, bytes=1)
    for count in (1, 2, 30, 128, 129, 200):
        fds = [file.fd] * count
        wire.send(HEADER.pack(LAUNCH, 0, 0, 1, 1), fds)
        expect(wire.receive(), "invalid_argument")
        expect(wire.call(UNBIND, dp.UnbindRequest(binding=3), fds), "invalid_argument", "packet_descriptors")
        expect(wire.ask(77, 0, b"", fds), "invalid_argument")
        wire.send(b"\1", fds)
        expect(wire.receive(), "invalid_argument")
        if count > 1:
            rule = "packet_descriptors" if count > 128 else "region_descriptor"
            expect(wire.call(REGISTER, request, fds), "invalid_argument", rule)
    assert eventually(lambda: descriptors(server.pid) <= before)


def test_descriptors_before_hello_are_closed(server: ServerProcess, client: Client, file: MemoryFile) -> None:
    before = descriptors(server.pid)
    for _ in range(10):
        with Wire(client.opened.local_socket) as wire:
            wire.send(HEADER.pack(HELLO, 0, 0, 1, 1) + client.token, [file.fd])
            assert wire.receive() is not None
    assert eventually(lambda: descriptors(server.pid) <= before)


def test_nothing_is_left_of_two_hundred_connections(server: ServerProcess, client: Client, file: MemoryFile) -> None:
    plan = client.plan()

    def cycle() -> None:
        with Wire(client.opened.local_socket, client.token) as wire:
            region = wire.register(file)
            binding = wire.bind(plan, in_region(region), in_region(region, 64))
            assert wire.launch(binding).error is None

    cycle()
    assert eventually(lambda: not client.status().regions)
    before, maps = descriptors(server.pid), server.regions()[0]
    threads = len(os.listdir(f"/proc/{server.pid}/task"))  # noqa: PTH208
    for number in range(200):
        cycle()
        if number % 5 == 4:  # its end is noticed in a thread of its own
            assert eventually(lambda: not client.status().regions)
    assert eventually(lambda: (descriptors(server.pid), server.regions()[0]) == (before, maps))
    assert eventually(lambda: len(os.listdir(f"/proc/{server.pid}/task")) <= threads + 1)  # noqa: PTH208


def test_quotas_hold_over_the_local_socket(client: Client, wire: Wire, file: MemoryFile) -> None:
    regions = [wire.register(file) for _ in range(8)]
    request = mp.RegisterRegionRequest(attached={}, bytes=64)
    expect(wire.call(REGISTER, request, [file.fd]), "resource_exhausted", "session_quota")
    plan = client.plan()
    ask = bind_request(plan, in_region(regions[0]), in_region(regions[0], 64))
    bindings = [wire.call(BIND, ask).value for _ in range(8)]
    expect(wire.call(BIND, ask), "resource_exhausted", "session_quota")
    assert wire.call(UNBIND, dp.UnbindRequest(binding=bindings[3])).error is None
    assert wire.call(BIND, ask).error is None


def test_the_client_library_does_not_wait_at_limits_of_its_own_session(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patience, "next", lambda waits, least: pytest.fail("it waits"))
    with tw.connect(server.addresses[0], launch="server") as client:
        buffers = [client.buffer(64) for _ in range(8)]
        with pytest.raises(tw.ResourceExhaustedError, match="this one holds 8") as caught:
            client.buffer(64)
        error = caught.value
        assert (error.rule, error.field, error.value, error.retry_after) == ("session_quota", "buffers", "8", None)
        buffers[0].free()
        client.buffer(64)


def test_sessions_cannot_name_each_others_objects(server: ServerProcess, client: Client, wire: Wire) -> None:
    file = MemoryFile(1 << 16)
    region = wire.register(file)
    binding = wire.bind(client.plan(), in_region(region), in_region(region, 64))
    with session_of(server.addresses[0]) as (other, theirs):
        never = expect(theirs.launch(12345), "not_found", "binding_id")
        errors = [
            expect(theirs.launch(binding), "not_found", "binding_id"),
            expect(theirs.call(UNBIND, dp.UnbindRequest(binding=binding)), "not_found", "binding_id"),
        ]
        for error in errors:  # nobody can tell another's id from one that never was
            assert (error.message, error.fix) == (never.message, never.fix)
            assert error.value == str(binding), "what the caller said itself"
        expect(theirs.call(UNREGISTER, mp.UnregisterRegionRequest(region=region)), "not_found", "region_id")
        plan = other.plan()
        reply = theirs.call(BIND, bind_request(plan, in_region(region), in_region(region)))
        error = expect(reply, "not_found", "region_id")
        told = f"{error}{never}{errors}"
        assert not any(secret in told for secret in (file.name, str(os.getpid()), "/proc", client.token.hex()))
        stolen = dp.UnbindRequest(session=client.token, binding=binding)
        expect(theirs.call(UNBIND, stolen), "not_found", "session_token")
    assert wire.launch(binding).error is None
    file.close()


NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 64, 255, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
HEADERS = st.builds(
    lambda kind, flags, slot, sequence, value: HEADER.pack(
        kind & 0xFF, flags & 0xFF, slot & 0xFFFF, sequence & 0xFFFFFFFF, value
    ),
    NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS,
)  # fmt: skip
MESSAGES = st.sampled_from(
    [
        mp.RegisterRegionRequest(attached={}, bytes=4096).SerializeToString(),
        bind_request(1, in_region(2), in_region(3)).SerializeToString(),
        dp.UnbindRequest(binding=1).SerializeToString(),
        mp.ExportBufferRequest(buffer=1).SerializeToString(),
    ]
)
PACKETS = st.one_of(
    st.binary(min_size=1, max_size=200),
    st.builds(lambda head, rest: head + rest, HEADERS, st.binary(max_size=100)),
    st.builds(lambda method, rest: HEADER.pack(CALL, 0, 0, 1, method) + rest, st.integers(0, 7), MESSAGES),
    st.builds(lambda many: b"".join(many), st.lists(HEADERS, min_size=1, max_size=70)),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.lists(st.tuples(PACKETS, st.booleans()), min_size=1, max_size=6))
def test_garbage_gets_typed_errors_and_the_connection_goes_on(
    client: Client, file: MemoryFile, sent: list[tuple[bytes, bool]]
) -> None:
    with Wire(client.opened.local_socket, client.token) as wire:
        for data, attached in sent:
            wire.send(data, [file.fd] if attached else [])
        wire.send(HEADER.pack(LAUNCH, 0, 4242, 0xABCDEF, 99))
        while (reply := wire.receive()) is not None:
            if reply.flags:
                assert reply.error is not None
                assert reply.error.code not in ("", "internal", "device_error"), reply.error
            if (reply.slot, reply.sequence) == (4242, 0xABCDEF):
                break
        assert reply is not None, "the connection ended"


# Death

CLIENT = """
    import sys, time
    sys.path[:0] = {path!r}
    from local_harness import Wire
    from rpc_harness import Client, MemoryFile, in_region
    client = Client({address!r})
    wire = Wire(client.opened.local_socket, client.token)
    file = MemoryFile(1 << 20)
    region = wire.register(file)
    binding = wire.bind(client.plan(), in_region(region), in_region(region, 64))
    assert wire.launch(binding).error is None
    print("ready", flush=True)
    time.sleep(60)
"""


def test_the_death_of_a_process_frees_what_it_had(server: ServerProcess) -> None:
    maps, files = server.regions()
    before = descriptors(server.pid)
    here = Path(__file__).parent
    folders = [str(here), str(here.parent / "rpc")]
    source = textwrap.dedent(CLIENT).format(path=folders, address=server.addresses[0])
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert server.regions() == (maps + 1, files)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert eventually(lambda: server.regions() == (maps, files))
    assert eventually(lambda: descriptors(server.pid) <= before)


def test_a_region_outlives_its_connection_until_the_launch_is_done(client: Client, connect: Callable[[], Wire]) -> None:
    file = MemoryFile(1 << 16)
    owner, other = connect(), connect()
    region = owner.register(file)
    slow = owner.bind(client.plan(held=1), in_region(region), in_region(region, 64))
    file.bytes[:64] = bytes(range(64))
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(other.launch(slow)))
    thread.start()
    assert eventually(lambda: file.bytes[64] == BEGUN)
    owner.close()
    assert eventually(lambda: not client.status().regions)
    file.bytes[64] = 0
    thread.join()
    assert replies[0].error is None
    assert file.bytes[64:128] == bytes(range(64))
    expect(other.launch(slow), "not_found", "binding_id")
    file.close()


def test_errors_are_details_of_the_protocol(wire: Wire) -> None:
    reply = wire.launch(1)
    assert error_pb2.ErrorDetail.FromString(reply.payload).fix
    assert struct.calcsize("<BBHIQ") == 16
