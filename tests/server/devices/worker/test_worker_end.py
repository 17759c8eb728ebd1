"""Devices in a process of their own: what ends that process, and what does not."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_harness import (
    Bench,
    Client,
    children,
    descriptors,
    eventually,
    is_running,
    open_with,
)

from tilewright_kit.contract.plan import I64, Geometry, Struct, pack
from tilewright_kit.types.errors import (
    DeviceError,
    InternalError,
    UnavailableError,
)
from tilewright_server.devices.contract import (
    DeviceLostError,
    ProgramStage,
    WorkerSpec,
)
from tilewright_server.devices.lifetime import is_lost
from tilewright_server.devices.registry import DeviceRegistry
from tilewright_server.devices.worker import device as worker_device
from tilewright_server.devices.worker.device import WorkerDevice
from tilewright_server.protocol.request_ids import Given, serve

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("nbytes", [4096, 16 << 20], ids=["at once", "in parts"])
def test_worker_that_is_killed_during_a_copy_leaves_no_mapping(bench: Bench, nbytes: int) -> None:
    """An error that is kept keeps the frames of the copy, and not the memory that it went through."""
    buffer, caught = bench.device.allocate(nbytes), []

    def copy() -> None:
        try:
            bench.device.write(buffer, 0, memoryview(bytes(nbytes)))
        except DeviceLostError as error:
            caught.append(error)

    copy()
    before = areas()
    os.kill(bench.device.pid, signal.SIGSTOP)
    thread = threading.Thread(target=copy)
    thread.start()
    time.sleep(0.1)  # it waits for the worker
    os.kill(bench.device.pid, signal.SIGKILL)
    thread.join(30)
    assert len(caught) == 1
    bench.check_that_it_adds()
    eventually(lambda: areas() == before)


def areas() -> int:
    """Staging areas of workers that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("/memfd:tw-device")


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


def test_device_that_reports_its_loss_ends_its_worker(
    hosted: Callable[[str], Bench], capfd: pytest.CaptureFixture[str]
) -> None:
    bench = hosted("open_lost")
    pid, program = bench.device.pid, bench.add()
    buffer = bench.device.allocate(64)
    serve(Given("chat-7"))
    try:
        with pytest.raises(DeviceLostError, match="uncorrectable"):
            program.run([buffer.address] * 3, 0)
    finally:
        serve(None)
    eventually(lambda: bench.losses)
    lines = "".join(capfd.readouterr())
    (line,) = (line for line in lines.splitlines() if "the device was lost" in line)
    assert line.endswith(" request=chat-7"), "the process of a device logs whose request it served"
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


@pytest.mark.extended
def test_requests_do_not_wait_long_for_a_device_that_is_opened_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would keep a thread of the server, which other devices need."""
    device, options = bench.device, bench.device._spec.options
    monkeypatch.setattr(worker_device, "RESTART_S", 0.2)
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


@pytest.mark.extended
def test_a_device_that_is_closed_while_it_is_opened_again_leaves_no_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, options = bench.device, bench.device._spec.options
    monkeypatch.setattr(worker_device, "RESTART_S", 0.0)
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
@pytest.mark.extended
def test_worker_that_cannot_open_the_device_is_an_error_and_leaves_nothing(bench: Bench, name: str) -> None:
    before = descriptors(os.getpid())
    with pytest.raises((UnavailableError, InternalError)):
        open_with(bench, name)
    eventually(lambda: descriptors(os.getpid()) <= before)
    assert children() == {bench.device.pid}


class NoThread(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def _fails(error: Exception, works: int = 0) -> Callable[..., Any]:
    """What fails after it has worked so often."""
    left, pair = iter(range(works)), socket.socketpair

    def call(*args: Any, **_: Any) -> Any:
        if next(left, None) is None:
            raise error
        return pair(*args)

    return call


@pytest.mark.parametrize(
    ("what", "failing"),
    [
        ("threading.Thread", NoThread),
        ("subprocess.Popen", _fails(OSError(errno.EAGAIN, "no process"))),
        ("subprocess.Popen", _fails(ValueError("embedded null byte"))),
        ("socket.socketpair", _fails(OSError(errno.EMFILE, "no descriptor"))),
        ("socket.socketpair", _fails(OSError(errno.EMFILE, "no descriptor"), works=1)),
        ("Area", _fails(OSError(errno.EMFILE, "no descriptor"))),
    ],
    ids=["thread", "process", "command", "socket", "second-socket", "area"],
)
def test_a_process_that_cannot_be_started_is_told_and_leaves_nothing(
    what: str, failing: Any, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, spec, before = bench.device.info, bench.device._spec, descriptors(os.getpid())
    with monkeypatch.context() as patch, pytest.raises(UnavailableError) as caught:
        patch.setattr(f"tilewright_server.devices.worker.process.{what}", failing)
        WorkerDevice(info, spec)
    assert (caught.value.rule, caught.value.retry_after_s) == ("device_worker", 1.0)
    eventually(lambda: descriptors(os.getpid()) <= before)
    WorkerDevice(info, spec).close()


def test_closing_leaves_no_process_thread_or_descriptor(bench: Bench) -> None:
    before, threads = descriptors(os.getpid()), threading.active_count()
    device = WorkerDevice(bench.device.info, bench.device._spec)
    device.allocate(100)
    pid = device.pid
    device.close()
    device.close()
    assert not Path(f"/proc/{pid}").exists()
    eventually(lambda: descriptors(os.getpid()) <= before and threading.active_count() <= threads)


def test_closing_does_not_wait_for_ever_for_a_kernel(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright_server.devices.worker.process.END_S", 0.2)
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
    monkeypatch.setattr("tilewright_server.devices.worker.process.ANSWER_S", 0.5)
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
from worker_harness import describe_and_open
device = describe_and_open(sys.argv[1])
print(device.pid, flush=True)
time.sleep(60)
"""
    runtime = bench.device._spec.options["runtime"]
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{script}", runtime],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
        parent.wait()
        eventually(lambda: not is_running(pid))


def test_signals_to_the_group_leave_the_end_to_the_server(bench: Bench) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(bench.device.pid, number)
    time.sleep(0.1)
    bench.check_that_it_adds()
    assert bench.losses == []
