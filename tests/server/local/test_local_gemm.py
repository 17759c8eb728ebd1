"""The main job over the local socket: real products, launched by packets of sixteen bytes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_harness import (
    ATTACH,
    BIND,
    CALL,
    HEADER,
    LAUNCH,
    OPEN_EVENT,
    REGISTER,
    REPLY,
    TIME,
    UNBIND,
    UNREGISTER,
    Wire,
    bind_request,
    descriptors,
    expect,
    launches,
)
from rpc_harness import Client, MemoryFile, ServerProcess, eventually, floats, in_buffer, in_region, refused

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

COMMAND = [sys.executable, str(Path(__file__).parents[1] / "app" / "gemm_server.py")]
SIDE = 64
STEP = SIDE * SIDE * 4


@pytest.fixture(scope="module", params=["off", "on"], ids=["in the server", "in a process of its own"])
def isolated(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "on")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, isolated: bool) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("gemm")
    with ServerProcess(folder, COMMAND, cpu_isolated=isolated, cpu_threads=2) as process:
        assert process.ready, process.log()
        yield process
        assert process.stop() == 0, process.log()
        assert "Traceback" not in process.log(), process.log()


class Setting:
    """Matrices a, b and out in one file that is registered with the device, a plan for them, and a connection."""

    def __init__(self, server: ServerProcess, isolated: bool) -> None:
        self.isolated = isolated
        self.client = Client(server.addresses[0])
        self.control = self.connect()
        self.file = MemoryFile(3 * STEP)
        self.a, self.b, self.out = (
            np.frombuffer(self.file.bytes, np.float32, SIDE * SIDE, place * STEP).reshape(SIDE, SIDE)
            for place in range(3)
        )
        random = np.random.default_rng(3)
        self.a[:] = random.standard_normal(self.a.shape, np.float32)
        self.b[:] = random.standard_normal(self.b.shape, np.float32)
        self.region = self.register()
        request = dp.PlanRequest(
            session=self.client.token,
            operation="gemm",
            inputs=[tp.Operand(name=name, spec=floats(SIDE, SIDE)) for name in ("a", "b")],
            outputs=[tp.Operand(name="out", spec=floats(SIDE, SIDE))],
        )
        reply = self.client.dispatch.Plan(request)
        self.plan = reply.plan
        assert [item.name for item in (*reply.inputs, *reply.outputs)] == ["a", "b", "out"]
        self.places = [in_region(self.region, place * STEP) for place in range(3)]

    def connect(self) -> Wire:
        return Wire(self.client.opened.local_socket, self.client.token, timeout=60)

    def request(self) -> mp.RegisterRegionRequest:
        if self.isolated:
            return mp.RegisterRegionRequest(device_fd={"device_uuid": "cpu"}, bytes=self.file.nbytes)
        return mp.RegisterRegionRequest(attached={}, bytes=self.file.nbytes)

    def register(self) -> int:
        reply = self.control.call(REGISTER, self.request(), [self.file.fd])
        assert reply.error is None, reply.error
        device = mp.RegisterRegionReply.FromString(reply.payload).device
        assert device == ("cpu:0" if self.isolated else "")
        return reply.value

    def bind(self) -> int:
        reply = self.control.call(BIND, bind_request(self.plan, *self.places))
        assert reply.error is None, reply.error
        bound = dp.BindReply.FromString(reply.payload)
        assert (bound.device, bound.attach) == ("cpu:0", self.isolated)
        return bound.binding

    def lane(self) -> Wire:
        """A connection for launches. A device that was lost just now is asked for again, as its error says."""
        while True:
            wire = self.connect()
            error = wire.ask(ATTACH, payload=b"cpu:0").error if self.isolated else None
            if error is None:
                return wire
            wire.close()
            assert error.rule == "device_lost", error
            time.sleep(error.retry_after_ms / 1000)

    def close(self) -> None:
        self.a = self.b = self.out = np.zeros((0, 0), np.float32)
        self.control.close()
        self.client.close()
        self.file.close()


@pytest.fixture
def setting(server: ServerProcess, isolated: bool) -> Iterator[Setting]:
    made = Setting(server, isolated)
    yield made
    made.close()


def test_a_thousand_launches_compute_a_thousand_products(setting: Setting) -> None:
    binding = setting.bind()
    with setting.lane() as lane:
        times = []
        for number in range(1000):
            setting.a[0, 0] = number
            if number % 100 == 0:
                setting.out[:] = 0
            reply = lane.launch(binding, TIME)
            assert reply.error is None, reply.error
            times.append(reply.value)
            if number % 100 == 0:
                np.testing.assert_allclose(setting.out, setting.a @ setting.b, rtol=1e-4, atol=1e-3)
        assert all(time > 0 for time in times)
        assert sum(times) < 30e9


def test_packets_of_many_launches_answer_the_last(setting: Setting) -> None:
    binding = setting.bind()
    with setting.lane() as lane:
        setting.out[:] = 0
        for _ in range(20):
            lane.send(launches(*[binding] * 63) + launches(binding, flags=REPLY))
            reply = lane.receive()
            assert reply is not None
            assert (reply.kind, reply.flags) == (0x80 | LAUNCH, 0)
        np.testing.assert_allclose(setting.out, setting.a @ setting.b, rtol=1e-4, atol=1e-3)


def test_bindings_made_before_and_after_the_lane_are_launched(setting: Setting) -> None:
    before = setting.bind()
    with setting.lane() as lane, setting.lane() as second:
        after = setting.bind()
        counts = (2, 2 if setting.isolated else 0)
        assert eventually(lambda: _counted(setting) == counts)  # what other tests left goes first
        for wire in (lane, second):
            for binding in (before, after):
                assert wire.launch(binding).error is None
        assert setting.control.call(UNBIND, dp.UnbindRequest(binding=before)).error is None
        expect(lane.launch(before), "not_found", "binding_id")
        assert second.launch(after).error is None
        assert setting.control.call(UNREGISTER, mp.UnregisterRegionRequest(region=setting.region)).error is None
        expect(lane.launch(after), "not_found", "binding_id")


def _counted(setting: Setting) -> tuple[int, int]:
    statistics = setting.client.kernels.Statistics(kp.StatisticsRequest())
    return statistics.bindings, statistics.attached_connections


def test_grpc_runs_bindings_too(setting: Setting) -> None:
    binding = setting.bind()
    execution = dp.Execution(binding=binding)
    request = dp.ExecuteRequest(session=setting.client.token, executions=[execution, execution])
    for _ in range(3):
        setting.out[:] = 0
        reply = setting.client.dispatch.Execute(request)
        assert all(item.device_ns > 0 and not item.bytes_copied for item in reply.results)
        np.testing.assert_allclose(setting.out, setting.a @ setting.b, rtol=1e-4, atol=1e-3)


def test_a_connection_that_is_not_attached_launches_as_well(setting: Setting) -> None:
    binding = setting.bind()
    with setting.connect() as wire:
        setting.out[:] = 0
        assert wire.launch(binding, TIME).value > 0
        np.testing.assert_allclose(setting.out, setting.a @ setting.b, rtol=1e-4, atol=1e-3)


def test_another_session_cannot_launch_it(setting: Setting, server: ServerProcess, isolated: bool) -> None:
    binding = setting.bind()
    other = Setting(server, isolated)
    with other.lane() as lane:
        expect(lane.launch(binding), "not_found", "binding_id")
        assert lane.launch(other.bind()).error is None
    other.close()


def test_the_end_of_the_client_ends_its_lanes(setting: Setting) -> None:
    binding = setting.bind()
    with setting.lane() as lane:
        assert lane.launch(binding).error is None
        setting.client.close()
        assert lane.is_closed()


# Devices in a process of their own


def test_an_attached_connection_takes_launches_only(setting: Setting) -> None:
    if not setting.isolated:
        expect(setting.control.ask(ATTACH, payload=b"cpu:0"), "unsupported", "attach")
        return
    with setting.lane() as lane:
        expect(lane.ask(CALL, BIND), "invalid_argument", "packet_format")
        expect(lane.ask(OPEN_EVENT, payload=bytes(64)), "unsupported", "event_support")
        expect(lane.launch(5), "not_found", "binding_id")


def test_memory_of_a_device_is_for_that_device(setting: Setting) -> None:
    client, control = setting.client, setting.control
    if not setting.isolated:
        request = mp.RegisterRegionRequest(device_fd={"device_uuid": "cpu"}, bytes=setting.file.nbytes)
        expect(control.call(REGISTER, request, [setting.file.fd]), "not_found", "device_uuid")
        return
    loose = MemoryFile(4096, sealed=False)
    request = mp.RegisterRegionRequest(device_fd={"device_uuid": "cpu"}, bytes=4096)
    expect(control.call(REGISTER, request, [loose.fd]), "invalid_argument", "region_sealed")
    loose.close()
    request = mp.RegisterRegionRequest(device_fd={"device_uuid": "cpu", "part_bytes": [4096, 4096]}, bytes=4096)
    expect(control.call(REGISTER, request, [setting.file.fd] * 2), "unsupported", "memory_parts")
    request = mp.RegisterRegionRequest(device_fd={"device_uuid": "cpu", "offset": 2 * STEP}, bytes=STEP)
    part = control.call(REGISTER, request, [setting.file.fd])
    assert part.error is None
    setting.out[:] = 7
    made = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=STEP)).buffer
    write = mp.WriteBufferRequest(
        session=client.token, buffer=made, bytes=STEP, region=tp.RegionSlice(region=part.value)
    )
    client.memory.WriteBuffer(write)
    read = mp.ReadBufferRequest(session=client.token, buffer=made, bytes=16)
    assert client.memory.ReadBuffer(read).data == np.full(4, 7, np.float32).tobytes()
    binding = control.bind(setting.plan, *setting.places[:2], in_buffer(made))
    assert control.launch(binding).error is None
    for offset in (STEP - 4, 4, 2**40):
        reply = control.call(BIND, bind_request(setting.plan, *setting.places[:2], in_region(part.value, offset)))
        expect(reply, "invalid_argument", "location_bounds")


def worker_of(server: ServerProcess) -> int:
    """Process id of the device's worker."""
    found: list[str] = []
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # threads come and go
            found += (task / "children").read_text().split()
    return int(next(pid for pid in found if b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes()))


def test_the_loss_of_the_device_is_told_and_survived(setting: Setting, server: ServerProcess, isolated: bool) -> None:
    if not isolated:
        with pytest.raises(StopIteration):
            worker_of(server)
        return
    binding = setting.bind()
    lane = setting.lane()
    assert lane.launch(binding).error is None
    os.kill(worker_of(server), signal.SIGKILL)
    assert lane.is_closed(), "the client sees the end of the device's process"
    expect(setting.control.launch(binding), "unavailable", "device_lost")
    expect(setting.control.call(BIND, bind_request(setting.plan, *setting.places)), "unavailable", "device_lost")
    assert setting.control.call(UNREGISTER, mp.UnregisterRegionRequest(region=setting.region)).error is None
    expect(setting.control.launch(binding), "not_found", "binding_id")
    again = Setting(server, isolated)
    with again.lane() as fresh:
        again.out[:] = 0
        assert fresh.launch(again.bind()).error is None
        np.testing.assert_allclose(again.out, again.a @ again.b, rtol=1e-4, atol=1e-3)
    again.close()
    staged = setting.client.dispatch.Run(_inline_product(setting))
    assert len(staged.outputs) == 1, "staging memory is made anew"
    with refused("not_found", "binding_id"):
        setting.client.dispatch.Unbind(dp.UnbindRequest(session=setting.client.token, binding=binding))
    lane.close()
    assert eventually(lambda: not setting.client.status().bindings)


def _inline_product(setting: Setting) -> dp.RunRequest:
    data: Any = np.eye(SIDE, dtype=np.float32).tobytes()
    operands = [
        tp.Operand(name=name, spec=floats(SIDE, SIDE), location=tp.Location(inline=data)) for name in ("a", "b")
    ]
    return dp.RunRequest(session=setting.client.token, operation="gemm", inputs=operands)


# Death and disorder, with the device in a process of its own


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("apart")
    with ServerProcess(folder, COMMAND, cpu_isolated=True, cpu_threads=1) as process:
        assert process.ready, process.log()
        yield process
        assert process.stop() == 0, process.log()
        assert "Traceback" not in process.log(), process.log()


def mapped(pid: int) -> int:
    """How many memory files of clients a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:tilewright-")


def test_nothing_is_left_of_many_lanes(apart: ServerProcess) -> None:
    setting = Setting(apart, isolated=True)
    binding = setting.bind()
    worker = worker_of(apart)

    def cycle() -> None:
        with setting.lane() as lane:
            assert lane.launch(binding).error is None

    def state() -> tuple[int, int, int, int]:
        tasks = [len(os.listdir(f"/proc/{pid}/task")) for pid in (apart.pid, worker)]  # noqa: PTH208
        return descriptors(apart.pid), descriptors(worker), tasks[0], tasks[1]

    cycle()
    time.sleep(0.2)
    before = state()
    for _ in range(60):
        cycle()
    assert eventually(lambda: all(now <= then for now, then in zip(state(), before, strict=True))), state()
    setting.close()


DYING = """
    import sys, time
    sys.path[:0] = {path!r}
    from rpc_harness import ServerProcess
    from test_local_gemm import Setting
    from types import SimpleNamespace
    setting = Setting(SimpleNamespace(addresses=[{address!r}]), isolated=True)
    binding, lane = setting.bind(), setting.lane()
    assert lane.launch(binding).error is None
    print("ready", flush=True)
    time.sleep(60)
"""


def test_the_death_of_a_process_unmaps_its_memory_everywhere(apart: ServerProcess) -> None:
    with Client(apart.addresses[0]):  # the device is open
        first = Setting(apart, isolated=True)
        first.close()
    worker = worker_of(apart)
    assert eventually(lambda: mapped(worker) == 0)
    here = Path(__file__).parent
    folders = [str(here), str(here.parent / "rpc")]
    source = textwrap.dedent(DYING).format(path=folders, address=apart.addresses[0])
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert mapped(worker) == 1
    process.kill()
    process.wait()
    process.stdout.close()
    assert eventually(lambda: mapped(worker) == 0, timeout=1.0)
    assert worker_of(apart) == worker


def test_memory_is_not_unmapped_under_a_launch(apart: ServerProcess) -> None:
    """Every way in which memory can end while launches wait in the lane's socket, or run."""
    Setting(apart, isolated=True).close()
    worker = worker_of(apart)
    ends = [
        lambda setting: setting.client.close(),
        lambda setting: setting.control.close(),
        lambda setting: setting.control.call(UNREGISTER, mp.UnregisterRegionRequest(region=setting.region)),
    ]
    for end in ends * 3:
        setting = Setting(apart, isolated=True)
        binding = setting.bind()
        lanes = [setting.lane() for _ in range(2)]
        for _ in range(20):
            for lane in lanes:
                lane.send(launches(*[binding] * 64))
        end(setting)
        for lane in lanes:
            lane.close()
        setting.close()
        assert eventually(lambda: mapped(worker) == 0)
        assert worker_of(apart) == worker, "the device was lost"


def test_what_was_bound_before_a_loss_is_in_nobodys_way(apart: ServerProcess) -> None:
    setting = Setting(apart, isolated=True)
    stale, lane = setting.bind(), setting.lane()
    assert lane.launch(stale).error is None
    os.kill(worker_of(apart), signal.SIGKILL)
    assert lane.is_closed()
    lane.close()
    with setting.lane() as fresh:
        expect(fresh.launch(stale), "not_found", "binding_id")
        expect(setting.control.launch(stale), "unavailable", "device_lost")
        assert setting.control.call(UNBIND, dp.UnbindRequest(binding=stale)).error is None
        assert setting.control.call(UNREGISTER, mp.UnregisterRegionRequest(region=setting.region)).error is None
        setting.region = setting.register()
        setting.places = [in_region(setting.region, place * STEP) for place in range(3)]
        setting.out[:] = 0
        assert fresh.launch(setting.bind()).error is None
        np.testing.assert_allclose(setting.out, setting.a @ setting.b, rtol=1e-4, atol=1e-3)
    setting.close()


def test_many_threads_bind_launch_and_end_at_once(apart: ServerProcess) -> None:
    setting = Setting(apart, isolated=True)
    stop = time.monotonic() + 2.0
    failures: list[BaseException] = []
    launched = [0]

    def work(number: int) -> None:
        try:
            with setting.connect() as control:
                while time.monotonic() < stop:
                    reply = control.call(REGISTER, setting.request(), [setting.file.fd])
                    places = [in_region(reply.value, place * STEP) for place in range(3)]
                    binding = control.bind(setting.plan, *places)
                    with setting.lane() as lane:
                        for _ in range(3):
                            assert lane.launch(binding).error is None
                            launched[0] += 1
                    request = mp.UnregisterRegionRequest(region=reply.value)
                    assert control.call(UNREGISTER, request).error is None
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures, failures
    assert launched[0]
    status = setting.client.status()
    assert not status.bindings
    assert [item.region for item in status.regions] == [setting.region]
    setting.close()


def test_garbage_on_a_lane_gets_typed_errors(apart: ServerProcess) -> None:
    setting = Setting(apart, isolated=True)
    binding = setting.bind()
    worker = worker_of(apart)
    random = np.random.default_rng(11)
    before = descriptors(worker)
    with setting.lane() as lane:
        for number in range(300):
            data = random.integers(0, 256, int(random.integers(1, 1200)), np.uint8).tobytes()
            if number % 3 == 0:  # of the right kind, and wrong in everything else
                data = bytes([LAUNCH]) + data[1:]
            lane.send(data, [setting.file.fd] if number % 5 == 0 else [])
            lane.send(HEADER.pack(LAUNCH, TIME, 4242, number, binding))
            while True:
                reply = lane.receive()
                assert reply is not None
                if (reply.kind, reply.slot, reply.sequence) == (0x80 | LAUNCH, 4242, number):
                    assert reply.error is None
                    break
                assert reply.error is not None
                assert reply.error.code in ("invalid_argument", "not_found", "unsupported"), reply.error
    assert worker_of(apart) == worker
    assert eventually(lambda: descriptors(worker) <= before)
    setting.close()


def test_a_server_stops_with_lanes_open(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, COMMAND, cpu_isolated=True, cpu_threads=1) as server:
        setting = Setting(server, isolated=True)
        binding = setting.bind()
        with setting.lane() as lane:
            assert lane.launch(binding).error is None
            server.signal()
            assert lane.is_closed()
            assert server.wait() == 0, server.log()
        assert "Traceback" not in server.log(), server.log()
        setting.close()
