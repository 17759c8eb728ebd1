"""Requests that no client of good will sends: the server lives, answers with typed errors only, and loses nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from hostile import METHODS, Known, check_results, messages, request_of, send
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rpc_harness import Client, MemoryFile, ServerProcess, detail_of, eventually, floats, in_region, inline

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp


@pytest.fixture(scope="module")
def victim(server: ServerProcess) -> Iterator[Client]:
    """A session with one of everything."""
    client = Client(server.addresses[0])
    file = MemoryFile(4096)
    Known.token = client.token
    Known.region = client.register(file).region
    Known.plan = client.plan()
    Known.buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=4096)).buffer
    places = [in_region(Known.region), in_region(Known.region, 64)]
    bind = dp.BindRequest(session=client.token, execution=dp.Execution(plan=Known.plan, locations=places))
    Known.binding = client.dispatch.Bind(bind).binding
    yield client
    client.close()
    file.close()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_lost(server: ServerProcess) -> Iterator[None]:
    shm = set(Path("/dev/shm").glob("tilewright*"))
    before = server.regions(), len(server.descriptors())
    yield
    assert server.alive
    assert eventually(lambda: server.regions() == before[0])
    assert eventually(lambda: len(server.descriptors()) <= before[1]), server.descriptors()
    assert set(Path("/dev/shm").glob("tilewright*")) <= shm


SETTINGS = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
SENT = [path for path in METHODS if not path.startswith("/tilewright.v1.Kernels/")]


@pytest.mark.parametrize("path", SENT)
@SETTINGS
@given(data=st.data())
def test_hostile_requests_get_typed_errors(victim: Client, path: str, data: st.DataObject) -> None:
    method = METHODS[path]
    tree = data.draw(messages(method.input_type))
    ends = {"UnregisterRegion": "region", "FreeBuffer": "buffer", "ReleasePlan": "plan", "Unbind": "binding"}
    if method.name in ends:
        tree.pop(ends[method.name], None)
    request = request_of(path, tree)
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
        with pytest.raises(grpc.RpcError) as caught:
            victim.dispatch.Run(
                dp.RunRequest(
                    operation="copy", inputs=[tp.Operand(name="x", spec=floats(*shape), location=inline(b""))]
                ),
                timeout=20,
            )
        assert detail_of(caught.value).code == "invalid_argument"


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
