"""Connections for launches that are many, that die, that tell nonsense or that are open when the server stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gemm_setting import COMMAND, STEP, Setting, worker_of
from local_harness import (
    HEADER,
    LAUNCH,
    REGISTER,
    TIME,
    UNBIND,
    UNREGISTER,
    descriptors,
    expect,
    launches,
)
from rpc_harness import Client, ServerProcess, eventually, in_region

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import memory_pb2 as mp

# Death and disorder, with the device in a process of its own


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("apart")
    with ServerProcess(folder, COMMAND, cache_dir=kernel_cache, cpu_isolated=True, cpu_threads=1) as process:
        assert process.ready, process.log()
        yield process
        assert process.stop() == 0, process.log()
        assert "Traceback" not in process.log(), process.log()


def mapped(pid: int) -> int:
    """How many memory files of clients a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:tilewright-")


@pytest.mark.extended
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
    assert eventually(lambda: mapped(worker) == 0)
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


def test_a_server_stops_with_lanes_open(tmp_path: Path, kernel_cache: Path) -> None:
    with ServerProcess(tmp_path, COMMAND, cache_dir=kernel_cache, cpu_isolated=True, cpu_threads=1) as server:
        setting = Setting(server, isolated=True)
        binding = setting.bind()
        with setting.lane() as lane:
            assert lane.launch(binding).error is None
            server.signal()
            assert lane.is_closed()
            assert server.wait() == 0, server.log()
        assert "Traceback" not in server.log(), server.log()
        setting.close()
