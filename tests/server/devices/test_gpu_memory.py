"""Memory of GPUs: the pool, and what is shared with another process, which is the client here. See ``test_gpu.py``."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_device_harness import ADD, WAYS, Client, Gpu, N, get, put, settled, stage

from tilewright_kit.contract.device import Buffer, DeviceInfo
from tilewright_kit.types.errors import (
    DeviceError,
    InvalidArgumentError,
    ResourceExhaustedError,
    TilewrightError,
    UnsupportedError,
)
from tilewright_server.devices.contract import RECORD, WAIT, MemoryHandle
from tilewright_server.devices.gpu.device import GpuDevice
from tilewright_server.devices.gpu.stream import GpuStream

pytestmark = pytest.mark.gpu


def client_handle(client: Client, buffer: Buffer) -> MemoryHandle:
    """The handle by which a buffer was imported."""
    mapping: Any = buffer.owner
    kind, data = mapping.mapping.key
    return MemoryHandle(kind, data, 4 * N)


def test_pool_is_reused_and_shared_by_all(gpu: GpuDevice) -> None:
    before = gpu.memory_use()["pool_used"]
    for _ in range(4):
        buffers = [gpu.allocate(8 << 20) for _ in range(8)]
        assert gpu.memory_use()["pool_used"] >= before + (64 << 20)
        for buffer in buffers:
            gpu.free(buffer)
    assert settled(lambda: gpu.memory_use()["pool_used"] < before + (8 << 20))
    assert gpu.memory_use()["pool_held"] <= max(256 << 20, gpu.info.memory_bytes // 8)


def test_memory_that_is_used_up_is_an_error_and_no_end(gpu: GpuDevice) -> None:
    for allocate in (gpu.allocate, gpu.allocate_shared):
        held = []
        with pytest.raises(ResourceExhaustedError):
            while True:
                held.append(allocate(gpu.info.memory_bytes // 5))
        for buffer in held:
            gpu.free(buffer)
    gpu.free(gpu.allocate(1 << 20))


def test_locked_memory_of_the_host_is_copied(gpu: GpuDevice) -> None:
    host = np.arange(1 << 20, dtype=np.uint8)
    gpu.lock_host(memoryview(host))
    buffer = put(gpu, host)
    assert (get(gpu, buffer, np.uint8) == host).all()


@pytest.mark.parametrize("way", WAYS)
def test_memory_of_another_process_is_used_in_place(
    way: str, gpu: GpuDevice, entry: Callable[[str], int], client: Client
) -> None:
    handle = client.handle(way, offset=65536)
    client.ask("put", offset=65536, values=list(range(N)))
    x = gpu.import_memory(handle)
    if handle.fd >= 0:
        os.close(handle.fd)
    assert x.nbytes == 4 * N
    assert (get(gpu, x) == np.arange(N)).all()
    add = gpu.program([stage(entry("add"), ADD)], ["x", "y", "out"])
    add.run([x.address] * 3, 0)
    assert client.ask("get", offset=65536, count=N)["values"] == [2.0 * i for i in range(N)]
    gpu.release_memory(x)
    assert settled(lambda: gpu.memory_use()["mappings"] == 0)
    with pytest.raises(DeviceError):
        gpu.release_memory(x)


@pytest.mark.parametrize("way", ["ipc", "pool"])
def test_an_allocation_is_mapped_once_however_many_tensors_lie_in_it(way: str, gpu: GpuDevice, client: Client) -> None:
    handle = client.handle(way)
    buffers = [gpu.import_memory(replace(handle, offset=4096 * i, nbytes=4096)) for i in range(8)]
    assert gpu.memory_use()["mappings"] == 1
    assert len({buffer.address - 4096 * i for i, buffer in enumerate(buffers)}) == 1
    client.ask("put", offset=7 * 4096, values=[7.0] * 1024)
    for buffer in buffers[:7]:
        gpu.release_memory(buffer)
    assert (get(gpu, buffers[7]) == 7).all()
    gpu.release_memory(buffers[7])
    assert settled(lambda: gpu.memory_use()["mappings"] == 0)
    again = gpu.import_memory(replace(handle, offset=7 * 4096, nbytes=4096))
    assert (get(gpu, again) == 7).all()


@pytest.mark.parametrize("way", WAYS)
def test_part_outside_the_allocation_is_refused(way: str, gpu: GpuDevice, client: Client) -> None:
    handle = client.handle(way)
    for offset, nbytes in ((2 << 20, 4), (0, (2 << 20) + 4), (-4, 4), (0, 0)):
        with pytest.raises(InvalidArgumentError) as caught:
            gpu.import_memory(replace(handle, offset=offset, nbytes=nbytes))
        assert caught.value.rule == "memory_part"
    assert gpu.memory_use()["mappings"] == 0
    gpu.import_memory(replace(handle, offset=(2 << 20) - 4, nbytes=4))


def test_memory_of_several_allocations_is_mapped_as_one(gpu: GpuDevice, client: Client) -> None:
    size = 2 << 20
    first = client.handle("fd")
    client.ask("put", offset=size - 32, values=[1.0] * 8)
    second = client.handle("fd")
    client.ask("put", offset=0, values=[2.0] * 8)
    whole = MemoryHandle("fd", b"", 64, first.fd, size - 32, (first.fd, second.fd), (size, size))
    buffer = gpu.import_memory(whole)
    assert get(gpu, buffer).tolist() == [1.0] * 8 + [2.0] * 8
    gpu.release_memory(buffer)
    assert settled(lambda: gpu.memory_use()["mappings"] == 0)
    for parts in ((4096, size), (2 * size, size), (size, 2 * size)):
        with pytest.raises(InvalidArgumentError) as caught:
            gpu.import_memory(replace(whole, part_bytes=parts))
        assert caught.value.rule == "memory_part"
        assert caught.value.fix
    with pytest.raises(InvalidArgumentError) as caught:
        gpu.import_memory(replace(whole, nbytes=size + 64))
    assert caught.value.rule == "memory_part"
    with open("/dev/null") as other, pytest.raises(DeviceError):  # noqa: PTH123
        gpu.import_memory(replace(whole, fds=(first.fd, other.fileno())))
    assert gpu.memory_use()["mappings"] == 0
    gpu.release_memory(gpu.import_memory(whole))


def test_handles_that_name_nothing_say_why(kind: Gpu, gpu: GpuDevice, client: Client, tmp_path: Path) -> None:
    ipc, foreign = f"{kind.kind}_ipc", {"cuda": "hip_ipc", "hip": "cuda_ipc"}[kind.kind]
    freed = client.handle("ipc")
    client.ask("free")
    pooled = client.handle("pool")
    (tmp_path / "file").write_bytes(bytes(4 * N))
    with (tmp_path / "file").open("rb") as file:
        cases = {
            "freed": (freed, DeviceError),
            "of another kind": (MemoryHandle(ipc, pooled.data, 4096), DeviceError),
            "short": (MemoryHandle(ipc, b"short", 4096), InvalidArgumentError),
            "a file": (MemoryHandle("fd", b"", 4096, file.fileno()), InvalidArgumentError),
            "no descriptor": (MemoryHandle("fd", b"", 4096, 1_000_000), InvalidArgumentError),
            "unknown": (MemoryHandle(foreign, bytes(64), 4096), UnsupportedError),
        }
        for name, (handle, error) in cases.items():
            with pytest.raises(error) as caught:
                gpu.import_memory(handle)
            assert caught.value.rule, name
            assert caught.value.fix, name
    gpu.free(put(gpu, np.ones(N, np.float32)))  # and the device lives


@pytest.mark.parametrize("way", WAYS)
def test_memory_of_another_device_is_refused(
    way: str, kind: Gpu, gpu: GpuDevice, info: DeviceInfo, binary: Path
) -> None:
    others = [item for item in kind.provider.discover() if item.id != info.id]
    if not others:
        pytest.skip("one GPU only")
    client = Client(kind.kind, binary, others[0].attributes["ordinal"])
    handle = client.handle(way)
    with pytest.raises(DeviceError) as caught:
        gpu.import_memory(handle)
    assert caught.value.rule == "memory_device"
    assert gpu.memory_use()["mappings"] == 0
    second: Any = kind.provider.open(others[0])
    client.ask("put", offset=0, values=[4.0] * N)
    if handle.kind == "hip_pool":  # which the runtime would import on its first device
        with pytest.raises(TilewrightError) as refused:
            second.import_memory(handle)
        assert refused.value.rule == "memory_kind"
    else:
        assert (get(second, second.import_memory(handle)) == 4).all()
    second.close()
    client.close()


def test_our_memory_is_used_by_another_process(gpu: GpuDevice, client: Client) -> None:
    buffer = gpu.allocate_shared(4 * N)
    assert not get(gpu, buffer).any()
    handle = gpu.export_memory(buffer)
    assert (handle.kind, handle.nbytes, handle.fd) == (f"{client.kind}_ipc", 4 * N, -1)
    client.ask("open", data=handle.data.hex(), offset=handle.offset)
    client.ask("put", offset=0, values=[5.0] * N)
    assert (get(gpu, buffer) == 5).all()
    with pytest.raises(UnsupportedError):
        gpu.export_memory(gpu.allocate(4 * N))
    own = MemoryHandle(handle.kind, handle.data, 4 * N)
    with pytest.raises(DeviceError):
        gpu.import_memory(own)


def test_events_order_two_processes_without_a_host_thread_waiting(
    gpu: GpuDevice, entry: Callable[[str], int], client: Client
) -> None:
    x = gpu.import_memory(client.handle("ipc"))
    out = gpu.import_memory(replace(client_handle(client, x), offset=65536))
    stream: GpuStream = gpu.open_stream()
    event = client.ask("produce", values=[3.0] * N)["event"]
    client.ask("completion", event=stream.open_event(1, bytes.fromhex(event)).hex())
    add = gpu.program([stage(entry("add"), ADD)], ["x", "y", "out"])
    begin = time.perf_counter()
    stream.launch(add, (x.address, x.address, out.address), WAIT | RECORD, 1)
    assert time.perf_counter() - begin < 30
    assert not stream.lane.is_idle  # the client's gate is closed still
    client.ask("open_gate")
    assert client.ask("consume", offset=65536, count=N)["values"] == [6.0] * N
    assert stream.host_synchronisations == 0
    stream.close()
    assert settled(lambda: stream.lane not in gpu._all_lanes)
