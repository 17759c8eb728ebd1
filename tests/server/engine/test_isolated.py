"""The engine on a device in a process of its own, whose loss is not the end of plans, sessions or the server."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vector_operation import VectorConfig, VectorOperation, request

from tilewright_kit.contract.device import Buffer
from tilewright_kit.types.errors import DeviceError, InvalidArgumentError, TilewrightError, UnavailableError
from tilewright_server.devices.contract import REPLY, DeviceLostError
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine, Prepared
from tilewright_server.engine.planning.quarantine import Quarantine
from tilewright_server.engine.types import Outcome, Selection
from tilewright_server.protocol.frames import Kind, packet
from tilewright_server.service import Service
from tilewright_server.session.operands.operand_binding import Location, Place
from tilewright_server.session.session import Session
from tilewright_server.session.sessions import Sessions

pytestmark = pytest.mark.slow

BEST = VectorConfig(rank=1).name
FAULTY = VectorConfig(rank=0, faults=True)
TWO_STAGES = VectorConfig(rank=4, stages=2).name
N = 100

MakeEngine = Callable[..., Engine]


def call() -> Call:
    return Call.within(60)


@pytest.fixture
def isolated(make_engine: MakeEngine) -> Engine:
    engine = make_engine(cpu_isolated=True)
    operation = engine.operations["vector"]
    assert isinstance(operation, VectorOperation)
    operation.faulty = (FAULTY,)
    return engine


class Vectors:
    """Operands in the memory of the device; ``first`` is the first element of x."""

    def __init__(self, engine: Engine, first: float = 1.0) -> None:
        self.device: Any = engine.devices.get()
        self.x, self.y = np.arange(N, dtype=np.float32), np.ones(N, np.float32)
        self.x[0] = first
        self.buffers: list[Buffer] = [self.device.allocate(4 * N) for _ in range(3)]
        self.device.write(self.buffers[0], 0, memoryview(self.x))
        self.device.write(self.buffers[1], 0, memoryview(self.y))

    @property
    def addresses(self) -> list[int]:
        return [buffer.address for buffer in self.buffers]

    def right(self) -> bool:
        out = np.empty(N, np.float32)
        self.device.read(self.buffers[2], 0, memoryview(out))
        return bool((out == self.x + self.y).all())


def plan(engine: Engine, kernel: str = "", **attributes: Any) -> Prepared:
    return engine.plan(request(N, **attributes), Selection(kernel=kernel), call())


def kill(engine: Engine) -> None:
    device: Any = engine.devices.get()
    life = device.life()
    os.kill(device.pid, signal.SIGKILL)
    assert life.buried.wait(10)


def fault(engine: Engine, prepared: Prepared) -> None:
    with pytest.raises(DeviceLostError):
        engine.execute(prepared, Vectors(engine, -1.0).addresses, call())


def test_plans_run_in_the_other_process(isolated: Engine) -> None:
    for kernel in (BEST, TWO_STAGES):
        vectors = Vectors(isolated)
        prepared = plan(isolated, kernel)
        outcome = isolated.execute(prepared, vectors.addresses, call(), repeat=3)
        assert outcome.device_ns > 0
        assert vectors.right()
    assert isolated.statistics.snapshot().workspace_bytes > 0


def test_plan_outlives_its_device(isolated: Engine) -> None:
    prepared = plan(isolated, TWO_STAGES)
    for _ in range(3):
        vectors = Vectors(isolated)
        isolated.execute(prepared, vectors.addresses, call())
        assert vectors.right()
        kill(isolated)
        assert isolated.statistics.snapshot().workspace_bytes == 0
        assert len(isolated._store._modules) == 0
        assert prepared.current.lost
    again = plan(isolated, TWO_STAGES)
    assert not again.lost
    vectors = Vectors(isolated)
    results = isolated.execute_many([(prepared, vectors.addresses, 1), (again, vectors.addresses, 2)], call())
    assert all(isinstance(item, Outcome) for item in results)
    assert vectors.right()
    assert prepared.successor is prepared.current


def test_memory_that_was_lost_with_the_device_is_refused(isolated: Engine) -> None:
    prepared, vectors = plan(isolated), Vectors(isolated)
    kill(isolated)
    with pytest.raises(DeviceLostError) as caught:
        isolated.execute(prepared, vectors.addresses, call())
    assert caught.value.rule == "device_lost"
    assert "operand" in caught.value.reason
    (result,) = isolated.execute_many([(prepared, vectors.addresses, 1)], call())
    assert isinstance(result, DeviceLostError)
    fresh = Vectors(isolated)
    isolated.execute(prepared, fresh.addresses, call())
    assert fresh.right()


def test_kernel_that_faults_ends_its_execution_only(isolated: Engine) -> None:
    prepared = plan(isolated)
    assert prepared.kernels == (FAULTY.name,)
    with pytest.raises(UnavailableError) as caught:
        isolated.execute(prepared, Vectors(isolated, -1.0).addresses, call())
    assert caught.value.rule == "device_lost"
    vectors = Vectors(isolated)
    isolated.execute(prepared, vectors.addresses, call())
    assert vectors.right()


@pytest.mark.extended
def test_kernel_that_faults_again_is_not_run_any_more(isolated: Engine) -> None:
    prepared = plan(isolated)
    fault(isolated, prepared)
    fault(isolated, prepared)
    with pytest.raises(DeviceError) as caught:
        isolated.execute(prepared, Vectors(isolated).addresses, call())
    assert (caught.value.rule, caught.value.value) == ("kernel_quarantined", FAULTY.name)
    with pytest.raises(DeviceError) as caught:
        plan(isolated, FAULTY.name)
    assert caught.value.rule == "kernel_quarantined"
    other, vectors = plan(isolated), Vectors(isolated)
    assert other.kernels == (BEST,)
    isolated.execute(other, vectors.addresses, call())
    assert vectors.right()


def test_kernel_that_faults_over_connections_of_clients_is_not_run_any_more(isolated: Engine) -> None:
    prepared = plan(isolated)
    for number in (1, 2):
        prepared = isolated.current(prepared, call())
        vectors = Vectors(isolated, -1.0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            life = vectors.device.life()
            vectors.device.attach(theirs.fileno(), number, lambda: None)
            vectors.device.bind(number, 5, prepared.program, vectors.addresses, 0)
            theirs.close()
            ours.settimeout(10)
            ours.send(packet(Kind.LAUNCH, REPLY, value=5))
            assert ours.recv(100) == b""
        assert life.buried.wait(10)
    with pytest.raises(DeviceError) as caught:
        isolated.current(prepared, call())
    assert caught.value.rule == "kernel_quarantined"
    assert plan(isolated).kernels == (BEST,)


@pytest.mark.extended
def test_losses_leave_nothing_behind(isolated: Engine) -> None:
    prepared = plan(isolated, BEST)

    def cycle() -> None:
        vectors = Vectors(isolated)
        isolated.execute(prepared, vectors.addresses, call())
        assert vectors.right()
        kill(isolated)

    def used() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    for _ in range(3):
        cycle()
    before = used()
    for _ in range(10):
        cycle()
    descriptors, threads = used()
    assert descriptors <= before[0] and threads <= before[1]


def test_kernels_that_only_ran_beside_a_fault_are_kept(isolated: Engine) -> None:
    faulty, good = plan(isolated), plan(isolated, BEST)
    for _ in range(2):
        isolated.execute(good, Vectors(isolated).addresses, call())
        fault(isolated, faulty)
    vectors = Vectors(isolated)
    isolated.execute(good, vectors.addresses, call())
    assert vectors.right()


def test_blame_is_shared_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    quarantine = Quarantine(ttl_s=60.0)
    for _ in range(5):
        assert quarantine.blame("cuda:0", ["a", "b"], 1 / 3) == []
    assert quarantine.blame("cuda:0", ["a"], 1 / 3) == ["a"]
    assert quarantine.holds("cuda:0", "a")
    assert not quarantine.holds("cuda:0", "b")
    assert not quarantine.holds("cuda:1", "a")
    with pytest.raises(DeviceError):
        quarantine.check("cuda:0", ["b", "a"])
    now += 61
    quarantine.check("cuda:0", ["b", "a"])
    assert quarantine.blame("cuda:0", ["a"], 1.0) == []


@pytest.mark.extended
def test_executions_under_threads_survive_repeated_losses(isolated: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each either succeeds, and is right, or is told of the loss."""
    # The kernel is innocent here, but runs whenever the process is killed: it would be refused after a while.
    monkeypatch.setattr(isolated.quarantine, "blame", lambda *_: [])
    prepared = plan(isolated, BEST)
    over, good, lost = threading.Event(), [0] * 6, [0] * 6

    def work(number: int) -> None:
        while not over.is_set():
            try:
                vectors = Vectors(isolated)
                isolated.execute(prepared, vectors.addresses, call())
                assert vectors.right()
                for buffer in vectors.buffers:
                    vectors.device.free(buffer)
                good[number] += 1
            except DeviceLostError:  # noqa: PERF203
                lost[number] += 1

    def goes_on(since: list[int]) -> bool:
        """Wait until every thread has succeeded twice more."""
        end = time.monotonic() + 60
        while not all(now > then + 1 for now, then in zip(good, since, strict=True)) and time.monotonic() < end:
            time.sleep(0.01)
        return time.monotonic() < end

    with ThreadPoolExecutor(6) as threads:
        running = [threads.submit(work, item) for item in range(6)]
        try:
            for kills in range(50):
                assert goes_on(list(good))
                if kills >= 8 and any(lost):
                    break
                kill(isolated)
        finally:
            over.set()
        for item in running:
            item.result(30)
    assert any(lost)
    vectors = Vectors(isolated)
    isolated.execute(prepared, vectors.addresses, call())
    assert vectors.right()


def test_addresses_must_be_aligned_as_the_plan_assumes(isolated: Engine) -> None:
    prepared, vectors = plan(isolated, BEST, alignment=64), Vectors(isolated)
    isolated.execute(prepared, vectors.addresses, call())
    device: Any = vectors.device
    x = device.allocate(8 * N)
    with pytest.raises(InvalidArgumentError) as caught:
        isolated.execute(prepared, [x.address + 48, *vectors.addresses[1:]], call())
    assert (caught.value.field, caught.value.value, caught.value.rule) == ("x", "16", "operand_alignment")
    assert "alignment=16" in caught.value.fix
    out = device.allocate(8 * N)
    isolated.execute(prepared, [*vectors.addresses[:2], out.address + 4], call())


# Through the service, with operands that are copied to the device and back


@pytest.fixture
def service(isolated: Engine) -> Any:
    service = Service(isolated, Sessions(), 1 << 20, 1 << 20)
    yield service
    service.sessions.close_all(timeout=5.0)
    service.close()


def inline(service: Service, x: np.ndarray, kernel: str = "") -> Any:
    y = np.ones(N, np.float32)
    locations = {
        "x": Location(Place.INLINE, data=x.tobytes()),
        "y": Location(Place.INLINE, data=y.tobytes()),
        "out": Location(Place.RETURN),
    }
    result = service.run(b"", request(N), locations, Selection(kernel=kernel), call())
    return np.frombuffer(result.outputs[0].data, np.float32)


def test_inline_operands_are_copied_there_and_back_after_a_loss_too(service: Service) -> None:
    x = np.arange(N, dtype=np.float32)
    for _ in range(3):
        assert (inline(service, x) == x + 1).all()
        kill(service.engine)
    bad = x.copy()
    bad[0] = -1
    with pytest.raises(DeviceLostError):
        inline(service, bad)
    assert (inline(service, x) == x + 1).all()


def test_resident_buffer_that_was_lost_says_so_and_can_be_freed(service: Service) -> None:
    from tilewright_server.memory.buffers import ResidentBuffer

    session: Session = service.sessions.open("test", local=True)
    device = service.engine.devices.get()
    x = np.arange(N, dtype=np.float32)
    kept = session.create_buffer(4 * N, lambda size: ResidentBuffer(device, size), on_host=True)
    service.write_buffer(session.token, kept.id, 0, x.tobytes(), 0)
    plan_id, _ = service.plan(session.token, request(N), Selection(), call())
    y = Location(Place.INLINE, data=np.ones(N, np.float32).tobytes())

    def run() -> Any:
        location = Location(Place.BUFFER, kept.id)
        batch = service.resolve(session, [(plan_id, [location, y, Location(Place.RETURN)], 1)])
        return service.execute(batch, call())[0]

    assert (np.frombuffer(run().outputs[0].data, np.float32) == x + 1).all()
    kill(service.engine)
    error = run()
    assert isinstance(error, DeviceLostError)
    with pytest.raises(DeviceLostError):
        service.read_buffer(session.token, kept.id, 0, 4, None)
    session.free_buffer(kept.id)
    kept = session.create_buffer(4 * N, lambda size: ResidentBuffer(service.engine.devices.get(), size), on_host=True)
    service.write_buffer(session.token, kept.id, 0, x.tobytes(), 0)
    assert (np.frombuffer(run().outputs[0].data, np.float32) == x + 1).all()


def test_nothing_of_the_server_ends_with_the_process(isolated: Engine) -> None:
    kill(isolated)
    with pytest.raises(TilewrightError):
        isolated.plan(request(N, scale="wrong"), Selection(), call())
    assert isolated.drain(5.0)
