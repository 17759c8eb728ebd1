"""Requests that no client of good will sends: the server lives, answers with typed errors only, and loses nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rpc_harness import Client, MemoryFile, ServerProcess, detail_of, eventually, floats, in_region, inline

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for module in (dp, mp, kp)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
CODES = {
    "invalid_argument",
    "config_invalid",
    "unsupported",
    "not_found",
    "permission_denied",
    "resource_exhausted",
    "deadline_exceeded",
    "cancelled",
    "unavailable",
}
"""What a hostile request may get: anything but an internal error."""

SIGNED = [0, 1, -1, 2, 8, 63, 64, 2**31 - 1, -(2**31), 2**48, 2**62, 2**63 - 1, -(2**63)]
UNSIGNED = [0, 1, 2, 8, 63, 64, 4096, 2**31, 2**32 - 1, 2**48, 2**63, 2**64 - 1]
TEXTS = ["", "copy", "gemm", "x", "y", "d[0]", "cpu:0", "a" * 300, "\0", "\n", "é", "../../etc/passwd", "%s%n"]
KIND = FieldDescriptor


class Known:
    """Ids and tokens that exist, so that hostile requests get past the first check."""

    token = b""
    region = 0
    plan = 0
    buffer = 0


def scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.name == "session":
        return st.sampled_from(["token"] * 8 + ["", "none", "long"])
    if field.name in ("region", "plan", "buffer") and field.type == KIND.TYPE_FIXED64:
        return st.sampled_from(["known"] * 4 + UNSIGNED)  # type: ignore[operator]
    if field.name == "repeat":
        return st.sampled_from([0, 1, 3, 2**32 - 1])
    if field.cpp_type in (KIND.CPPTYPE_INT32, KIND.CPPTYPE_ENUM):
        return st.sampled_from([number for number in SIGNED if -(2**31) <= number < 2**31])
    if field.cpp_type == KIND.CPPTYPE_INT64:
        return st.sampled_from(SIGNED)
    if field.cpp_type == KIND.CPPTYPE_UINT32:
        return st.sampled_from([number for number in UNSIGNED if number < 2**32])
    if field.cpp_type == KIND.CPPTYPE_UINT64:
        return st.sampled_from(UNSIGNED)
    if field.cpp_type == KIND.CPPTYPE_DOUBLE:
        return st.sampled_from([0.0, -1.0, float("nan"), float("inf"), 1e308])
    if field.cpp_type == KIND.CPPTYPE_BOOL:
        return st.booleans()
    if field.type == KIND.TYPE_BYTES:
        return st.sampled_from([b"", b"\0" * 64, b"x" * 63, bytes(4096)])
    return st.sampled_from(TEXTS)


def values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return st.deferred(lambda: messages(field.message_type, depth + 1))
    return scalars(field)


def messages(descriptor: Any, depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    """A tree of fields; each may be missing. Deep parts are left out."""
    if depth > 5:
        return st.just({})
    optional = {}
    for field in descriptor.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            optional[field.name] = st.dictionaries(st.sampled_from(TEXTS), values(value, depth), max_size=2)
        elif field.is_repeated:
            optional[field.name] = st.lists(values(field, depth), max_size=3)
        else:
            optional[field.name] = values(field, depth)
    return st.fixed_dictionaries({}, optional=optional)


def fill(message: Message, tree: dict[str, Any]) -> Message:
    """Build the message; where a tree sets several members of a oneof, the last wins."""
    for name, value in tree.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        target = getattr(message, name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key, item in value.items():
                if isinstance(item, dict):
                    fill(target[key], item)
                else:
                    target[key] = item
        elif field.is_repeated:
            for item in value:
                if field.message_type is not None:
                    fill(target.add(), item)
                else:
                    target.append(_resolved(name, item))
        elif field.message_type is not None:
            target.SetInParent()
            fill(target, value)
        else:
            setattr(message, name, _resolved(name, value))
    return message


def _resolved(name: str, value: Any) -> Any:
    if name == "session":
        return {"token": Known.token, "": b"", "none": b"0" * 16, "long": b"0" * 1000}[value]
    return getattr(Known, name) if value == "known" else value


@pytest.fixture(scope="module")
def victim(server: ServerProcess) -> Iterator[Client]:
    """A session with one of everything."""
    client = Client(server.addresses[0])
    file = MemoryFile(4096)
    Known.token = client.token
    Known.region = client.register(file).region
    Known.plan = client.plan()
    Known.buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=4096)).buffer
    yield client
    client.close()
    file.close()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_lost(server: ServerProcess) -> Iterator[None]:
    shm = set(Path("/dev/shm").glob("tilewright*"))
    before = server.regions(), len(server.descriptors())
    yield
    assert server.alive
    assert eventually(lambda: server.regions() == before[0], 3)
    assert eventually(lambda: len(server.descriptors()) <= before[1], 3), server.descriptors()
    assert set(Path("/dev/shm").glob("tilewright*")) <= shm


def send(client: Client, path: str, requests: list[bytes]) -> list[bytes]:
    """Raw bytes to a method; returns the raw replies. Errors must be typed and not internal."""
    method = METHODS[path]
    channel = client.channel
    timeout = 5.0
    try:
        if method.client_streaming:
            return list(channel.stream_stream(path)(iter(requests), timeout=timeout))
        if method.server_streaming:
            stream = channel.unary_stream(path)(requests[0], timeout=timeout)
            if method.name == "OpenSession":
                first = next(stream)
                stream.cancel()
                return [first]
            return list(stream)
        return [channel.unary_unary(path)(requests[0], timeout=timeout)]
    except grpc.RpcError as error:
        detail = detail_of(error)
        assert detail.code in CODES, detail
        assert detail.message
        assert not any(path in detail.message for path in ("/proc", "/dev/shm", "/tmp")), detail
        return []


def check_results(replies: list[bytes]) -> None:
    for reply in replies:
        for result in dp.ExecuteReply.FromString(reply).results:
            assert not result.HasField("error") or result.error.code in CODES, result.error


SETTINGS = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
SENT = [path for path in METHODS if not path.startswith("/tilewright.v1.Kernels/")]


@pytest.mark.parametrize("path", SENT)
@SETTINGS
@given(data=st.data())
def test_hostile_requests_get_typed_errors(victim: Client, path: str, data: st.DataObject) -> None:
    method = METHODS[path]
    request_type = message_factory.GetMessageClass(method.input_type)
    tree = data.draw(messages(method.input_type))
    if method.name in ("UnregisterRegion", "FreeBuffer", "ReleasePlan"):
        tree.pop(method.name.removeprefix("Unregister").removeprefix("Free").removeprefix("Release").lower(), None)
    request = fill(request_type(), tree).SerializeToString()
    replies = send(victim, path, [request])
    if method.name.startswith("Execute"):
        check_results(replies)
    if method.name == "CreateBuffer" and replies:
        made = mp.CreateBufferReply.FromString(replies[0]).buffer
        victim.memory.FreeBuffer(mp.FreeBufferRequest(session=victim.token, buffer=made))
    if method.name == "Plan" and replies:
        made = dp.PlanReply.FromString(replies[0]).plan
        victim.dispatch.ReleasePlan(dp.ReleasePlanRequest(session=victim.token, plan=made))


@pytest.mark.parametrize("path", list(METHODS))
@settings(SETTINGS, max_examples=15)
@given(garbage=st.binary(min_size=1, max_size=200))
def test_garbage_on_the_wire_gets_typed_errors(victim: Client, path: str, garbage: bytes) -> None:
    if path.startswith("/tilewright.v1.Kernels/") and _parses(path, garbage):
        return
    send(victim, path, [garbage])


def _parses(path: str, garbage: bytes) -> bool:
    try:
        message_factory.GetMessageClass(METHODS[path].input_type).FromString(garbage)
    except Exception:
        return False
    return True


def test_garbage_for_each_method_says_what_was_expected(victim: Client) -> None:
    for path, method in METHODS.items():
        if method.client_streaming:
            continue
        kind = "unary_stream" if method.server_streaming else "unary_unary"
        call: Callable[..., Any] = getattr(victim.channel, kind)(path)
        with pytest.raises(grpc.RpcError) as caught:
            reply = call(b"\xff\xff\xff")
            list(reply)
        detail = detail_of(caught.value)
        assert (detail.code, detail.rule) == ("invalid_argument", "wire_format")
        assert method.input_type.full_name in detail.message


def test_giant_shapes_are_refused_at_once(victim: Client) -> None:
    for shape in ([2**31, 2**31], [2**62, 2**62, 2**62], [2**48 + 1], [1] * 9, [2**63 - 1] * 8, list(range(500_000))):
        begin = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            victim.dispatch.Run(
                dp.RunRequest(
                    operation="copy", inputs=[tp.Operand(name="x", spec=floats(*shape), location=inline(b""))]
                )
            )
        assert detail_of(caught.value).code == "invalid_argument"
        assert time.monotonic() - begin < 0.5


def test_strides_that_reach_out_of_bounds_are_refused(victim: Client) -> None:
    for strides in ([2**62, 1], [1024, 1], [2**48, 2**48], [-1, 1], [1, -(2**63)]):
        spec = tp.TensorSpec(dtype=tp.FP32, shape=[4, 4], strides=strides)
        operand = tp.Operand(name="x", spec=spec, location=in_region(Known.region))
        with pytest.raises(grpc.RpcError) as caught:
            victim.dispatch.Run(dp.RunRequest(session=victim.token, operation="copy", inputs=[operand]))
        assert detail_of(caught.value).code == "invalid_argument"


def test_an_oversize_message_is_refused_and_the_connection_survives(victim: Client) -> None:
    with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
        victim.dispatch.Run(
            dp.RunRequest(operation="copy", inputs=[tp.Operand(name="x", location=inline(bytes(30 << 20)))])
        )
    victim.status()


def test_many_operands_of_one_name_are_refused(victim: Client) -> None:
    operand = tp.Operand(name="x", spec=floats(1), location=inline(bytes(4)))
    for count in (2, 20_000):
        with pytest.raises(grpc.RpcError) as caught:
            victim.dispatch.Run(dp.RunRequest(operation="copy", inputs=[operand] * count))
        assert detail_of(caught.value).rule in ("operand_unique", "operand_count")


def test_a_request_of_too_many_executions_is_refused(victim: Client) -> None:
    request = dp.ExecuteRequest(session=victim.token, executions=[dp.Execution(plan=Known.plan)] * 5000)
    with pytest.raises(grpc.RpcError) as caught:
        victim.dispatch.Execute(request)
    assert detail_of(caught.value).rule == "execution_count"


def test_connections_that_say_nothing_or_nonsense_hold_nobody_up(server: ServerProcess, victim: Client) -> None:
    import socket

    sockets = []
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", os.urandom(4096)):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(server.socket))
        connection.sendall(words)
        sockets.append(connection)
    victim.status()
    for connection in sockets:
        connection.close()
