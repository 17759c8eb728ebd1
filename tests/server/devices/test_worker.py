"""Devices in a process of their own: what ends that process, and what does not."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright_kit.device import Buffer, DeviceInfo
from tilewright_kit.errors import (
    DeviceError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from tilewright_kit.plan import COUNTERS, I64, WORKSPACE, Geometry, Pointer, Struct, pack
from tilewright_kit.source import SourceUnit
from tilewright_proto.v1 import error_pb2
from tilewright_server.devices.base import (
    RECORD,
    REPLY,
    TIME,
    WAIT,
    DeviceLostError,
    MemoryHandle,
    ProgramStage,
    WorkerSpec,
)
from tilewright_server.devices.lifetime import is_lost
from tilewright_server.devices.registry import DeviceRegistry
from tilewright_server.devices.worker import clients, proxy, wire
from tilewright_server.devices.worker.frames import HEADER, HEADER_BYTES, REPLY_KIND, Kind
from tilewright_server.devices.worker.life import Loss
from tilewright_server.devices.worker.proxy import WorkerDevice, WorkerProgram

sys.path.insert(0, str(Path(__file__).parent))  # workers see what is on the path: see hosted_devices.py

N = 1000
UNIT = SourceUnit(
    "worker_tests",
    "c++",
    """#include "tilewright/cpu/team.h"
#define TW_ENTRY extern "C" __attribute__((visibility("default"))) void
struct Vectors { const float* x; const float* y; float* out; int64_t n; };
TW_ENTRY add(const void* args, tw_team*) {
  const Vectors* v = (const Vectors*)args;
  for (int64_t i = 0; i < v->n; i++) v->out[i] = v->x[i] + v->y[i];
}
TW_ENTRY crash(const void*, tw_team*) { *(volatile int*)8 = 1; }
struct Spin { volatile int32_t* go; };
TW_ENTRY spin(const void* args, tw_team*) { while (!*((const Spin*)args)->go) {} }
struct Count { int32_t* counter; int32_t* out; };
TW_ENTRY count(const void* args, tw_team*) {
  const Count* c = (const Count*)args;
  *c->out = ++*c->counter;
  *c->counter = 0;
}
""",
    {name: name for name in ("add", "crash", "spin", "count")},
)
Build = Callable[[SourceUnit, Any], Path]


class Bench:
    """A device, its losses, and what the tests launch."""

    def __init__(self, registry: DeviceRegistry, build: Build) -> None:
        self.losses: list[Loss] = []
        registry.listeners.append(self.losses.append)
        self.device: Any = registry.get("worker:0")
        assert isinstance(self.device, WorkerDevice)
        self._binary = build(UNIT, self.device.info.arch)

    def program(self, entry: str, *fields: Any, operands: tuple[str, ...], counter_bytes: int = 0) -> WorkerProgram:
        function = self.device.load(self._binary).function(entry)
        stage = ProgramStage(function, pack(Struct(fields)), Geometry())
        return self.device.program([stage], operands, counter_bytes=counter_bytes)

    def add(self) -> WorkerProgram:
        fields = (Pointer("x"), Pointer("y"), Pointer("out"), I64(N))
        return self.program("add", *fields, operands=("x", "y", "out"))

    def crash(self) -> WorkerProgram:
        return self.program("crash", I64(0), operands=())

    def spin(self) -> WorkerProgram:
        return self.program("spin", Pointer("go"), operands=("go",))

    def put(self, array: np.ndarray) -> Buffer:
        buffer = self.device.allocate(array.nbytes)
        self.device.write(buffer, 0, memoryview(array))
        return buffer

    def get(self, buffer: Buffer, dtype: Any = np.float32) -> np.ndarray:
        result = np.empty(buffer.nbytes // np.dtype(dtype).itemsize, dtype)
        self.device.read(buffer, 0, memoryview(result))
        return result

    def check_that_it_adds(self) -> None:
        x, y = np.arange(N, dtype=np.float32), np.ones(N, np.float32)
        buffers = [self.put(x), self.put(y), self.device.allocate(x.nbytes)]
        self.add().run([buffer.address for buffer in buffers], 0)
        assert (self.get(buffers[2]) == x + 1).all()
        for buffer in buffers:
            self.device.free(buffer)


@pytest.fixture(autouse=True)
def others() -> None:
    """Processes that other tests of this interpreter keep, compilers for example, are none of ours."""
    _others.clear()
    _others.update(children())


@pytest.fixture
def bench(registry: DeviceRegistry, build: Build) -> Bench:
    return Bench(registry, build)


@pytest.fixture
def hosted(bench: Bench, build: Build) -> Iterator[Callable[[str], Bench]]:
    """Benches whose device is made by a function of ``hosted_devices``."""
    made: list[WorkerDevice] = []

    def host(name: str) -> Bench:
        made.append(open_with(bench, name))
        bench.device = made[-1]
        return bench

    yield host
    for device in made:
        device.close()


def open_with(bench: Bench, name: str) -> WorkerDevice:
    spec = WorkerSpec(f"hosted_devices:{name}", bench.device._spec.options)
    return WorkerDevice(bench.device.info, spec, bench.losses.append)


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


# The end of a worker


def test_kernel_that_faults_ends_only_the_worker(bench: Bench) -> None:
    program, buffer, pid = bench.crash(), bench.device.allocate(100), bench.device.pid
    with pytest.raises(DeviceLostError) as caught:
        program.run([], 0)
    assert isinstance(caught.value, UnavailableError)
    assert caught.value.rule == "device_lost"
    assert caught.value.retry_after_s is not None
    eventually(lambda: bench.losses)
    assert bench.losses[0].suspects == (program,)
    assert bench.losses[0].how == "signal SIGSEGV"
    assert is_lost(program)
    assert is_lost(buffer)
    bench.check_that_it_adds()
    assert bench.device.pid != pid
    assert not is_running(pid)


def test_worker_that_is_killed_during_a_run_is_replaced(bench: Bench) -> None:
    spin, go = bench.spin(), bench.put(np.zeros(1, np.int32))
    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(spin.run, [go.address], 0) for _ in range(3)]
        idle = bench.add()
        eventually(lambda: len(bench.device.life().area.running()) == 1)
        time.sleep(0.05)
        os.kill(bench.device.pid, signal.SIGKILL)
        for run in runs:
            with pytest.raises(DeviceLostError):
                run.result(10)
    bench.check_that_it_adds()
    assert [loss.suspects for loss in bench.losses] == [(spin,)]
    assert is_lost(idle)


def test_worker_that_is_killed_when_nothing_runs_is_replaced_without_suspects(bench: Bench) -> None:
    bench.check_that_it_adds()
    os.kill(bench.device.pid, signal.SIGKILL)
    eventually(lambda: bench.losses)
    assert bench.losses[0].suspects == ()
    bench.check_that_it_adds()
    assert bench.device.generation == 2


def test_everything_of_a_lost_worker_says_so(bench: Bench) -> None:
    device, program = bench.device, bench.add()
    module = device.load(bench._binary)
    function, buffer = module.function("add"), device.allocate(100)
    stream = device.open_stream()
    os.kill(device.pid, signal.SIGKILL)
    eventually(lambda: bench.losses)
    fresh, workspace = bench.add(), device.allocate(64)
    data = memoryview(bytearray(100))
    stage = ProgramStage(function, pack(Struct((I64(1),))), Geometry())
    for use in (
        lambda: device.write(buffer, 0, data),
        lambda: device.read(buffer, 0, data),
        lambda: device.export_memory(buffer),
        lambda: program.run([workspace.address] * 3, 0),
        lambda: module.function("crash"),
        lambda: device.program([stage], ()),
        # Addresses of the dead must not reach the living: they may be somebody else's by now.
        lambda: fresh.run([buffer.address] * 3, 0),
        lambda: fresh.run([workspace.address, workspace.address, buffer.address + 4], 0),
        lambda: fresh.run([workspace.address] * 3, buffer.address),
        lambda: stream.synchronize(),
        lambda: device.bind(1, 1, program, [workspace.address] * 3, 0),
    ):
        with pytest.raises(DeviceLostError) as caught:
            use()
        assert caught.value.rule == "device_lost"
    # There is nothing to give back, and those who clean up need not care.
    device.free(buffer)
    module.unload()
    stream.close()
    device.unbind(1, 1)


def test_address_of_no_device_is_refused(bench: Bench) -> None:
    with pytest.raises(InternalError, match="does not come from this device"):
        bench.add().run([4096, 8192, 12288], 0)
    bench.check_that_it_adds()


def test_device_that_reports_its_loss_ends_its_worker(hosted: Callable[[str], Bench]) -> None:
    bench = hosted("open_lost")
    pid, program = bench.device.pid, bench.add()
    buffer = bench.device.allocate(64)
    with pytest.raises(DeviceLostError, match="uncorrectable"):
        program.run([buffer.address] * 3, 0)
    eventually(lambda: bench.losses)
    assert bench.losses[0].suspects == (program,)
    assert bench.losses[0].how == "status 70"
    bench.device.allocate(1)
    assert bench.device.pid != pid


def test_loss_that_nobody_waits_for_is_noticed(hosted: Callable[[str], Bench]) -> None:
    bench = hosted("open_silently_lost")
    client = Client(bench)
    assert client.socket.recv(100) == b""
    client.socket.close()
    eventually(lambda: bench.losses)
    assert bench.losses[0].how == "status 70"


def test_other_devices_do_not_notice(bench: Bench, registry: DeviceRegistry) -> None:
    cpu = registry.get("cpu:0")
    buffer = cpu.allocate(100)
    with pytest.raises(DeviceLostError):
        bench.crash().run([], 0)
    cpu.read(buffer, 0, memoryview(bytearray(100)))
    cpu.free(buffer)


def test_many_threads_lose_it_at_once_and_get_one_new_worker(bench: Bench) -> None:
    spin, go = bench.spin(), bench.put(np.zeros(1, np.int32))

    def work(_: int) -> int:
        with pytest.raises(DeviceLostError):
            spin.run([go.address], 0)
        bench.check_that_it_adds()
        return bench.device.pid

    with ThreadPoolExecutor(20) as threads:
        futures = [threads.submit(work, item) for item in range(20)]
        eventually(lambda: spin.number in bench.device.life().area.running())
        os.kill(bench.device.pid, signal.SIGKILL)
        assert len({future.result(30) for future in futures}) == 1
    assert bench.device.generation == 2


# Start and end


def test_requests_do_not_wait_long_for_a_device_that_is_opened_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would keep a thread of the server, which other devices need."""
    device, options = bench.device, bench.device._spec.options
    monkeypatch.setattr(proxy, "RESTART_S", 0.2)
    device._spec = WorkerSpec("hosted_devices:open_slowly", options)
    os.kill(device.pid, signal.SIGKILL)
    eventually(lambda: device._life.lost)
    for _ in range(2):  # the second does not wait at all
        with pytest.raises(UnavailableError) as caught:
            device.allocate(16)
        assert device._life.lost, "the answer does not wait until it is open"
        assert caught.value.rule == "device_starting"
        assert caught.value.retry_after_s
    eventually(lambda: not device._life.lost)
    bench.check_that_it_adds()
    assert device.generation == 2


def test_a_device_that_is_closed_while_it_is_opened_again_leaves_no_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, options = bench.device, bench.device._spec.options
    monkeypatch.setattr(proxy, "RESTART_S", 0.0)
    device._spec = WorkerSpec("hosted_devices:open_slowly", options)
    os.kill(device.pid, signal.SIGKILL)
    eventually(lambda: device._life.lost)
    with pytest.raises(UnavailableError):
        device.allocate(16)
    starting = device._starting
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        starting.result(20)
    eventually(lambda: not children())


def test_error_of_opening_arrives_as_it_is(bench: Bench) -> None:
    with pytest.raises(DeviceError) as caught:
        open_with(bench, "refuse")
    assert (caught.value.field, caught.value.rule, caught.value.fix) == ("driver", "driver_version", "update it")


@pytest.mark.parametrize("name", ["die", "no_such_function"])
def test_worker_that_cannot_open_the_device_is_an_error_and_leaves_nothing(bench: Bench, name: str) -> None:
    before = descriptors(os.getpid())
    with pytest.raises((UnavailableError, InternalError)):
        open_with(bench, name)
    eventually(lambda: descriptors(os.getpid()) == before)
    assert children() == {bench.device.pid}


def test_closing_leaves_no_process_thread_or_descriptor(bench: Bench) -> None:
    before = descriptors(os.getpid()), threading.active_count()
    device = WorkerDevice(bench.device.info, bench.device._spec)
    device.allocate(100)
    pid = device.pid
    device.close()
    device.close()
    assert not Path(f"/proc/{pid}").exists()
    eventually(lambda: (descriptors(os.getpid()), threading.active_count()) == before)


def test_closing_does_not_wait_for_ever_for_a_kernel(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright_server.devices.worker.life.END_S", 0.2)
    spin, go, pid = bench.spin(), bench.put(np.zeros(1, np.int32)), bench.device.pid
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(spin.run, [go.address], 0)
        eventually(lambda: bench.device.life().area.running())
        bench.device.close()
        with pytest.raises(DeviceLostError):
            run.result(10)
    assert not Path(f"/proc/{pid}").exists()
    assert bench.losses == []


def test_kernel_that_hangs_is_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright_server.devices.worker.life.ANSWER_S", 0.5)
    bench.device.life().kill()
    eventually(lambda: bench.losses)
    spin, go = bench.spin(), bench.put(np.zeros(1, np.int32))
    with pytest.raises(DeviceLostError, match=r"within 0\.5 s"):
        spin.run([go.address], 0)
    eventually(lambda: len(bench.losses) == 2)
    assert bench.losses[1].suspects == (spin,)
    bench.check_that_it_adds()


def test_worker_ends_with_the_process_that_started_it(bench: Bench, tmp_path: Path) -> None:
    script = """
import sys, time
from test_worker import describe_and_open
device = describe_and_open(sys.argv[1])
print(device.pid, flush=True)
time.sleep(60)
"""
    runtime = bench.device._spec.options["runtime"]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {paths.split(os.pathsep)!r}\n{script}", runtime],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
        parent.wait()
        eventually(lambda: not is_running(pid))


def describe_and_open(runtime: str) -> WorkerDevice:
    from tilewright_server.devices.cpu.provider import CpuProvider
    from tilewright_server.devices.worker.factories import CPU_FACTORY

    (info,) = CpuProvider().discover()
    return WorkerDevice(info, WorkerSpec(CPU_FACTORY, {"runtime": runtime}))


def test_signals_to_the_group_leave_the_end_to_the_server(bench: Bench) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(bench.device.pid, number)
    time.sleep(0.1)
    bench.check_that_it_adds()
    assert bench.losses == []


def test_device_travels_whole(registry: DeviceRegistry) -> None:
    import json

    from tilewright_server.devices.worker.describe import info_from, info_record

    (info,) = (item for item in registry.infos() if item.kind == "cpu")
    copied: DeviceInfo = info_from(json.loads(json.dumps(info_record(info))))
    assert copied.arch == info.arch
    assert (copied.id, copied.units, copied.memory_bytes) == (info.id, info.units, info.memory_bytes)


# Requests


def test_more_threads_than_connections_wait_their_turn(bench: Bench) -> None:
    program = bench.add()
    x = bench.put(np.arange(N, dtype=np.float32))

    def work(_: int) -> bool:
        out = bench.device.allocate(4 * N)
        for _ in range(20):
            program.run([x.address, x.address, out.address], 0)
        good = bool((bench.get(out) == 2 * np.arange(N)).all())
        bench.device.free(out)
        return good

    with ThreadPoolExecutor(40) as threads:
        assert all(threads.map(work, range(40)))


def test_copies_of_any_size_arrive(bench: Bench) -> None:
    for nbytes in (0, 1, 2 << 20, (2 << 20) + 1, 9_000_001):
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        buffer = bench.put(data)
        assert (bench.get(buffer, np.uint8) == data).all()
        bench.device.free(buffer)


def test_program_with_more_operands_than_a_packet_holds(bench: Bench) -> None:
    names = [f"o{index}" for index in range(6000)]
    fields = (Pointer("o0"), Pointer("o1"), Pointer("o5999"), I64(N))
    program = bench.program("add", *fields, *(Pointer(name) for name in names), operands=tuple(names))
    x = bench.put(np.ones(N, np.float32))
    out = bench.device.allocate(4 * N)
    program.run([x.address] * 5999 + [out.address], 0)
    assert (bench.get(out) == 2).all()


def test_what_cannot_be_sent_is_an_error_and_not_the_end_of_the_device(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, pid = tuple(f"operand{index}" * 100 for index in range(100)), bench.device.pid

    def large() -> WorkerProgram:
        return bench.program("add", *map(Pointer, names), operands=names)

    def no_file(*_: Any) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(wire, "SPILLED_BYTES", 1000)
        with pytest.raises(InvalidArgumentError) as invalid:
            large()
        assert invalid.value.rule == "worker_message"
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", no_file)
        with pytest.raises(ResourceExhaustedError) as exhausted:
            large()
        assert exhausted.value.retry_after_s
    with monkeypatch.context() as patch:
        patch.setattr(bench.device.life(), "_idle", deque())
        patch.setattr(socket, "socketpair", no_file)
        with pytest.raises(ResourceExhaustedError):
            bench.device.allocate(1)
    assert large().weight
    assert time.monotonic() - began < 20
    assert bench.device.pid == pid
    assert bench.losses == []


def test_programs_bring_their_counters(bench: Bench) -> None:
    program = bench.program("count", Pointer(COUNTERS), Pointer("out"), operands=("out",), counter_bytes=64)
    out = bench.put(np.zeros(1, np.int32))
    for _ in range(3):
        program.run([out.address], 0)
        assert bench.get(out, np.int32)[0] == 1


def test_programs_that_nobody_uses_are_dropped_in_the_worker(bench: Bench) -> None:
    for _ in range(50):
        bench.add()
    bench.device.allocate(1)
    assert len(bench.device.life().programs) <= 1
    assert not bench.device.life().dropped


def test_repeats_add_up(bench: Bench) -> None:
    x = bench.put(np.ones(N, np.float32))
    once = bench.add().run([x.address, x.address, bench.device.allocate(4 * N).address], 0)
    many = bench.add().run([x.address, x.address, bench.device.allocate(4 * N).address], 0, repeat=1000)
    assert len(once) == len(many) == 1
    assert many[0] > once[0]


# Memory of others


def test_memory_of_another_process_is_mapped_not_copied(bench: Bench) -> None:
    fd = os.memfd_create("tilewright-test")
    os.ftruncate(fd, 3 * 4096)
    with os.fdopen(fd, "r+b", buffering=0) as file:
        file.write(np.full(2 * N, 5, np.float32).tobytes()[:8192])
        imported = bench.device.import_memory(MemoryHandle("fd", b"", 4 * N, fd, 64))
        out = bench.device.allocate(4 * N)
        bench.add().run([imported.address, imported.address, out.address], 0)
        assert (bench.get(out) == 10).all()
        bench.add().run([out.address, out.address, imported.address], 0)
        file.seek(64)
        assert (np.frombuffer(file.read(4 * N), np.float32) == 20).all()
        bench.device.release_memory(imported)
        with pytest.raises(DeviceError):
            bench.device.read(imported, 0, memoryview(bytearray(4)))
        with pytest.raises(InvalidArgumentError):
            bench.device.import_memory(MemoryHandle("fd", b"", 4096, fd, 3 * 4096 - 1))


# Connections of clients


class Client:
    """The other end of a connection."""

    def __init__(self, bench: Bench, number: int = 1) -> None:
        self.bench, self.number = bench, number
        self.ended = threading.Event()
        self.socket, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(10)
        with server:
            bench.device.attach(server.fileno(), number, self.ended.set)

    def send(self, *frames: tuple[int, int, int, int]) -> None:
        """Launches: (flags, slot, sequence, binding)."""
        self.socket.send(b"".join(HEADER.pack(Kind.LAUNCH, *frame) for frame in frames))

    def receive(self) -> tuple[tuple[int, ...], bytes]:
        data = self.socket.recv(65536)
        return HEADER.unpack_from(data), data[HEADER_BYTES:]

    def error(self) -> error_pb2.ErrorDetail:
        header, payload = self.receive()
        assert header[1] == 1
        return error_pb2.ErrorDetail.FromString(payload)


@pytest.fixture
def client(bench: Bench) -> Iterator[Client]:
    client = Client(bench)
    yield client
    client.socket.close()


def bind_add(client: Client, binding: int = 7) -> Buffer:
    """``out += 1``; returns out."""
    bench = client.bench
    ones, out = bench.put(np.ones(N, np.float32)), bench.put(np.zeros(N, np.float32))
    bench.device.bind(client.number, binding, bench.add(), [ones.address, out.address, out.address], 0)
    return out


def test_launches_of_a_client_run_in_order_and_are_answered_when_asked(client: Client) -> None:
    out = bind_add(client)
    client.send((0, 0, 1, 7), (0, 0, 2, 7), (REPLY, 3, 3, 7))
    assert client.receive()[0][:4] == (REPLY_KIND | Kind.LAUNCH, 0, 3, 3)
    assert (client.bench.get(out) == 3).all()
    client.send((TIME, 0, 4, 7))
    header, payload = client.receive()
    assert header[:4] == (REPLY_KIND | Kind.LAUNCH, 0, 0, 4)
    assert 0 < header[4] < 10**9
    assert payload == b""


def test_full_packets_of_launches(client: Client) -> None:
    out = bind_add(client)
    for _ in range(20):
        client.send(*[(0, 0, index, 7) for index in range(63)], (REPLY, 0, 63, 7))
    for _ in range(20):
        assert client.receive()[0][3] == 63
    assert (client.bench.get(out) == 1280).all()


def test_launch_that_fails_is_always_answered_and_the_next_goes_on(client: Client) -> None:
    out = bind_add(client)
    client.send((0, 0, 1, 7), (0, 0, 2, 8), (WAIT, 5, 3, 7), (0, 0, 4, 7), (REPLY, 0, 5, 7))
    unknown, event = client.error(), client.error()
    assert (unknown.code, unknown.rule) == ("not_found", "binding_id")
    assert event.rule == "event_slot"
    assert client.receive()[0][3] == 5
    assert (client.bench.get(out) == 3).all()


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"\x03" * 15,
        HEADER.pack(Kind.LAUNCH, 0, 0, 0, 7) + b"y",
        HEADER.pack(Kind.CALL, 0, 0, 0, 1) + b"payload",
        HEADER.pack(Kind.LAUNCH, 0, 0, 0, 7) * 65,
        HEADER.pack(Kind.LAUNCH, 0, 0, 0, 99) * 2000,
        HEADER.pack(255, 0, 0, 0, 7),
    ],
)
def test_packets_that_mean_nothing_are_refused(client: Client, data: bytes) -> None:
    out = bind_add(client)
    client.socket.send(data)
    assert client.error().rule == "packet_format"
    client.send((REPLY, 0, 1, 7))
    assert client.receive()[0][3] == 1
    assert (client.bench.get(out) == 1).all()


def test_device_without_events_says_so(client: Client) -> None:
    client.socket.send(HEADER.pack(Kind.OPEN_EVENT, 0, 2, 9, 0) + bytes(64))
    assert client.error().rule == "event_support"


def test_binding_gets_workspace_of_its_connection(client: Client) -> None:
    bench = client.bench
    x, out = bench.put(np.ones(N, np.float32)), bench.put(np.zeros(N, np.float32))
    add = bench.device.load(bench._binary).function("add")

    def bind(binding: int, size: int) -> None:
        first = Struct((Pointer("x"), Pointer("x"), Pointer(WORKSPACE, size - 4 * N), I64(N)))
        second = Struct((Pointer(WORKSPACE, size - 4 * N), Pointer("x"), Pointer("out"), I64(N)))
        stages = [ProgramStage(add, pack(args), Geometry()) for args in (first, second)]
        bench.device.bind(1, binding, bench.device.program(stages, ("x", "out")), [x.address, out.address], size)

    def check(binding: int) -> None:
        client.send((REPLY, 0, 0, binding))
        client.receive()
        assert (bench.get(out) == 3).all()
        bench.device.write(out, 0, memoryview(np.zeros(N, np.float32)))

    bind(1, 4 * N)
    bind(2, 40 * N)
    for binding in (1, 2, 1):
        check(binding)
    bench.device.unbind(1, 2)
    check(1)
    bench.device.unbind(1, 1)  # and with it the workspace, which the next brings anew
    bind(3, 4 * N)
    check(3)


def test_binding_that_was_taken_back_is_unknown(client: Client) -> None:
    bind_add(client)
    client.bench.device.unbind(1, 7)
    client.bench.device.unbind(1, 7)
    client.send((REPLY, 0, 0, 7))
    assert client.error().rule == "binding_id"


def test_clients_do_not_see_the_bindings_of_others(client: Client) -> None:
    bind_add(client, 7)
    other = Client(client.bench, 2)
    other.send((REPLY, 0, 0, 7))
    assert other.error().rule == "binding_id"
    other.socket.close()


def test_client_that_goes_ends_its_connection(client: Client) -> None:
    bind_add(client)
    client.socket.close()
    assert client.ended.wait(10)
    with pytest.raises(NotFoundError):
        client.bench.device.bind(1, 8, client.bench.add(), [client.bench.device.allocate(4).address] * 3, 0)
    client.bench.device.unbind(1, 7)
    client.bench.device.detach(1)


def test_server_may_end_a_connection(client: Client) -> None:
    client.bench.device.detach(1)
    assert client.ended.wait(10)
    assert client.socket.recv(100) == b""


def test_kernel_that_faults_ends_the_connections_of_its_worker_and_is_the_suspect(client: Client) -> None:
    bench, program = client.bench, client.bench.crash()
    idle = Client(bench, 2)
    bind_add(idle, 3)
    idle.send((REPLY, 0, 0, 3))
    idle.receive()
    bench.device.bind(1, 7, program, [], 0)
    client.send((REPLY, 0, 0, 7))
    assert client.socket.recv(100) == b""
    assert idle.socket.recv(100) == b""
    assert client.ended.wait(10)
    assert idle.ended.wait(10)
    eventually(lambda: bench.losses)
    assert bench.losses[0].suspects == (program,)
    again = Client(bench, 3)
    out = bind_add(again)
    again.send((REPLY, 0, 0, 7))
    again.receive()
    assert (bench.get(out) == 1).all()
    again.socket.close()
    idle.socket.close()


DYING = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
sys.stdin.readline()
connection.close()
sys.stdin.readline()
"""


LAUNCHING = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
sys.stdin.readline()
connection.send(bytes.fromhex(sys.argv[2]))
sys.stdin.readline()
"""


def test_launches_of_a_dead_client_that_never_end_cost_the_worker_and_those_of_a_living_one_do_not(
    hosted: Callable[[str], Bench], tmp_path: Path
) -> None:
    bench, ended = hosted("open_endless"), threading.Event()
    pid = bench.device.pid
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        command = [sys.executable, "-c", DYING, str(tmp_path / "s")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
            accepted, _ = listener.accept()
            with accepted:
                bench.device.attach(accepted.fileno(), 1, ended.set)
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert ended.wait(10)
            time.sleep(1)
            assert bench.losses == []
            process.kill()
    eventually(lambda: bench.losses)
    assert bench.losses[0].suspects == ()
    bench.check_that_it_adds()
    assert bench.device.pid != pid


def test_a_launch_that_a_dead_client_waited_for_costs_the_worker_too(
    hosted: Callable[[str], Bench], tmp_path: Path
) -> None:
    bench, ended = hosted("open_stuck"), threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        command = [sys.executable, "-c", LAUNCHING, str(tmp_path / "s"), HEADER.pack(Kind.LAUNCH, TIME, 0, 0, 7).hex()]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
            accepted, _ = listener.accept()
            with accepted:
                bench.device.attach(accepted.fileno(), 1, ended.set)
            bench.device.bind(1, 7, bench.add(), [bench.put(np.ones(N, np.float32)).address] * 3, 0)
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            time.sleep(1)
            assert not ended.is_set()
            assert bench.losses == []
            process.kill()
    assert ended.wait(10)
    eventually(lambda: bench.losses)
    bench.check_that_it_adds()


class Waiting:
    is_busy = True

    def __init__(self, waits: bool) -> None:
        self.waits = waits


def test_work_of_a_dead_client_may_be_finished_but_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 0.0)
    for connected in (True, False):
        for waits in (True, False):
            known, peer = clients.Clients(), types.SimpleNamespace(is_known=True, is_dead=False, close=lambda: None)
            client = known.begin(Waiting(waits), peer)  # type: ignore[arg-type]
            if not connected:
                known.end(client)
            known.check()
            peer.is_dead = True
            time.sleep(0.01)
            with pytest.raises(DeviceLostError) if waits else contextlib.nullcontext():
                known.check()
            monkeypatch.setattr(clients, "LONG_PATIENCE_S", 0.0)
            with pytest.raises(DeviceLostError):
                known.check()
            monkeypatch.setattr(clients, "LONG_PATIENCE_S", 60.0)


def test_a_client_that_nobody_can_watch_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        peer = clients.Peer(ours)
        assert peer.is_known
        assert not peer.is_dead
        peer.close()
        monkeypatch.delattr(os, "pidfd_open")
        peer = clients.Peer(ours)
        assert not peer.is_known
        assert not peer.is_dead
        peer.close()


def test_connections_that_leave_launches_under_way_are_limited(hosted: Callable[[str], Bench]) -> None:
    bench = hosted("open_endless")
    for number in range(1, 4):
        gone = Client(bench, number)
        gone.socket.close()
        assert gone.ended.wait(10)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(ResourceExhaustedError) as caught:
        bench.device.attach(theirs.fileno(), 4, lambda: None)
    assert caught.value.rule == "connections_left"
    assert caught.value.retry_after_s
    bench.check_that_it_adds()


def test_launches_on_a_stream_are_answered_before_they_end(hosted: Callable[[str], Bench]) -> None:
    bench = hosted("open_streams")
    client, go = Client(bench), bench.put(np.zeros(1, np.int32))
    bench.device.bind(1, 1, bench.spin(), [go.address], 0)
    out = bind_add(client, 2)
    client.socket.send(HEADER.pack(Kind.OPEN_EVENT, 0, 4, 9, 0) + bytes(range(64)))
    header, payload = client.receive()
    assert header[:4] == (REPLY_KIND | Kind.OPEN_EVENT, 0, 4, 9)
    assert payload == b"done" + bytes(range(4, 64))
    client.send((0, 0, 1, 1), (WAIT | RECORD | REPLY, 4, 2, 2))
    assert client.receive()[0][3] == 2  # while the first still spins
    assert (bench.get(out) == 0).all()
    bench.device.write(go, 0, memoryview(np.ones(1, np.int32)))
    client.send((TIME, 0, 3, 2))
    assert client.receive()[0][4] > 0
    assert (bench.get(out) == 2).all()
    client.socket.close()
    assert client.ended.wait(10)


def test_taking_a_binding_back_waits_for_its_launches(hosted: Callable[[str], Bench]) -> None:
    bench = hosted("open_streams")
    client, go = Client(bench), bench.put(np.zeros(1, np.int32))
    bench.device.bind(1, 1, bench.spin(), [go.address], 0)
    client.send((REPLY, 0, 1, 1))
    client.receive()
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(bench.device.unbind, 1, 1)
        time.sleep(0.1)
        assert not taken.done()
        bench.device.write(go, 0, memoryview(np.ones(1, np.int32)))
        taken.result(10)
    client.socket.close()


def test_stream_of_the_servers_own(hosted: Callable[[str], Bench]) -> None:
    bench = hosted("open_streams")
    stream = bench.device.open_stream()
    x, out = bench.put(np.ones(N, np.float32)), bench.device.allocate(4 * N)
    addresses = (x.address, x.address, out.address)
    assert stream.open_event(1, bytes(64)) == b"done" + bytes(60)
    assert stream.launch(bench.add(), addresses, WAIT, 1) == 0
    stream.synchronize()
    assert (bench.get(out) == 2).all()
    assert stream.launch(bench.add(), addresses, TIME, 0) > 0
    with pytest.raises(InvalidArgumentError):
        stream.launch(bench.add(), addresses, WAIT, 2)
    stream.close()
    stream.close()


# Leaks


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - a count is all


_others: set[int] = set()


def children() -> set[int]:
    """Processes that were started since the test began."""
    found: set[int] = set()
    for task in list(Path("/proc/self/task").iterdir()):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found - _others


def usage(pid: int) -> tuple[int, int]:
    return descriptors(pid), len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208


def resident_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0])


def test_connections_leave_nothing_behind(bench: Bench) -> None:
    pid = bench.device.pid
    args = Struct((Pointer("x"), Pointer("x"), Pointer("out"), I64(N)))
    stage = ProgramStage(bench.device.load(bench._binary).function("add"), pack(args), Geometry())

    def cycle(number: int) -> None:
        client = Client(bench, number)
        x, out = bench.put(np.ones(N, np.float32)), bench.device.allocate(4 * N)
        program = bench.device.program([stage], ["x", "out"])
        bench.device.bind(number, 7, program, [x.address, out.address], 4 * N)
        client.send((REPLY, 0, 0, 7))
        client.receive()
        client.socket.close()
        assert client.ended.wait(10)
        bench.device.free(x)
        bench.device.free(out)

    for number in range(50):
        cycle(number)
    eventually(lambda: len(bench.device.life().connections) == 0)
    before = usage(os.getpid()) + usage(pid)
    worker, server = resident_kib(pid), resident_kib(os.getpid())
    for number in range(50, 250):
        cycle(number)
    eventually(lambda: all(now <= then for now, then in zip(usage(os.getpid()) + usage(pid), before, strict=True)))
    assert resident_kib(pid) - worker < 4096
    assert resident_kib(os.getpid()) - server < 4096
