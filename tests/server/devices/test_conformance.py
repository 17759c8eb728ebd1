"""What every device promises, whatever its kind. A new kind is added to ``KINDS`` in ``conftest.py``."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tilewright_kit.contract.device import Buffer, Device, Launch
from tilewright_kit.contract.plan import I64, WORKSPACE, Geometry, Pointer, Struct, pack
from tilewright_kit.types.errors import DeviceError, InvalidArgumentError, ResourceExhaustedError, TilewrightError
from tilewright_server.devices.argument_layout import DeviceProgram
from tilewright_server.devices.contract import ProgramDevice, ProgramStage

Function = Callable[[str], int]
N = 1000


def put(device: Device, array: np.ndarray) -> Buffer:
    buffer = device.allocate(array.nbytes)
    device.write(buffer, 0, memoryview(array))
    return buffer


def get(device: Device, buffer: Buffer, like: np.ndarray) -> np.ndarray:
    result = np.empty_like(like)
    device.read(buffer, 0, memoryview(result))
    return result


def spread(device: Device) -> Geometry:
    """A launch that keeps a GPU's waves full, where there are such."""
    return Geometry() if device.info.arch.kind == "cpu" else Geometry(block=(256, 1, 1))


def bound(function: int, geometry: Geometry, *words: int) -> Launch:
    return Launch(function, memoryview(bytearray(struct.pack(f"<{len(words)}Q", *words))), geometry)


# Memory


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 1 << 20, 3 << 20])
def test_memory_is_zeroed_and_aligned(device: Device, nbytes: int) -> None:
    buffer = device.allocate(nbytes)
    assert buffer.nbytes == nbytes
    assert buffer.address % 256 == 0
    assert not get(device, buffer, np.ones(nbytes, np.uint8)).any()
    device.free(buffer)


def test_memory_is_zeroed_again_after_use(device: Device) -> None:
    for _ in range(4):
        buffer = put(device, np.full(1 << 20, 255, np.uint8))
        device.free(buffer)
        again = device.allocate(1 << 20)
        assert not get(device, again, np.ones(1 << 20, np.uint8)).any()
        device.free(again)


def test_copies_keep_every_byte(device: Device) -> None:
    data = np.random.default_rng(1).integers(0, 256, 100_000, np.uint8)
    buffer = device.allocate(data.nbytes)
    device.write(buffer, 0, memoryview(data[:50_000]))
    device.write(buffer, 50_000, memoryview(data[50_000:]))
    part = np.empty(1000, np.uint8)
    device.read(buffer, 49_500, memoryview(part))
    assert (part == data[49_500:50_500]).all()
    assert (get(device, buffer, data) == data).all()
    device.free(buffer)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 101), (100, 1), (1, 100), (2**62, 1)])
def test_copies_stay_within_the_buffer(device: Device, offset: int, nbytes: int) -> None:
    buffer = device.allocate(100)
    for copy in (device.write, device.read):
        with pytest.raises(InvalidArgumentError):
            copy(buffer, offset, memoryview(bytearray(nbytes)))
    device.free(buffer)


def test_impossible_sizes_are_refused(device: Device) -> None:
    with pytest.raises(InvalidArgumentError):
        device.allocate(-1)
    for nbytes in (device.info.memory_bytes + 1, 2**60):
        with pytest.raises(ResourceExhaustedError):
            device.allocate(nbytes)


def test_memory_that_was_refused_is_not_counted(device: Device) -> None:
    for _ in range(3):
        with pytest.raises(ResourceExhaustedError):
            device.allocate(device.info.memory_bytes + 1)
    device.free(device.allocate(1 << 20))


def test_freeing_twice_is_refused(device: Device) -> None:
    buffer = device.allocate(100)
    device.free(buffer)
    with pytest.raises(DeviceError):
        device.free(buffer)


# Launches


def test_launch_computes(device: Device, loaded: Function) -> None:
    x, y = np.arange(N, dtype=np.float32), np.ones(N, np.float32)
    buffers = [put(device, x), put(device, y), device.allocate(x.nbytes)]
    words = [buffer.address for buffer in buffers]
    launch = bound(loaded("add"), spread(device), *words, N)
    device.run([launch])  # the first one may wait for what the device does once
    times = device.run([launch])
    assert (get(device, buffers[2], x) == x + y).all()
    assert len(times) == 1
    assert 0 < times[0] < 10**9


def test_launches_run_in_order(device: Device, loaded: Function) -> None:
    x, y = np.arange(N, dtype=np.float32), np.ones(N, np.float32)
    a, b, c = put(device, x), put(device, y), device.allocate(x.nbytes)
    add = loaded("add")
    launches = [bound(add, spread(device), a.address, b.address, c.address, N)]
    launches += [bound(add, spread(device), c.address, b.address, c.address, N)] * 9
    assert len(device.run(launches)) == 10
    assert (get(device, c, x) == x + 10).all()


def test_arguments_may_be_read_only(device: Device, loaded: Function) -> None:
    x = np.ones(N, np.float32)
    a, c = put(device, x), device.allocate(x.nbytes)
    words = struct.pack("<4Q", a.address, a.address, c.address, N)
    device.run([Launch(loaded("add"), memoryview(words), spread(device))])
    assert (get(device, c, x) == 2).all()


def test_running_nothing_is_legal(device: Device) -> None:
    assert device.run([]) == ()


def test_every_member_of_a_team_runs_once_with_fresh_counters(device: Device, loaded: Function) -> None:
    team = device.info.units if device.info.arch.kind == "cpu" else 1
    out = np.zeros(1 + 2 * team, np.int64)
    for _ in range(20):
        buffer = put(device, out)
        device.run([bound(loaded("count"), Geometry(team=team), buffer.address)])
        result = get(device, buffer, out)
        assert result[0] == team
        assert (result[1 : 1 + team] == team).all()
        assert sorted(result[1 + team :]) == list(range(1, team + 1))
        device.free(buffer)


@pytest.mark.parametrize("team", [0, -1, 10_000])
def test_impossible_team_is_refused(device: Device, loaded: Function, team: int) -> None:
    if device.info.arch.kind != "cpu":
        pytest.skip("teams are a matter of CPUs")
    with pytest.raises(DeviceError):
        device.run([bound(loaded("count"), Geometry(team=team), 0)])


def test_threads_may_launch_at_the_same_time(device: Device, loaded: Function) -> None:
    add = loaded("add")
    team = device.info.units if device.info.arch.kind == "cpu" else 1

    def work(seed: int) -> bool:
        x, y = np.full(N, seed, np.float32), np.ones(N, np.float32)
        buffers = [put(device, x), put(device, y), device.allocate(x.nbytes)]
        words = [buffer.address for buffer in buffers]
        for _ in range(20):
            device.run([bound(add, replace(spread(device), team=1 + seed % team), *words, N)])
        good = bool((get(device, buffers[2], x) == seed + 1).all())
        for buffer in buffers:
            device.free(buffer)
        return good

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(16)))


# Programs: the same stages again and again


def test_program_of_the_device_and_the_general_one_agree(device: Device, loaded: Function) -> None:
    x, y = np.arange(N, dtype=np.float32), np.full(N, 2, np.float32)
    a, b, c, scratch = put(device, x), put(device, y), device.allocate(x.nbytes), device.allocate(x.nbytes)
    first = Struct((Pointer("x"), Pointer("y"), Pointer(WORKSPACE), I64(N)))
    second = Struct((Pointer(WORKSPACE), Pointer("y"), Pointer("out", 400), I64(N - 100)))
    stages = [ProgramStage(loaded("add"), pack(args), spread(device)) for args in (first, second)]
    programs = [DeviceProgram(device, stages, ["x", "y", "out"])]
    if isinstance(device, ProgramDevice):
        programs.append(device.program(stages, ["x", "y", "out"]))  # type: ignore[arg-type]
    for program in programs:
        device.write(c, 0, memoryview(np.zeros(N, np.float32)))
        times = program.run([a.address, b.address, c.address], scratch.address, repeat=3)
        assert len(times) == 2
        assert all(time > 0 for time in times)
        result = get(device, c, x)
        assert (result[100:] == x[: N - 100] + 4).all()
        assert not result[:100].any()


def test_program_takes_other_addresses_each_time_from_any_thread(device: Device, loaded: Function) -> None:
    if not isinstance(device, ProgramDevice):
        pytest.skip("the device has no programs of its own")
    args = Struct((Pointer("x"), Pointer("y"), Pointer("out"), I64(N)))
    program = device.program([ProgramStage(loaded("add"), pack(args), spread(device))], ["x", "y", "out"])
    barrier = threading.Barrier(4)

    def work(seed: int) -> bool:
        x = np.full(N, seed, np.float32)
        buffers = [put(device, x), put(device, x), device.allocate(x.nbytes)]
        barrier.wait()
        for _ in range(50):
            program.run([buffer.address for buffer in buffers], 0)
        return bool((get(device, buffers[2], x) == 2 * seed).all())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_program_without_an_operand_is_refused(device: Device, loaded: Function) -> None:
    stage = ProgramStage(loaded("add"), pack(Struct((Pointer("nobody"),))), Geometry())
    with pytest.raises(KeyError, match="nobody"):
        DeviceProgram(device, [stage], ["x"])


# Modules and life cycle


def test_binary_that_is_none_is_refused(device: Device, tmp_path: Path) -> None:
    (tmp_path / "garbage.so").write_bytes(b"this is no code")
    with pytest.raises(DeviceError) as caught:
        device.load(tmp_path / "garbage.so")
    assert str(tmp_path) not in str(caught.value)


def test_missing_entry_is_refused(loaded: Function) -> None:
    with pytest.raises(DeviceError, match="nowhere"):
        loaded("nowhere")


def test_closed_device_refuses_and_closes_again(device: Device, loaded: Function) -> None:
    add = loaded("add")
    device.allocate(100)  # never freed: closing gives it back
    device.close()
    device.close()
    for use in (lambda: device.allocate(1), lambda: device.run([bound(add, Geometry(), 0, 0, 0, 0)])):
        with pytest.raises(TilewrightError):
            use()
