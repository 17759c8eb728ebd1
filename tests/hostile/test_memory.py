"""Memory that clients make the server hold has bounds: requests on their way, replies that nobody reads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from hostile_servers import LIMITED, RUN, WAIT_S, WINDOW, Peak, bystander_lives, channel, unread
from rpc_harness import FAKE, Client, ServerProcess, detail_of, eventually, refused

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

MIB = 1 << 20


def buffer_of(client: Client, nbytes: int) -> int:
    return client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=nbytes)).buffer


@pytest.mark.extended
def test_replies_that_nobody_reads_are_bounded(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, unread_bytes=64 * MIB) as server, Client(server.addresses[0]) as client:
        buffer = buffer_of(client, 4 * MIB)
        request = mp.ReadBufferRequest(session=client.token, buffer=buffer, bytes=4 * MIB)
        assert len(client.memory.ReadBuffer(request).data) == 4 * MIB
        peak = Peak(server)
        way, calls = unread(server.addresses[0], "/tilewright.v1.Memory/ReadBuffer", request.SerializeToString(), 400)
        with way:
            assert eventually(lambda: sum(call.done() for call in calls) >= 400 - 16, WAIT_S)
            failed = [call for call in calls if call.done() and call.code() is not grpc.StatusCode.OK]
            detail = detail_of(failed[0])
            assert (detail.rule, detail.field, detail.value) == ("quota", "unread_bytes", str(64 * MIB))
            bystander_lives(server.addresses[0])
        # One process has half of 7/8 of the quota; what is copied at the same time comes on top.
        assert peak.grown_mib() < 28 + 150
        assert eventually(lambda: len(client.memory.ReadBuffer(request, timeout=WAIT_S).data) == 4 * MIB)


@pytest.mark.extended
def test_large_requests_without_a_session_are_refused(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, channel(server.addresses[0]) as way:
        run = way.unary_unary(RUN)
        data = dp.RunRequest(
            operation="copy", inputs=[tp.Operand(name="x", location=tp.Location(inline=bytes(18 * MIB)))]
        ).SerializeToString()
        with refused("invalid_argument", "sessionless_limit"):
            run(data)
        peak = Peak(server)
        calls = [run.future(data) for _ in range(120)]
        rules = {detail_of(call.exception(120)).rule for call in calls}
        assert rules <= {"sessionless_limit", "request_time"}
        bystander_lives(server.addresses[0])
        assert peak.grown_mib() < 500  # of 2160; a message takes more than its bytes while gRPC takes it apart


@pytest.mark.extended
def test_requests_that_wait_are_bounded(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, request_bytes=64 * MIB, workers=4) as server, Client(server.addresses[0]) as client:
        plan = client.plan(4, seconds=0.2)
        slow = client.execution(plan, tp.Location(inline=bytes(16)), tp.Location(return_inline=tp.ReturnInline()))
        held = [client.dispatch.Execute.future(slow) for _ in range(8)]
        large = mp.WriteBufferRequest(session=client.token, buffer=1, data=bytes(2 * MIB))
        work = dp.ExecuteRequest.FromString(slow.SerializeToString())
        work.executions[0].locations[0].inline = bytes(2 * MIB)
        calls = [client.dispatch.Execute.future(work) for _ in range(40)]
        details = [detail_of(error) for call in calls if (error := call.exception(WAIT_S)) is not None]
        quota = [item for item in details if item.field == "request_bytes"]
        assert 0 < len(quota) <= 40 - 13
        assert all(item.retry_after_ms for item in quota)
        assert all(call.result(WAIT_S) for call in held)
        with refused("not_found"):
            client.memory.WriteBuffer(large, timeout=WAIT_S)


def test_streams_that_are_not_read_are_bounded_together(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, unread_bytes=32 * MIB, workers=8) as server, Client(server.addresses[0]) as client:
        plan = client.plan(MIB)
        buffer = buffer_of(client, 4 * MIB)
        place = tp.Location(buffer=tp.BufferSlice(buffer=buffer))
        request = client.execution(plan, place, tp.Location(return_inline=tp.ReturnInline()))
        hold = threading.Event()

        def requests() -> Iterator[bytes]:
            for _ in range(20):
                yield request.SerializeToString()
            hold.wait(30)

        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1), *WINDOW]
        peak = Peak(server)
        with grpc.insecure_channel(server.addresses[0], options=options) as way:
            streams = [way.stream_stream("/tilewright.v1.Dispatch/ExecuteStream")(requests()) for _ in range(40)]
            assert eventually(lambda: sum(stream.done() for stream in streams) >= 40 - 8, WAIT_S)
            ended = next(stream for stream in streams if stream.done())
            assert detail_of(ended).field == "unread_bytes"
            bystander_lives(server.addresses[0])
            hold.set()
        assert peak.grown_mib() < 16 + 150


@pytest.mark.extended
def test_a_limit_of_address_space_refuses_and_does_not_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, "RLIMIT_AS", str(3 << 30), *FAKE]
    with ServerProcess(tmp_path, command) as server, Client(server.addresses[0]) as client:
        assert "lowered to fit the limits of the system" in server.log()
        with refused("resource_exhausted", "address_space"):
            for _ in range(100):
                buffer_of(client, 64 * MIB)
        data = dp.RunRequest(
            session=client.token, inputs=[tp.Operand(name="x", location=tp.Location(inline=bytes(18 * MIB)))]
        ).SerializeToString()
        with channel(server.addresses[0]) as way:
            calls = [way.unary_unary(RUN).future(data) for _ in range(60)]
            codes = {detail_of(call.exception(120)).code for call in calls}
        assert codes <= {"resource_exhausted", "not_found", "invalid_argument"}
        bystander_lives(server.addresses[0])
        assert server.stop() == 0, server.log()


@pytest.mark.extended
def test_requests_of_nothing_but_fields_are_not_parsed(tmp_path: Path) -> None:
    """Empty operands take two bytes each, and a hundred when they are parsed, which holds up all threads."""
    with ServerProcess(tmp_path) as server, Client(server.addresses[0]) as client:
        number = dp.RunRequest.DESCRIPTOR.fields_by_name["inputs"].number
        named = dp.RunRequest(session=client.token, operation="copy").SerializeToString()
        flat = named + bytes((number << 3 | 2, 0)) * (8 * MIB)
        numbers = tp.Attribute(integers=tp.Attribute.Ints(values=[1] * (8 * MIB)))
        deep = dp.RunRequest(session=client.token, operation="copy", attributes={"x": numbers}).SerializeToString()
        peak = Peak(server)
        with channel(server.addresses[0]) as way:
            for data in (flat, deep):
                with refused("invalid_argument", "request_structure"):
                    way.unary_unary(RUN)(data, timeout=WAIT_S)
        bystander_lives(server.addresses[0])
        assert peak.grown_mib() < 120  # of 600: gRPC holds a message twice for a while
