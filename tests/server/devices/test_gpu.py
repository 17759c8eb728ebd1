"""What every GPU promises beyond the conformance suite, in this process, with another process as its client.

``python3 -m pytest -m gpu tests/server/devices`` runs it; ``test_cuda_simulated.py`` and ``test_hip_simulated.py`` run
the same against simulated drivers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_device_harness import ADD, HERE, WAYS, Client, Gpu, N, get, put, settled, stage

from tilewright_kit.device import Buffer, DeviceInfo
from tilewright_kit.errors import (
    DeviceError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
)
from tilewright_kit.plan import COUNTERS, I64, WORKSPACE, Pointer, Struct, Table
from tilewright_server.devices.base import RECORD, TIME, WAIT, MemoryHandle, SharingDevice
from tilewright_server.devices.gpu.device import GpuDevice
from tilewright_server.devices.gpu.program import GpuProgram
from tilewright_server.devices.gpu.stream import GpuStream
from tilewright_server.devices.registry import DeviceRegistry

pytestmark = pytest.mark.gpu

# Launches


def test_device_is_what_its_arch_says(info: DeviceInfo) -> None:
    assert info.units == info.arch.throughput.units > 0
    assert info.arch.lds_bytes > 48 << 10
    assert info.attributes["uuid"].startswith(("GPU-", "PCI-"))
    assert info.arch.throughput.memory_bytes_per_second > 1e11


def test_arguments_that_do_not_fit_the_kernel_are_refused(gpu: GpuDevice, entry: Callable[[str], int]) -> None:
    for args in (Struct(()), Struct((Pointer("x"),) * 13)):
        with pytest.raises(DeviceError) as caught:
            gpu.program([stage(entry("add"), args)], ["x"])
        assert caught.value.rule == "kernel_parameters"


@pytest.mark.parametrize("count", [1, 7, 10_000])
def test_tables_lie_in_device_memory(count: int, gpu: GpuDevice, entry: Callable[[str], int]) -> None:
    rows = tuple(Struct((Pointer("x", 4 * (i % 100)), I64(i % 5))) for i in range(count))
    program = gpu.program(
        [stage(entry("table"), Struct((Table(rows), I64(count), Pointer("out"))), grid=(1, 1, 1))], ["x", "out"]
    )
    for seed in (0, 1000):
        values = np.arange(seed, seed + 104, dtype=np.float32)
        x, out = put(gpu, values), gpu.allocate(4 * count)
        program.run([x.address, out.address], 0)
        expected = [values[i % 100 : i % 100 + i % 5].sum() for i in range(count)]
        assert (get(gpu, out) == np.asarray(expected, np.float32)).all()


def test_counters_are_zero_for_every_run_and_thread(gpu: GpuDevice, entry: Callable[[str], int]) -> None:
    args = Struct((Pointer(COUNTERS, 8), Pointer("out")))
    program = gpu.program([stage(entry("last"), args, grid=(64, 1, 1))], ["out"], counter_bytes=12)

    def work() -> None:
        out = gpu.allocate(8)
        for _ in range(20):
            program.run([out.address], 0)
        results.append(int(get(gpu, out, np.int64)[0]))

    results: list[int] = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [20 * 64] * 4


def test_repeats_are_summed_and_stages_told_apart(gpu: GpuDevice, entry: Callable[[str], int]) -> None:
    x = put(gpu, np.ones(N, np.float32))
    chain = [stage(entry("add"), ADD), stage(entry("then_add"), ADD)]
    (once,) = gpu.program(chain[:1], ["x", "y", "out"]).run([x.address] * 3, 0)
    (many,) = gpu.program(chain[:1], ["x", "y", "out"]).run([x.address] * 3, 0, repeat=40)
    assert 0 < once < 10**9
    assert many > 0
    times = gpu.program(chain, ["x", "y", "out"]).run([x.address] * 3, 0, repeat=40)
    assert len(times) == 2
    assert all(time > 0 for time in times)


# Streams and graphs


def chained(gpu: GpuDevice, entry: Callable[[str], int]) -> GpuProgram:
    """out = x + 2 y, through the workspace."""
    first = Struct((Pointer("x"), Pointer("y"), Pointer(WORKSPACE), I64(N)))
    second = Struct((Pointer(WORKSPACE), Pointer("y"), Pointer("out"), I64(N)))
    stages = [stage(entry("add"), first), stage(entry("then_add"), second)]
    return gpu.program(stages, ["x", "y", "out"])


def test_plans_of_several_stages_are_launched_as_one_graph(
    gpu: GpuDevice, entry: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, stream, scratch = chained(gpu, entry), gpu.open_stream(), gpu.allocate(4 * N)
    y = np.arange(N, dtype=np.float32)
    operands = [[put(gpu, np.full(N, seed, np.float32)), put(gpu, y), gpu.allocate(4 * N)] for seed in (1, 2, 3)]
    alone: list[Any] = []
    for turn in range(4):
        for buffers in operands:
            gpu.write(buffers[2], 0, memoryview(np.full(N, np.nan, np.float32)))
            addresses = tuple(buffer.address for buffer in buffers)
            if turn == 2:  # from now on no stage is launched alone
                bound = stream.lane.bound(program, addresses, scratch.address)
                bound._launch = lambda *call: (alone.append(call), 0)[1:]
            assert stream.launch(program, addresses, 0, 0, scratch.address) == 0
        stream.synchronize()
        for seed, buffers in enumerate(operands, 1):
            assert (get(gpu, buffers[2]) == seed + 2 * y).all(), turn
    assert alone == []
    assert stream.launch(program, addresses, TIME, 0, scratch.address) > 0
    stream.close()


def test_plan_that_cannot_be_a_graph_is_launched_stage_by_stage(
    gpu: GpuDevice, entry: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = SimpleNamespace(name="refused")
    monkeypatch.setattr(type(gpu._driver.api), "instantiate", lambda *_: (refused, None))
    program, stream, scratch = chained(gpu, entry), gpu.open_stream(), gpu.allocate(4 * N)
    buffers = [put(gpu, np.full(N, value, np.float32)) for value in (1, 2, 0)]
    for _ in range(3):
        stream.launch(program, tuple(buffer.address for buffer in buffers), 0, 0, scratch.address)
    graph = stream.lane._prepared[program].graph
    assert graph is not None
    assert not graph.is_usable
    stream.synchronize()
    assert (get(gpu, buffers[2]) == 5).all()
    stream.close()


def test_launches_that_are_ready_follow_what_the_lane_lets_go(gpu: GpuDevice, entry: Callable[[str], int]) -> None:
    rows = Table(tuple(Struct((Pointer("x"), I64(1))) for _ in range(8)))
    table = Struct((rows, I64(8), Pointer("out")))

    def program() -> GpuProgram:
        return gpu.program([stage(entry("table"), table, grid=(1, 1, 1))], ["x", "out"])

    first, x, out, stream = program(), put(gpu, np.full(1, 3, np.float32)), gpu.allocate(32), gpu.open_stream()
    lane = stream.lane
    limit = lane._limit = 64
    ready = stream.ready(first, (x.address, out.address), 0)
    with pytest.raises(InvalidArgumentError):
        ready(RECORD, 0)
    assert ready(0, 0) == 0
    bound = lane.bound(first, (x.address, out.address), 0)
    for number in range(limit + 1):  # more bindings of one program than are kept
        stream.launch(first, (x.address, out.address), 0, 0, 8 * number)
    assert lane.bound(first, (x.address, out.address), 0) is not bound
    gpu.write(x, 0, memoryview(np.full(1, 4, np.float32)))
    assert ready(TIME, 0) == 0
    assert stream.finish() > 0
    assert (get(gpu, out) == 4).all()
    for number in range(3):  # programs that go, of which lanes hear from other threads
        other = program()
        stream.launch(other, (x.address, out.address), 0, 0)
        threading.Thread(target=other.close).start()
        assert settled(lambda: bool(lane._dropped))
        gpu.write(x, 0, memoryview(np.full(1, number, np.float32)))
        ready(TIME, 0)
        stream.finish()
        assert not lane._dropped
        assert (get(gpu, out) == number).all()
    done = threading.Thread(target=lambda: ready(0, 0))  # the context comes with it
    done.start()
    done.join()
    stream.synchronize()
    stream.close()


def test_launches_of_a_stream_do_not_wait_for_the_device(gpu: GpuDevice, entry: Callable[[str], int]) -> None:
    flag, x = gpu.allocate(8), put(gpu, np.ones(N, np.float32))
    gate = gpu.program([stage(entry("gate"), Struct((Pointer("flag"),)), grid=(1, 1, 1), block=(1, 1, 1))], ["flag"])
    add = gpu.program([stage(entry("add"), ADD)], ["x", "y", "out"])
    out, stream = gpu.allocate(4 * N), gpu.open_stream()
    stream.launch(gate, (flag.address,), 0, 0)
    for _ in range(200):
        stream.launch(add, (x.address, x.address, out.address), 0, 0)
    assert not stream.lane.is_idle
    assert stream.host_synchronisations == 0
    gpu.write(flag, 0, memoryview(np.ones(1, np.int64)))  # others go on meanwhile
    stream.synchronize()
    assert (get(gpu, out) == 2).all()
    assert stream.host_synchronisations == 1
    stream.close()


def test_what_launches_may_use_is_given_back_behind_them(
    gpu: GpuDevice, entry: Callable[[str], int], binary: Path
) -> None:
    flag, module = gpu.allocate(8), gpu.load(binary)
    args = Struct((Pointer("flag"),))
    gate = gpu.program([stage(module.function("gate"), args, grid=(1, 1, 1), block=(1, 1, 1))], ["flag"])
    rows = Table(tuple(Struct((Pointer("x"), I64(1))) for _ in range(8)))
    table = gpu.program([stage(entry("table"), Struct((rows, I64(8), Pointer("out"))), grid=(1, 1, 1))], ["x", "out"])
    x, out, stream = put(gpu, np.full(8, 3, np.float32)), gpu.allocate(32), gpu.open_stream()
    shared = gpu.allocate_shared(100)
    stream.launch(gate, (flag.address,), 0, 0)
    stream.launch(table, (x.address, out.address), 0, 0)
    table.close()
    module.unload()
    gpu.free(shared)
    gpu.free(x)
    stream.close()
    assert len(gpu._graveyard) == 4
    again = put(gpu, np.full(8, 5, np.float32))  # nobody waits, and x is not handed out again
    assert again.address != x.address
    gpu.write(flag, 0, memoryview(np.ones(1, np.int64)))
    assert settled(lambda: len(gpu._graveyard) == 0)
    assert (get(gpu, out) == 3).all()


def test_a_stream_needs_events_to_use_them(gpu: GpuDevice, entry: Callable[[str], int]) -> None:
    x, stream = put(gpu, np.ones(N, np.float32)), gpu.open_stream()
    add = gpu.program([stage(entry("add"), ADD)], ["x", "y", "out"])
    for flags in (WAIT, RECORD):
        with pytest.raises(InvalidArgumentError):
            stream.launch(add, (x.address,) * 3, flags, 3)
    assert len(stream.open_event(3, b"")) == 64
    stream.launch(add, (x.address,) * 3, RECORD, 3)
    with pytest.raises(InvalidArgumentError):
        stream.launch(add, (x.address,) * 3, WAIT, 3)
    with pytest.raises(InvalidArgumentError):
        stream.open_event(3, b"short")
    with pytest.raises(DeviceError) as caught:
        stream.open_event(3, bytes(64))
    assert caught.value.rule == "event_handle"
    stream.close()
    stream.close()


def test_a_launch_costs_microseconds(kind: Gpu, gpu: GpuDevice, entry: Callable[[str], int]) -> None:
    if kind.simulated:
        pytest.skip("the time of a simulated launch says nothing")
    x, stream = put(gpu, np.ones(N, np.float32)), gpu.open_stream()
    single, double = gpu.program([stage(entry("add"), ADD)], ["x", "y", "out"]), chained(gpu, entry)
    addresses = (x.address,) * 3
    for name, program in (("one stage", single), ("two stages", double)):
        samples = []
        for _ in range(30):
            begin = time.perf_counter()
            for _ in range(100):
                stream.launch(program, addresses, 0, 0, x.address)
            samples.append((time.perf_counter() - begin) * 1e4)
            stream.synchronize()
        print(f"launch, {name}: {statistics.median(samples):.1f} us")  # noqa: T201
        assert statistics.median(samples) < 25
    stream.close()


# Memory


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
    assert time.perf_counter() - begin < 5
    assert not stream.lane.is_idle  # the client's gate is closed still
    client.ask("open_gate")
    assert client.ask("consume", offset=65536, count=N)["values"] == [6.0] * N
    assert stream.host_synchronisations == 0
    stream.close()
    assert settled(lambda: stream.lane not in gpu._all_lanes)


def test_programs_that_are_over_leave_nothing_behind(gpu: GpuDevice, entry: Callable[[str], int]) -> None:
    x, stream = put(gpu, np.ones(N, np.float32)), gpu.open_stream()
    used = gpu.memory_use()["pool_used"]
    rows = tuple(Struct((Pointer("x"), I64(1))) for _ in range(1000))
    for _ in range(20):
        table = Struct((Table(rows), I64(1000), Pointer("x")))
        program = gpu.program([stage(entry("table"), table, grid=(1, 1, 1))], ["x"])
        stream.launch(program, (x.address,), 0, 0)
        program.run([x.address], 0)
        program.close()
    add = gpu.program([stage(entry("add"), ADD)], ["x", "y", "out"])
    add.run([x.address] * 3, 0)
    stream.launch(add, (x.address,) * 3, 0, 0)
    stream.synchronize()
    assert {id(item) for lane in gpu._all_lanes for item in lane._prepared} == {id(add)}
    assert settled(lambda: gpu.memory_use()["pool_used"] <= used + (1 << 16))
    stream.close()


def client_handle(client: Client, buffer: Buffer) -> MemoryHandle:
    """The handle by which a buffer was imported."""
    mapping: Any = buffer.owner
    kind, data = mapping.mapping.key
    return MemoryHandle(kind, data, 4 * N)


# The end

FAULT = """
import json, sys
from pathlib import Path
from gpu_device_harness import GPUS, stage
from tilewright_kit.errors import TilewrightError
from tilewright_kit.plan import Pointer, Struct
provider = GPUS[sys.argv[3]].provider
gpu = provider.open(provider.discover()[0])
entry = gpu.load(Path(sys.argv[1])).function
out = gpu.allocate(8)
program = gpu.program([stage(entry("fault"), Struct((Pointer("out"),)))], ["out"])
said = []
stream = gpu.open_stream()
uses = [lambda: program.run([out.address], 0)] if sys.argv[2] == "run" else [
    lambda: stream.launch(program, (out.address,), 0, 0), stream.synchronize]
for use in (*uses, lambda: gpu.allocate(8), gpu.open_stream, lambda: program.run([out.address], 0)):
    try:
        use()
        said.append("")
    except TilewrightError as error:
        said.append(f"{type(error).__name__} {error.rule} {error.field} {error.reason}")
stream.close()
gpu.close()
print(json.dumps(said))
"""


@pytest.mark.parametrize("how", ["run", "launch"])
def test_fault_of_a_kernel_is_recognised_and_final(how: str, kind: Gpu, binary: Path, gpu: GpuDevice) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", FAULT, str(binary), how, kind.kind],
        capture_output=True,
        text=True,
        cwd=HERE,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    said = json.loads(answer.stdout.splitlines()[-1])
    first = said[0] or said[1]
    assert first.startswith("DeviceLostError device_lost device")
    assert kind.fault in first
    assert all(text.startswith("DeviceLostError") for text in said[1 + (how == "launch") :])
    gpu.free(gpu.allocate(100))  # other processes go on


DEATH = """
import sys, time
from pathlib import Path
import numpy as np
from gpu_device_harness import ADD, Client, GPUS, N, get, put, stage
from tilewright_server.devices.base import WAIT
provider, client = GPUS[sys.argv[2]].provider, Client(sys.argv[2], Path(sys.argv[1]))
gpu = provider.open(provider.discover()[0])
entry = gpu.load(Path(sys.argv[1])).function
x, stream = gpu.import_memory(client.handle("ipc")), gpu.open_stream()
stream.open_event(1, bytes.fromhex(client.ask("produce", values=[3.0] * N)["event"]))
add = gpu.program([stage(entry("add"), ADD)], ["x", "y", "out"])
stream.launch(add, (x.address,) * 3, WAIT, 1)
client.process.kill()
client.process.wait()
begin = time.monotonic()
stream.close()
gpu.release_memory(x)
buffer = put(gpu, np.ones(N, np.float32))
add.run([buffer.address] * 3, 0)
assert (get(gpu, buffer) == 2).all()
gpu.close()
assert time.monotonic() - begin < 10
print("went on")
"""


def test_client_that_dies_holds_up_nobody_else(kind: Gpu, binary: Path, gpu: GpuDevice) -> None:
    """In a process of its own: nothing can take the launch that waits off its stream again, and CUDA loads no module
    into a process meanwhile. Servers replace the device's process."""
    answer = subprocess.run(
        [sys.executable, "-c", DEATH, str(binary), kind.kind], capture_output=True, text=True, cwd=HERE, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["went", "on"]


# In a process of its own, as servers open it


@pytest.mark.parametrize("way", WAYS)
def test_worker_maps_and_shares_memory(
    way: str, registry: DeviceRegistry, info: DeviceInfo, binary: Path, client: Client
) -> None:
    device: Any = registry.get(info.id)
    assert isinstance(device, SharingDevice)
    assert device.uuid == info.attributes["uuid"]
    handle = client.handle(way)
    client.ask("put", offset=0, values=[1.0] * N)
    x, shared = device.import_memory(handle), device.allocate_shared(4 * N)
    if handle.fd >= 0:
        os.close(handle.fd)
    program = device.program([stage(device.load(binary).function("add"), ADD)], ["x", "y", "out"])
    program.run([x.address, x.address, shared.address], 0)
    assert (get(device, shared) == 2).all()
    exported = device.export_memory(shared)
    client.ask("open", data=exported.data.hex(), offset=exported.offset)
    assert client.ask("get", offset=0, count=N)["values"] == [2.0] * N
    stream = device.open_stream()
    assert stream.launch(program, (x.address, x.address, x.address), TIME, 0) > 0
    stream.close()
    device.release_memory(x)


def test_worker_is_replaced_when_a_kernel_faults(registry: DeviceRegistry, info: DeviceInfo, binary: Path) -> None:
    device: Any = registry.get(info.id)
    out = device.allocate(8)
    fault = stage(device.load(binary).function("fault"), Struct((Pointer("out"),)))
    with pytest.raises(UnavailableError) as caught:
        device.program([fault], ["out"]).run([out.address], 0)
    assert caught.value.rule == "device_lost"
    assert caught.value.retry_after_s
    x = np.ones(N, np.float32)
    buffers = [put(device, x), device.allocate(x.nbytes)]
    program = device.program([stage(device.load(binary).function("add"), ADD)], ["x", "y", "out"])
    program.run([buffers[0].address, buffers[0].address, buffers[1].address], 0)
    assert (get(device, buffers[1]) == 2).all()
