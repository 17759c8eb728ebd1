"""What every GPU promises of launches, beyond the conformance suite, in this process; of memory and of processes that
end, ``test_gpu_memory.py`` and ``test_gpu_processes.py`` say it.

``python3 -m pytest -m gpu tests/server/devices`` runs it; ``test_cuda_simulated.py`` and ``test_hip_simulated.py`` run
the same against simulated drivers.
"""

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gpu_device_harness import ADD, Gpu, N, get, put, settled, stage

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import COUNTERS, I64, WORKSPACE, Pointer, Struct, Table
from tilewright_kit.types.errors import DeviceError, InvalidArgumentError
from tilewright_server.devices.contract import RECORD, TIME, WAIT
from tilewright_server.devices.gpu.device import GpuDevice
from tilewright_server.devices.gpu.launch.program import GpuProgram

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


# Streams


def chained(gpu: GpuDevice, entry: Callable[[str], int]) -> GpuProgram:
    """out = x + 2 y, through the workspace."""
    first = Struct((Pointer("x"), Pointer("y"), Pointer(WORKSPACE), I64(N)))
    second = Struct((Pointer(WORKSPACE), Pointer("y"), Pointer("out"), I64(N)))
    stages = [stage(entry("add"), first), stage(entry("then_add"), second)]
    return gpu.program(stages, ["x", "y", "out"])


def test_plans_of_several_stages_take_the_arguments_of_every_binding(
    gpu: GpuDevice, entry: Callable[[str], int]
) -> None:
    program, stream, scratch = chained(gpu, entry), gpu.open_stream(), gpu.allocate(4 * N)
    y = np.arange(N, dtype=np.float32)
    operands = [[put(gpu, np.full(N, seed, np.float32)), put(gpu, y), gpu.allocate(4 * N)] for seed in (1, 2, 3)]
    for turn in range(3):
        for buffers in operands:
            gpu.write(buffers[2], 0, memoryview(np.full(N, np.nan, np.float32)))
            addresses = tuple(buffer.address for buffer in buffers)
            assert stream.launch(program, addresses, 0, 0, scratch.address) == 0
        stream.synchronize()
        for seed, buffers in enumerate(operands, 1):
            assert (get(gpu, buffers[2]) == seed + 2 * y).all(), turn
    assert stream.launch(program, addresses, TIME, 0, scratch.address) > 0
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
