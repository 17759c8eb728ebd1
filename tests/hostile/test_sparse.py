"""Pages of shared memory are made, and paid for, by their owner."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hostile_servers import GEMM, PAGE, WAIT_S, SparseFile, bystander_lives, limited_group
from rpc_harness import FAKE, Client, MemoryFile, ServerProcess, detail_of, in_buffer, in_region, inline, refused

from tilewright_proto.inference import inference_pb2 as ip
from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_server.memory.shm import Mapping

GIB = 1 << 30


def shared_mib(server: ServerProcess) -> float:
    """Pages of shared memory that the server has mapped."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0]) / 1024


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.extended
def test_the_server_makes_no_page_for_a_sparse_operand(tmp_path: Path, sealed: bool) -> None:
    with ServerProcess(tmp_path) as server, Client(server.addresses[0]) as client:
        file = SparseFile(GIB, sealed=sealed)
        region = client.register(file).region
        plan = client.plan(GIB // 4)
        buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=GIB)).buffer
        before = shared_mib(server)
        execution = client.execution(plan, in_buffer(buffer), in_region(region))
        reply = client.dispatch.Execute(execution)
        assert [item.error.rule for item in reply.results] == ["region_populated"]
        with refused("invalid_argument", "region_populated"):
            client.dispatch.Bind(client.binding(plan, in_buffer(buffer), in_region(region)))
        with refused("invalid_argument", "region_populated"):
            client.memory.ReadBuffer(
                mp.ReadBufferRequest(session=client.token, buffer=buffer, bytes=GIB, region=in_region(region).region)
            )
        assert file.kept == 0
        assert shared_mib(server) - before < 1
        bystander_lives(server.addresses[0])
        file.close()


@pytest.mark.extended
def test_a_container_that_is_smaller_than_what_clients_share_is_not_filled(tmp_path: Path) -> None:
    """A file of 1 GiB without pages, sealed, had the kernel end a server that may have 700 MB. Pages that the client
    made before are the client's: the server writes into all of them."""
    part = GIB // 8
    with (
        limited_group("memory", "memory.max", 700_000_000) as group,
        ServerProcess(tmp_path, [*group, *FAKE]) as server,
        Client(server.addresses[0]) as client,
    ):
        file = SparseFile(GIB)
        region = client.register(file).region
        plan = client.plan(part // 4)
        buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=part)).buffer
        places = [in_region(region, at) for at in range(0, GIB, part)]
        executions = [client.execution(plan, in_buffer(buffer), place) for place in places]
        for execution in executions:
            assert client.dispatch.Execute(execution).results[0].error.rule == "region_populated"
        for at in range(0, GIB, GIB // 64):
            os.pwrite(file.fd, bytes(GIB // 64), at)
        for execution in executions:
            assert not client.dispatch.Execute(execution, timeout=WAIT_S).results[0].HasField("error")
        bystander_lives(server.addresses[0])
        file.close()


PUNCH_HOLE = 0x1 | 0x2
"""``FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE`` of <linux/falloc.h>."""
_libc = ctypes.CDLL(None, use_errno=True)


def needs_guard() -> None:
    file = SparseFile(PAGE)
    mapping = Mapping(file.fd, PAGE)
    guarded = mapping.is_guarded
    mapping.close()
    file.close()
    if not guarded:
        pytest.skip("the system does not allow userfaultfd, or libtilewright is not built")


def punch(file: SparseFile, offset: int, nbytes: int) -> None:
    assert _libc.fallocate(file.fd, PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(nbytes)) == 0


def test_pages_that_a_client_takes_away_after_the_look_are_not_made_anew(tmp_path: Path) -> None:
    """The server looks at pages once; a client could punch them out then, and have them charged to the server."""
    needs_guard()
    with ServerProcess(tmp_path) as server:
        for way in ("batch", "binding", "read"):
            with Client(server.addresses[0]) as client:
                _uses_no_page_that_was_taken_away(client, way)


def _uses_no_page_that_was_taken_away(client: Client, way: str) -> None:
    nbytes = 16 << 20
    file, good = SparseFile(2 * nbytes), MemoryFile(nbytes)
    os.pwrite(file.fd, bytes(2 * nbytes), 0)
    region = client.register(file).region
    plan = client.plan(nbytes // 4)
    buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=nbytes)).buffer
    execution = client.execution(plan, in_buffer(buffer), in_region(region))
    bound = client.dispatch.Bind(client.binding(plan, in_buffer(buffer), in_region(region))).binding
    launch = dp.ExecuteRequest(session=client.token, executions=[dp.Execution(binding=bound)])
    assert (rule_of(client, execution), rule_of(client, launch)) == ("", "")
    kept = file.kept
    punch(file, nbytes // 2, nbytes // 4)
    assert file.kept == kept - nbytes // 4
    with refused("invalid_argument", "region_populated") as told:
        if way == "read":
            target = in_region(region).region
            client.memory.ReadBuffer(
                mp.ReadBufferRequest(session=client.token, buffer=buffer, bytes=nbytes, region=target)
            )
        else:
            client.dispatch.Execute(execution if way == "batch" else launch)
    assert "taken away" in told[0].message
    assert file.kept == kept - nbytes // 4
    assert (rule_of(client, execution), rule_of(client, launch)) == ("region_id", "binding_id")
    # Other memory of the session is of use as before, and so is this, once it is registered again.
    for place in (in_region(client.register(good).region), in_region(client.register(file).region, nbytes)):
        assert rule_of(client, client.execution(plan, in_buffer(buffer), place)) == ""
    file.close()
    good.close()


@pytest.mark.extended
@pytest.mark.parametrize("sealed", [True, False])
def test_a_client_that_takes_pages_away_all_the_time_does_not_fill_the_servers_container(
    tmp_path: Path, sealed: bool
) -> None:
    """One file after the other is written by the server while its owner punches it: more than the server may have."""
    needs_guard()
    nbytes, rules = 64 << 20, set()
    with (
        limited_group("memory", "memory.max", 700_000_000) as group,
        ServerProcess(tmp_path, [*group, *FAKE]) as server,
        Client(server.addresses[0]) as client,
        contextlib.ExitStack() as files,
    ):
        plan = client.plan(nbytes // 4)
        buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=nbytes)).buffer
        for _ in range(14):
            file = SparseFile(nbytes, sealed=sealed)
            files.callback(file.close)
            os.pwrite(file.fd, bytes(nbytes), 0)
            execution = client.execution(plan, in_buffer(buffer), in_region(client.register(file).region))
            assert rule_of(client, execution) == ""
            with punched(file, nbytes):
                rules |= {rule_of(client, execution) for _ in range(5)}
            assert file.kept == 0
        assert "region_populated" in rules and rules <= {"", "region_populated", "region_id"}
        bystander_lives(server.addresses[0])


@contextlib.contextmanager
def punched(file: SparseFile, nbytes: int) -> Iterator[None]:
    """Take all pages away, again and again."""
    ended = threading.Event()

    def punch_on() -> None:
        while not ended.is_set():
            punch(file, 0, nbytes)

    puncher = threading.Thread(target=punch_on)
    puncher.start()
    try:
        yield
    finally:
        ended.set()
        puncher.join()


def rule_of(client: Client, execution: dp.ExecuteRequest) -> str:
    """Rule of the error of one execution; empty if there is none."""
    try:
        return client.dispatch.Execute(execution).results[0].error.rule
    except grpc.RpcError as error:
        return detail_of(error).rule


@pytest.mark.parametrize("unregisters", [False, True])
@pytest.mark.extended
def test_pages_of_results_that_the_server_makes_do_not_fill_its_container(tmp_path: Path, unregisters: bool) -> None:
    """Clients of the Open Inference Protocol name objects without pages for results: so many had the kernel end a
    server that may have 700 MB."""
    rows, filled = 4000, 0
    nbytes = 4 * rows * rows
    with (
        limited_group("memory", "memory.max", 700_000_000) as group,
        ServerProcess(tmp_path, [*group, *GEMM], cpu_threads=1) as server,
        grpc.insecure_channel(server.addresses[0]) as channel,
        contextlib.ExitStack() as objects,
    ):
        call = functools.partial(kserve, channel)
        for name in (f"tilewright_sparse_{os.getpid()}_{each}" for each in range(6)):
            path = Path("/dev/shm", name)
            with path.open("wb") as file:
                objects.callback(path.unlink, missing_ok=True)
                file.truncate(nbytes)
            register = ip.SystemSharedMemoryRegisterRequest(name=name, key=name, byte_size=nbytes)
            try:
                call("SystemSharedMemoryRegister", register, ip.SystemSharedMemoryRegisterResponse)
            except grpc.RpcError as error:
                assert detail_of(error).field == "kserve_region_bytes"
                continue
            call("ModelInfer", product(name, rows), ip.ModelInferResponse)
            assert path.stat().st_blocks * 512 >= nbytes
            filled += 1
            if unregisters:  # the object stays, and its pages
                gone = ip.SystemSharedMemoryUnregisterRequest(name=name)
                call("SystemSharedMemoryUnregister", gone, ip.SystemSharedMemoryUnregisterResponse)
        assert filled == 1
        for path in Path("/dev/shm").glob(f"tilewright_sparse_{os.getpid()}_*"):
            path.unlink()
        if unregisters:
            register = ip.SystemSharedMemoryRegisterRequest(name="last", key=last_object(objects), byte_size=nbytes)
            call("SystemSharedMemoryRegister", register, ip.SystemSharedMemoryRegisterResponse)
        bystander_lives(server.addresses[0], statistics=True)


@pytest.mark.extended
def test_a_server_that_fills_nothing_refuses_results_without_pages(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, GEMM, cpu_threads=1, kserve_fill="false") as server,
        grpc.insecure_channel(server.addresses[0]) as channel,
    ):
        path = Path("/dev/shm", f"tilewright_unfilled_{os.getpid()}")
        with path.open("wb") as file:
            file.truncate(4 * 64 * 64)
        try:
            register = ip.SystemSharedMemoryRegisterRequest(name="r", key=path.name, byte_size=4 * 64 * 64)
            kserve(channel, "SystemSharedMemoryRegister", register, ip.SystemSharedMemoryRegisterResponse)
            with refused("invalid_argument", "region_populated"):
                kserve(channel, "ModelInfer", product("r", 64), ip.ModelInferResponse)
            assert path.stat().st_blocks == 0
            path.write_bytes(bytes(4 * 64 * 64))
            kserve(channel, "ModelInfer", product("r", 64), ip.ModelInferResponse)
        finally:
            path.unlink()


def product(region: str, rows: int) -> ip.ModelInferRequest:
    """A product of ``rows`` by ``rows`` whose result goes into a region."""
    operand = bytes(4 * 8 * rows)
    request = ip.ModelInferRequest(model_name="tilewright.gemm", raw_input_contents=[operand, operand])
    for name, shape in (("a", (rows, 8)), ("b", (8, rows))):
        request.inputs.add(name=name, datatype="FP32", shape=shape)
    there = request.outputs.add(name="out").parameters
    there["shared_memory_region"].string_param = region
    there["shared_memory_byte_size"].int64_param = 4 * rows * rows
    return request


def last_object(objects: contextlib.ExitStack) -> str:
    path = Path("/dev/shm", f"tilewright_last_{os.getpid()}")
    with path.open("wb") as file:
        objects.callback(path.unlink)
        file.truncate(4 * 4000 * 4000)
    return path.name


def kserve(channel: grpc.Channel, name: str, request: Any, kind: Any) -> Any:
    way = channel.unary_unary(f"/inference.GRPCInferenceService/{name}", None, kind.FromString)
    return way(request.SerializeToString(), timeout=60)


@pytest.mark.parametrize("sealed", [True, False])
def test_pages_count_where_operands_lie(tmp_path: Path, sealed: bool) -> None:
    """One page here and there is enough for what lies in it, and not for its neighbours."""
    with ServerProcess(tmp_path) as server, Client(server.addresses[0]) as client:
        file = SparseFile(8 << 20, sealed=sealed)
        region = client.register(file).region
        plan = client.plan(16)
        there = (2 << 20) + 3 * PAGE
        os.pwrite(file.fd, bytes(64), there)
        for offset, good in ((there, True), (there + PAGE - 64, True), (there + PAGE - 32, False), (there - 4, False)):
            execution = client.execution(plan, inline(bytes(64)), in_region(region, offset))
            (result,) = client.dispatch.Execute(execution).results
            assert result.error.rule == ("" if good else "region_populated")
            if not good:
                assert "MADV_POPULATE_WRITE" in result.error.fix
        os.pwrite(file.fd, bytes(4 << 20), 4 << 20)
        large = client.plan(1 << 20)
        source = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=4 << 20)).buffer
        for offset, good in ((4 << 20, True), ((4 << 20) - PAGE, False)):
            execution = client.execution(large, in_buffer(source), in_region(region, offset))
            (result,) = client.dispatch.Execute(execution).results
            assert result.error.rule == ("" if good else "region_populated")
        assert file.kept == (4 << 20) + PAGE
        file.close()


def test_holes_of_inputs_are_refused_where_reading_would_fill_them(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, Client(server.addresses[0]) as client:
        for sealed, rule in ((True, "region_populated"), (False, "")):
            file = SparseFile(PAGE, sealed=sealed)
            region = client.register(file).region
            execution = client.execution(client.plan(16), in_region(region), in_buffer(a_buffer(client)))
            assert client.dispatch.Execute(execution).results[0].error.rule == rule
            assert file.kept == 0
            file.close()


def a_buffer(client: Client) -> int:
    return client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=64)).buffer
