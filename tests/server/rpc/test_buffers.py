"""Resident buffers: made, filled, used, read and freed, within their bounds and quotas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rpc_harness import Client, MemoryFile, ServerProcess, eventually, floats, in_buffer, in_region, inline, refused

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

TEXT = bytes(range(64))


def create(client: Client, nbytes: int = 4096, device: str = "") -> int:
    request = mp.CreateBufferRequest(session=client.token, bytes=nbytes, device=device)
    return client.memory.CreateBuffer(request).buffer


def read(client: Client, buffer: int, nbytes: int, offset: int = 0) -> bytes:
    request = mp.ReadBufferRequest(session=client.token, buffer=buffer, offset=offset, bytes=nbytes)
    return client.memory.ReadBuffer(request).data


def write(client: Client, buffer: int, **source: object) -> None:
    client.memory.WriteBuffer(mp.WriteBufferRequest(session=client.token, buffer=buffer, **source))  # type: ignore[arg-type]


def test_a_new_buffer_is_zero(client: Client) -> None:
    assert read(client, create(client), 4096) == bytes(4096)


def test_what_is_written_is_read_and_computed_with(client: Client) -> None:
    x, y = create(client), create(client)
    write(client, x, offset=128, data=TEXT)
    reply = client.copy(in_buffer(x, 128), in_buffer(y, 64))
    assert read(client, y, 64, offset=64) == TEXT
    assert reply.report.bytes_copied == 0


@pytest.mark.parametrize("sealed", [True, False])
def test_buffers_are_filled_from_regions_and_read_into_them(client: Client, sealed: bool) -> None:
    file = MemoryFile(1 << 16, sealed=sealed)
    file.bytes[:64] = TEXT
    region = client.register(file).region
    buffer = create(client)
    write(client, buffer, offset=8, region=tp.RegionSlice(region=region), bytes=64)
    target = tp.RegionSlice(region=region, offset=1000)
    client.memory.ReadBuffer(
        mp.ReadBufferRequest(session=client.token, buffer=buffer, offset=8, bytes=64, region=target)
    )
    assert file.bytes[1000:1064] == TEXT
    file.close()


def test_an_output_can_be_put_into_a_new_buffer(client: Client) -> None:
    reply = client.copy(inline(TEXT), tp.Location(allocate=tp.AllocateBuffer()))
    assert read(client, reply.outputs[0].buffer, 64) == TEXT
    assert [item.buffer for item in client.status().buffers] == [reply.outputs[0].buffer]
    assert client.status().buffers[0].in_use == 0


def test_an_execution_that_fails_leaves_no_new_buffer(client: Client) -> None:
    plan = client.plan(seconds=0.2)
    request = client.execution(plan, inline(TEXT), tp.Location(allocate=tp.AllocateBuffer()), timeout_ms=1)
    busy = client.dispatch.Execute.future(client.execution(plan, inline(TEXT), tp.Location(return_inline={})))
    replies = list(client.dispatch.ExecuteStream(iter([request])))
    busy.result()
    assert replies[0].results[0].error.code in ("deadline_exceeded", "")
    if replies[0].results[0].HasField("error"):
        assert not client.status().buffers


def test_a_freed_buffer_is_gone(client: Client) -> None:
    buffer = create(client)
    client.memory.FreeBuffer(mp.FreeBufferRequest(session=client.token, buffer=buffer))
    for call in (
        lambda: read(client, buffer, 1),
        lambda: client.memory.FreeBuffer(mp.FreeBufferRequest(session=client.token, buffer=buffer)),
        lambda: client.copy(in_buffer(buffer)),
    ):
        with refused("not_found", "buffer_id"):
            call()


def test_a_buffer_is_invisible_to_other_sessions(client: Client, connect: Callable[[], Client]) -> None:
    buffer = create(client)
    other = connect()
    for call in (
        lambda: read(other, buffer, 1),
        lambda: write(other, buffer, data=b"x"),
        lambda: other.copy(in_buffer(buffer)),
        lambda: other.memory.FreeBuffer(mp.FreeBufferRequest(session=other.token, buffer=buffer)),
    ):
        with refused("not_found", "buffer_id"):
            call()


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 4097), (4096, 1), (4097, 0), (2**64 - 1, 2), (1, 2**64 - 1)])
def test_reads_and_writes_stay_inside(client: Client, offset: int, nbytes: int) -> None:
    buffer = create(client)
    with refused("invalid_argument", "location_bounds"):
        read(client, buffer, nbytes, offset)
    region = client.register(file := MemoryFile(1 << 16)).region
    with refused("invalid_argument", "location_bounds"):
        write(client, buffer, offset=offset, bytes=nbytes, region=tp.RegionSlice(region=region))
    with refused("invalid_argument", "location_bounds"):
        write(client, buffer, bytes=100, region=tp.RegionSlice(region=region, offset=2**64 - 50))
    file.close()


def test_sizes_that_cannot_be_are_refused(client: Client) -> None:
    with refused("invalid_argument", "buffer_size"):
        create(client, 0)
    for nbytes in (2**40, 2**63, 2**64 - 1):
        with refused("resource_exhausted"):
            create(client, nbytes)
    with refused("not_found"):
        create(client, 64, device="cpu:99")
    with refused("invalid_argument", "source"):
        write(client, create(client))


@pytest.mark.extended
def test_quotas_hold_and_are_given_back(tmp_path: Path) -> None:
    quotas = {"buffer_bytes": 10000, "max_buffers": 3, "max_plans": 2, "max_regions": 1, "max_sessions": 3}
    with ServerProcess(tmp_path, **quotas) as server, Client(server.addresses[0]) as client:
        _use_up_buffers(client)
        _use_up_plans(client)
        _use_up_regions(client)
        with Client(server.addresses[0]), refused("resource_exhausted", "quota") as found:
            Client(server.addresses[0])
        assert found[0].retry_after_ms > 0
        assert eventually(lambda: _opens(server))


def _use_up_buffers(client: Client) -> None:
    buffers = [create(client, 3000) for _ in range(3)]
    with refused("resource_exhausted", "session_quota"):
        create(client, 10)
    client.memory.FreeBuffer(mp.FreeBufferRequest(session=client.token, buffer=buffers[0]))
    with refused("resource_exhausted", "session_quota"):
        create(client, 4001)
    create(client, 4000)


def _use_up_plans(client: Client) -> None:
    plans = [client.plan() for _ in range(2)]
    with refused("resource_exhausted", "session_quota"):
        client.plan()
    client.dispatch.ReleasePlan(dp.ReleasePlanRequest(session=client.token, plan=plans[0]))
    client.plan()


def _use_up_regions(client: Client) -> None:
    files = [MemoryFile(4096), MemoryFile(4096)]
    region = client.register(files[0]).region
    with refused("resource_exhausted", "session_quota"):
        client.register(files[1])
    client.unregister(region)
    client.register(files[1])
    for file in files:
        file.close()


def _opens(server: ServerProcess) -> bool:
    try:
        Client(server.addresses[0]).close()
    except Exception:
        return False
    return True


def test_strided_outputs_keep_what_lies_between(client: Client) -> None:
    file = MemoryFile(4096, sealed=False)
    file.bytes[:256] = b"\xff" * 256
    region = client.register(file).region
    spec = tp.TensorSpec(dtype=tp.FP32, shape=[4, 2], strides=[4, 1])
    request = dp.RunRequest(
        session=client.token,
        operation="copy",
        inputs=[tp.Operand(name="x", spec=floats(4, 2), location=inline(bytes(32)))],
        outputs=[tp.Operand(name="y", spec=spec, location=in_region(region))],
    )
    client.dispatch.Run(request)
    row = bytes(8) + b"\xff" * 8
    assert file.bytes[:56] == row * 3 + bytes(8)
    request.outputs[0].location.CopyFrom(tp.Location(return_inline=tp.ReturnInline()))
    request.inputs[0].location.inline = bytes(range(32))
    output = client.dispatch.Run(request).outputs[0]
    assert output.inline == bytes(range(32)), "returned without gaps"
    assert list(output.spec.strides) == [2, 1]
    file.close()
