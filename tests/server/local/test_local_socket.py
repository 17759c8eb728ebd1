"""The local socket: who gets in, what can be called over it, and what ends with a connection."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import BEGUN
from local_harness import (
    ATTACH,
    BIND,
    CALL,
    EXPORT,
    HEADER,
    HELLO,
    LAUNCH,
    OPEN_EVENT,
    RECORD,
    REGISTER,
    REPLY,
    TIME,
    TRACE,
    UNBIND,
    UNREGISTER,
    WAIT,
    Wire,
    bind_request,
    expect,
    launches,
    session_of,
)
from rpc_harness import Client, MemoryFile, ServerProcess, eventually, in_buffer, in_region, inline, refused

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import local_pb2
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

TEXT = bytes(range(64))


def test_the_session_names_the_socket_and_the_devices(client: Client, server: ServerProcess) -> None:
    opened = client.opened
    assert opened.local_socket == f"{server.socket}.local"
    assert [(item.id, item.kind, item.arch) for item in opened.devices] == [("cpu:0", "cpu", "none")]
    path = Path(opened.local_socket)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_hello_says_what_the_server_takes(client: Client) -> None:
    with Wire(client.opened.local_socket) as wire:
        reply = wire.ask(HELLO, 1, client.token)
        hello = local_pb2.HelloReply.FromString(reply.payload)
        assert (reply.value, hello.packet_bytes, hello.launches) == (1, 65536, 64)
        assert hello.server_version == client.opened.server_version


@pytest.mark.parametrize(
    ("version", "token", "code"),
    [(1, b"x" * 16, "not_found"), (1, b"", "not_found"), (2, None, "unsupported"), (0, None, "unsupported")],
)
def test_a_wrong_hello_is_answered_and_ends(client: Client, version: int, token: bytes | None, code: str) -> None:
    with Wire(client.opened.local_socket) as wire:
        expect(wire.ask(HELLO, version, client.token if token is None else token), code)
        assert wire.is_closed()


@pytest.mark.parametrize("kind", [CALL, LAUNCH, ATTACH, OPEN_EVENT, 0, 255])
def test_hello_comes_first(client: Client, kind: int) -> None:
    with Wire(client.opened.local_socket) as wire:
        wire.send(HEADER.pack(kind, 0, 7, 9, 1))
        reply = wire.receive()
        assert reply is not None
        assert (reply.kind, reply.slot, reply.sequence) == (0x80 | HELLO, 7, 9)
        expect(reply, "invalid_argument", "packet_format")
        assert wire.is_closed()


@pytest.mark.parametrize("context", [b"", b"\xff" * 3000, b"00-" + b"0" * 32 + b"-0000000000000000-01\nx"])
def test_a_context_is_taken_and_not_answered(client: Client, file: MemoryFile, context: bytes) -> None:
    with Wire(client.opened.local_socket) as wire:
        hello = local_pb2.HelloReply.FromString(wire.ask(HELLO, 1, client.token).payload)
        assert not hello.traces, "this server records none"
        binding = wire.bind(client.plan(), *(in_region(wire.register(file), 64 * number) for number in range(2)))
        wire.send(HEADER.pack(TRACE, 0, 0, 0, 0) + context)
        assert wire.launch(binding).error is None
        wire.send(HEADER.pack(TRACE, 0, 0, 0, 0) + context, [file.fd])
        expect(wire.receive(), "invalid_argument", "packet_format")


def test_the_token_of_an_ended_session_opens_nothing(client: Client, server: ServerProcess) -> None:
    with Client(server.addresses[0]) as other:
        token = other.token

    def refused_now() -> bool:
        with Wire(client.opened.local_socket) as wire:
            return wire.ask(HELLO, 1, token).error is not None

    assert eventually(refused_now)


def test_a_memory_file_needs_no_name_when_its_descriptor_comes(client: Client, wire: Wire) -> None:
    file = MemoryFile(1 << 16, name="anything")
    region = wire.register(file)
    file.bytes[:64] = TEXT
    client.copy(in_region(region), in_region(region, 4096))
    assert file.bytes[4096:4160] == TEXT
    assert [(item.region, item.zero_copy, item.device) for item in client.status().regions] == [(region, True, "")]
    file.close()


def test_an_unsealed_file_is_guarded(client: Client, wire: Wire) -> None:
    file = MemoryFile(1 << 16, sealed=False)
    region = wire.register(file)
    file.bytes[:64] = TEXT
    assert client.copy(in_region(region)).outputs[0].inline == TEXT
    assert not client.status().regions[0].zero_copy
    reply = wire.call(BIND, bind_request(client.plan(), in_region(region), in_region(region, 64)))
    expect(reply, "invalid_argument", "binding_in_place")
    file.close()


def test_a_file_belongs_to_the_first_session_that_registers_it(client: Client, wire: Wire, file: MemoryFile) -> None:
    wire.register(file)
    with session_of(f"unix:{client.opened.local_socket.removesuffix('.local')}") as (_, other):
        request = mp.RegisterRegionRequest(attached={}, bytes=file.nbytes)
        expect(other.call(REGISTER, request, [file.fd]), "not_found", "region_source")


def _other_files() -> dict[str, int]:
    read, write = os.pipe()
    os.close(write)
    plain = tempfile.TemporaryFile(dir=Path(__file__).parent)  # noqa: SIM115 - its descriptor is used
    plain.truncate(1 << 16)
    fd = os.dup(plain.fileno())
    plain.close()
    return {
        "pipe": read,
        "file": fd,
        "folder": os.open("/", os.O_RDONLY),
        "path": os.open("/dev/null", os.O_PATH),
        "device": os.open("/dev/zero", os.O_RDWR),
        "socket": _detached(),
    }


def _detached() -> int:
    return socket.socket().detach()


def test_descriptors_of_anything_else_are_refused(wire: Wire) -> None:
    for what, fd in _other_files().items():
        request = mp.RegisterRegionRequest(attached={}, bytes=4096)
        expect(wire.call(REGISTER, request, [fd]), "invalid_argument", "region_source")
        os.close(fd)
        assert what


def test_a_file_must_be_writable_and_large_enough(wire: Wire, file: MemoryFile) -> None:
    read_only = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY)
    reply = wire.call(REGISTER, mp.RegisterRegionRequest(attached={}, bytes=4096), [read_only])
    expect(reply, "permission_denied", "region_writable")
    os.close(read_only)
    for nbytes in (0, file.nbytes + 1, 2**63):
        reply = wire.call(REGISTER, mp.RegisterRegionRequest(attached={}, bytes=nbytes), [file.fd])
        expect(reply, "invalid_argument", "region_size")


def test_sources_and_descriptors_must_fit(client: Client, wire: Wire, file: MemoryFile) -> None:
    need = mp.RegisterRegionRequest(attached={}, bytes=4096)
    expect(wire.call(REGISTER, need), "invalid_argument", "region_descriptor")
    expect(wire.call(REGISTER, need, [file.fd, file.fd]), "invalid_argument", "region_descriptor")
    spare = mp.RegisterRegionRequest(memfd=file.source(), bytes=4096)
    expect(wire.call(REGISTER, spare, [file.fd]), "invalid_argument", "region_descriptor")
    expect(wire.call(REGISTER, mp.RegisterRegionRequest(bytes=1)), "invalid_argument", "region_source")
    with refused("unsupported", "region_descriptor"):
        need.session = client.token
        client.memory.RegisterRegion(need)
    assert wire.call(REGISTER, mp.RegisterRegionRequest(memfd=file.source(), bytes=4096)).error is None


@pytest.mark.parametrize("source", ["cuda_ipc", "cuda_pool", "device_fd"])
def test_memory_of_gpus_that_are_not_there_is_refused(wire: Wire, file: MemoryFile, source: str) -> None:
    fields = {"handle": bytes(64)} if source == "cuda_ipc" else {"pointer": bytes(64)} if source == "cuda_pool" else {}
    fds = [] if source == "cuda_ipc" else [file.fd]
    for uuid in ("", "GPU-00000000-0000-0000-0000-000000000000"):
        request = mp.RegisterRegionRequest(bytes=64, **{source: {"device_uuid": uuid, **fields}})  # type: ignore[arg-type]
        error = expect(wire.call(REGISTER, request, fds), "not_found", "device_uuid")
        assert error.value == uuid
    if fields:
        request = mp.RegisterRegionRequest(bytes=64, **{source: {next(iter(fields)): b"short"}})  # type: ignore[arg-type]
        expect(wire.call(REGISTER, request, fds), "invalid_argument", "handle_size")


def test_launches_run_what_was_bound(client: Client, wire: Wire, file: MemoryFile) -> None:
    region = wire.register(file)
    binding = wire.bind(client.plan(), in_region(region), in_region(region, 128))
    for value in range(20):
        file.bytes[:64] = bytes([value]) * 64
        reply = wire.launch(binding, TIME if value % 2 else REPLY)
        assert (reply.error, reply.value) == (None, 1)
        assert file.bytes[128:192] == bytes([value]) * 64


def test_gpu_free_operands_may_be_buffers(client: Client, wire: Wire) -> None:
    made = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=256)).buffer
    client.memory.WriteBuffer(mp.WriteBufferRequest(session=client.token, buffer=made, data=TEXT))
    binding = wire.bind(client.plan(), in_buffer(made), in_buffer(made, 64))
    assert wire.launch(binding).error is None
    read = mp.ReadBufferRequest(session=client.token, buffer=made, offset=64, bytes=64)
    assert client.memory.ReadBuffer(read).data == TEXT


def test_only_answers_that_were_asked_for_come(client: Client, wire: Wire, file: MemoryFile) -> None:
    region = wire.register(file)
    good = wire.bind(client.plan(), in_region(region), in_region(region, 128))
    wire.send(launches(good, 77, good) + launches(good, flags=REPLY) + launches(good, flags=TIME))
    failed, replied, timed = wire.receive(), wire.receive(), wire.receive()
    assert expect(failed, "not_found", "binding_id").value == "77"
    assert failed is not None
    assert failed.sequence == 101
    assert replied is not None and timed is not None
    assert (replied.kind, replied.flags, timed.flags, timed.value) == (0x80 | LAUNCH, 0, 0, 1)


def test_sixty_four_launches_fit_a_packet(client: Client, wire: Wire, file: MemoryFile) -> None:
    region = wire.register(file)
    binding = wire.bind(client.plan(), in_region(region), in_region(region, 128))
    wire.send(launches(*[binding] * 64, flags=REPLY))
    assert [wire.receive().sequence for _ in range(64)] == list(range(100, 164))  # type: ignore[union-attr]
    wire.send(launches(*[binding] * 65, flags=REPLY))
    expect(wire.receive(), "invalid_argument", "packet_format")


def test_without_events_nothing_can_be_waited_for(client: Client, wire: Wire, file: MemoryFile) -> None:
    region = wire.register(file)
    binding = wire.bind(client.plan(), in_region(region), in_region(region, 128))
    for flags in (WAIT, RECORD, WAIT | TIME):
        expect(wire.launch(binding, flags), "unsupported", "event_support")
    expect(wire.ask(OPEN_EVENT, payload=bytes(64), slot=3), "unsupported", "event_support")
    expect(wire.ask(ATTACH, payload=b"cpu:0"), "unsupported", "attach")
    expect(wire.ask(ATTACH, payload=b"cuda:9"), "not_found")
    expect(wire.ask(ATTACH, payload=b"\xff\0"), "invalid_argument", "device_id")
    assert wire.launch(binding).error is None


def test_bindings_are_launched_over_any_connection_and_over_grpc(
    client: Client, connect: Callable[[], Wire], file: MemoryFile
) -> None:
    first, second = connect(), connect()
    region = first.register(file)
    binding = first.bind(client.plan(), in_region(region), in_region(region, 128))
    assert second.launch(binding).error is None
    execution = dp.Execution(binding=binding)
    reply = client.dispatch.Execute(dp.ExecuteRequest(session=client.token, executions=[execution, execution]))
    assert [item.device_ns for item in reply.results] == [1, 1]
    first.close()
    assert eventually(lambda: not client.status().regions)
    expect(second.launch(binding), "not_found", "binding_id")
    error = client.dispatch.Execute(dp.ExecuteRequest(session=client.token, executions=[execution])).results[0].error
    assert (error.code, error.rule) == ("not_found", "binding_id")


def test_grpc_binds_too(client: Client, wire: Wire, file: MemoryFile) -> None:
    region = client.register(file).region
    request = bind_request(client.plan(), in_region(region), in_region(region, 128))
    request.session = client.token
    reply = client.dispatch.Bind(request)
    assert (reply.device, reply.attach) == ("cpu:0", False)
    assert wire.launch(reply.binding).error is None
    assert list(client.status().bindings) == [reply.binding]
    unbind = dp.UnbindRequest(session=client.token, binding=reply.binding)
    client.dispatch.Unbind(unbind)
    with refused("not_found", "binding_id"):
        client.dispatch.Unbind(unbind)
    expect(wire.launch(reply.binding), "not_found", "binding_id")


def test_a_binding_ends_with_the_memory_that_it_uses(client: Client, wire: Wire, file: MemoryFile) -> None:
    region = wire.register(file)
    plan = client.plan()
    binding = wire.bind(plan, in_region(region), in_region(region, 128))
    client.dispatch.ReleasePlan(dp.ReleasePlanRequest(session=client.token, plan=plan))
    assert wire.launch(binding).error is None
    assert wire.call(UNREGISTER, mp.UnregisterRegionRequest(region=region)).error is None
    expect(wire.launch(binding), "not_found", "binding_id")
    expect(wire.call(UNBIND, dp.UnbindRequest(binding=binding)), "not_found", "binding_id")
    expect(wire.call(UNREGISTER, mp.UnregisterRegionRequest(region=region)), "not_found", "region_id")


def test_a_binding_takes_no_copies_and_no_bindings(client: Client, wire: Wire, file: MemoryFile) -> None:
    region = wire.register(file)
    plan = client.plan()
    for locations in (
        (inline(TEXT), in_region(region)),
        (in_region(region), tp.Location(return_inline={})),
        (in_region(region), tp.Location(allocate={})),
    ):
        expect(wire.call(BIND, bind_request(plan, *locations)), "invalid_argument", "binding_in_place")
    expect(wire.call(BIND, bind_request(plan, in_region(region))), "invalid_argument", "operand_count")
    expect(wire.call(BIND, bind_request(plan, in_region(1), in_region(region))), "not_found", "region_id")
    expect(wire.call(BIND, bind_request(5, in_region(region), in_region(region))), "not_found", "plan_id")
    again = dp.BindRequest(execution=dp.Execution(binding=7))
    expect(wire.call(BIND, again), "invalid_argument", "execution")
    assert not client.status().bindings


def test_an_execution_names_a_binding_or_a_plan(client: Client, wire: Wire, file: MemoryFile) -> None:
    region = wire.register(file)
    binding = wire.bind(client.plan(), in_region(region), in_region(region, 128))
    for more in ({"plan": 1}, {"repeat": 2}, {"locations": [in_region(region)]}):
        execution = dp.Execution(binding=binding, **more)  # type: ignore[arg-type]
        with refused("invalid_argument", "execution"):
            client.dispatch.Execute(dp.ExecuteRequest(session=client.token, executions=[execution]))


def test_calls_know_their_session(client: Client, wire: Wire) -> None:
    expect(wire.call(UNBIND, dp.UnbindRequest(session=b"x" * 16, binding=1)), "not_found", "session_token")
    expect(wire.call(UNBIND, dp.UnbindRequest(session=client.token, binding=1)), "not_found", "binding_id")
    for method in (0, 99, 2**64 - 1):
        expect(wire.ask(CALL, method), "invalid_argument", "local_method")
    expect(wire.ask(CALL, BIND, b"\xff\xff\xff"), "invalid_argument", "wire_format")


def test_buffers_of_a_cpu_are_not_exported(client: Client, wire: Wire) -> None:
    made = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=256)).buffer
    with refused("unsupported", "device_sharing"):
        client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=256, exportable=True))
    expect(wire.call(EXPORT, mp.ExportBufferRequest(buffer=made)), "invalid_argument", "buffer_exportable")
    expect(wire.call(EXPORT, mp.ExportBufferRequest(buffer=12)), "not_found", "buffer_id")
    with refused("invalid_argument", "buffer_exportable"):
        client.memory.ExportBuffer(mp.ExportBufferRequest(session=client.token, buffer=made))
    assert not client.status().buffers[0].exported


def test_a_launch_that_waits_too_long_is_given_up(
    client: Client, connect: Callable[[], Wire], file: MemoryFile
) -> None:
    first, second = connect(), connect()
    region = first.register(file)
    slow = first.bind(client.plan(held=1), in_region(region), in_region(region, 128))
    late = first.bind(client.plan(), in_region(region, 256), in_region(region, 512), timeout_ms=1)
    first.send(launches(slow, flags=REPLY))
    assert eventually(lambda: file.bytes[128] == BEGUN)
    expect(second.launch(late), "deadline_exceeded", "deadline")
    file.bytes[128] = 0
    reply = first.receive()
    assert reply is not None
    assert reply.error is None
    assert second.launch(late).error is None
