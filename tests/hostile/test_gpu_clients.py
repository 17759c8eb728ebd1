"""Clients of a GPU that are hostile or unlucky, on a simulated driver and on the machine's own: others go on, and what
they held ends with them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from gpu_servers import KINDS, GpuServer, OnGpu, another_process_computes, bystander_computes, gpu_server
from hostile_servers import WAIT_S, Peak, SparseFile, stopped, unread
from local_harness import HEADER, LAUNCH, REPLY, Wire
from rpc_harness import Client, detail_of, eventually, in_region, refused

from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_server.protocol.frames import Kind

pytestmark = pytest.mark.extended
MIB = 1 << 20
HERE = Path(__file__).parent
FOLDERS = [str(HERE), *(str(HERE.parent / name) for name in ("server/rpc", "server/local", "client", "kernels"))]
BEGIN = f"""
import sys, time
sys.path[:0] = {FOLDERS!r}
from gpu_servers import *
from rpc_harness import Client
client = Client(sys.argv[1])
gpu = OnGpu(client)
def there():
    print("there", flush=True)
    time.sleep(600)
"""
STAGES = {
    "with a hundred buffers": "buffers = [gpu.create(1 << 16) for _ in range(100)]; there()",
    "between packets": "lanes = [gpu.attached() for _ in range(4)]; there()",
    "in endless repeats": "call = client.dispatch.Execute.future(gpu.execution(1_000_000)); there()",
    "reading no replies": """
from tilewright_proto.v1 import memory_pb2 as mp
request = mp.ReadBufferRequest(session=client.token, buffer=gpu.create(4 << 20), bytes=4 << 20)
calls = [client.memory.ReadBuffer.future(request) for _ in range(100)]
there()
""",
}


@pytest.fixture(scope="module", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> Iterator[GpuServer]:
    """A server whose quotas are small. One process has half of seven eighths of them."""
    small = {"all_buffer_bytes": 64 * MIB, "unread_bytes": 64 * MIB, "local_connections": 64}
    with gpu_server(request.param, tmp_path_factory.mktemp("gpu"), kernel_cache, **small) as running:
        bystander_computes(running)
        yield running


@pytest.fixture
def attacker(server: GpuServer) -> Iterator[OnGpu]:
    """A client that leaves no memory of the device, and no descriptor of its process, behind."""
    bystander_computes(server)
    before = server.held()
    with Client(server.addresses[0]) as client:
        yield OnGpu(client)
    assert eventually(lambda: server.held()[1] <= before[1], WAIT_S), (before, server.held())
    assert eventually(lambda: server.held()[0] <= before[0] + 4, WAIT_S), (before, server.held())  # see fault_harness


def test_buffers_of_one_process_leave_the_device_to_others(server: GpuServer, attacker: OnGpu) -> None:
    buffers: list[int] = []
    with refused("resource_exhausted", "quota") as details:
        buffers.extend(attacker.create(MIB) for _ in range(64))
    assert details[0].field == "buffer_bytes" and len(buffers) in (27, 28)
    another_process_computes(server)
    for buffer in buffers:
        attacker.free(buffer)
    attacker.free(attacker.create(27 * MIB))


def test_memory_that_the_device_has_not_is_refused_and_ends_nothing(server: GpuServer, attacker: OnGpu) -> None:
    workers = server.workers
    for nbytes in (1 << 45, 2**63, 2**64 - 1):
        with refused("resource_exhausted"):
            attacker.create(nbytes)
    bystander_computes(server)
    assert server.workers == workers


def test_connections_of_one_process_leave_the_devices_process_to_others(server: GpuServer, attacker: OnGpu) -> None:
    with contextlib.ExitStack() as lanes:
        opened = [lanes.enter_context(attacker.attached()) for _ in range(28)]
        with Wire(attacker.client.opened.local_socket) as late:
            answer = late.receive()
            assert answer is not None and answer.error is not None
            assert (answer.error.rule, answer.error.field) == ("quota", "connections")
        another_process_computes(server)
        assert all(lane.launch(1).error is not None for lane in opened), "they live, and have no binding"
    assert eventually(lambda: _attaches(attacker))


def _attaches(attacker: OnGpu) -> bool:
    try:
        attacker.attached().close()
    except (AssertionError, OSError):
        return False
    return True


def test_wrong_packets_to_the_devices_process_are_answered_and_end_nothing(server: GpuServer, attacker: OnGpu) -> None:
    rng, workers, answers = random.Random(20261129), server.workers, 0
    for _ in range(20):
        with attacker.attached() as lane:
            for _ in range(50):
                number = rng.choice((0, 1, 2**32, 2**63, 2**64 - 1, rng.getrandbits(64)))
                kind = rng.choice((LAUNCH, LAUNCH, rng.randrange(max(Kind) + 1, 128)))
                more = rng.randbytes(rng.choice((0, 0, 7, 99)))
                data = HEADER.pack(kind, REPLY, rng.randrange(2**16), 1, number) + more
                lane.send(data if rng.random() < 0.9 else data[: rng.randrange(1, 16)])
                reply = lane.receive()
                if reply is None:
                    break
                assert reply.error is not None and reply.error.code not in ("", "internal"), reply
                answers += 1
    assert answers > 200
    bystander_computes(server)
    assert server.workers == workers


def test_replies_of_the_devices_memory_that_nobody_reads_are_bounded(server: GpuServer, attacker: OnGpu) -> None:
    buffer = attacker.create(4 * MIB)
    request = mp.ReadBufferRequest(session=attacker.client.token, buffer=buffer, bytes=4 * MIB)
    assert len(attacker.client.memory.ReadBuffer(request).data) == 4 * MIB
    peak = Peak(server)
    address = server.addresses[0]
    way, calls = unread(address, "/tilewright.v1.Memory/ReadBuffer", request.SerializeToString(), 400)
    with way:
        assert eventually(lambda: sum(call.done() for call in calls) >= 400 - 16, WAIT_S)
        failed = [call for call in calls if call.done() and call.code() is not grpc.StatusCode.OK]
        assert (detail_of(failed[0]).rule, detail_of(failed[0]).field) == ("quota", "unread_bytes")
        another_process_computes(server)
    assert peak.grown_mib() < 28 + 150  # as of the CPU's memory


def test_endless_repeats_leave_the_device_to_others(server: GpuServer, attacker: OnGpu) -> None:
    calls = [attacker.client.dispatch.Execute.future(attacker.execution(1_000_000)) for _ in range(20)]
    bystander_computes(server)
    another_process_computes(server)
    for call in calls:
        call.cancel()


@pytest.mark.parametrize("sealed", [True, False])
def test_results_of_the_device_make_no_page_of_a_sparse_file(server: GpuServer, attacker: OnGpu, sealed: bool) -> None:
    client, file = attacker.client, SparseFile(256 * MIB, sealed=sealed)
    buffer = attacker.create(20 * MIB)
    region = client.register(file).region
    with refused("invalid_argument", "region_populated"):
        place = in_region(region).region
        request = mp.ReadBufferRequest(session=client.token, buffer=buffer, bytes=20 * MIB, region=place)
        client.memory.ReadBuffer(request)
    execution = client.execution(attacker.plan, *attacker.places[:2], in_region(region))
    assert [item.error.rule for item in client.dispatch.Execute(execution).results] == ["region_populated"]
    assert file.kept == 0
    bystander_computes(server)
    file.close()


@pytest.mark.parametrize("work", STAGES.values(), ids=STAGES)
def test_clients_of_a_gpu_that_are_stopped_hold_up_nobody_and_leave_nothing(
    server: GpuServer, attacker: OnGpu, work: str
) -> None:
    with contextlib.ExitStack() as clients:
        for _ in range(2):
            clients.enter_context(stopped(server, BEGIN + work))
        for _ in range(2):
            bystander_computes(server)


def test_a_devices_process_that_is_killed_during_a_flood_is_replaced(server: GpuServer, attacker: OnGpu) -> None:
    """Everybody's calls end with a type, and the next ones are right."""
    client = attacker.client
    calls = [client.dispatch.Execute.future(attacker.execution(1000)) for _ in range(20)]
    with contextlib.ExitStack() as lanes:
        for _ in range(8):
            lanes.enter_context(attacker.attached())
        (before,) = server.workers
        os.kill(before, signal.SIGKILL)
        for call in calls:
            with contextlib.suppress(grpc.RpcError):
                for result in call.result(WAIT_S).results:
                    assert result.error.code in ("", "unavailable"), result.error
            if call.exception() is not None:
                assert detail_of(call.exception()).code == "unavailable"
        assert eventually(lambda: _computes(server), WAIT_S)
    assert server.workers != [before]
    with refused("unavailable", "device_lost"):
        attacker.result()


def _computes(server: GpuServer) -> bool:
    try:
        bystander_computes(server)
    except (grpc.RpcError, AssertionError, OSError):
        return False
    return True
