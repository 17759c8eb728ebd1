"""The main job over the local socket: real products, launched by packets of sixteen bytes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemm_setting import COMMAND, SIDE, STEP, Setting, worker_of
from local_harness import (
    ATTACH,
    BIND,
    CALL,
    LAUNCH,
    OPEN_EVENT,
    REGISTER,
    REPLY,
    TIME,
    UNBIND,
    UNREGISTER,
    bind_request,
    expect,
    launches,
)
from rpc_harness import MemoryFile, ServerProcess, eventually, floats, in_buffer, in_region, refused

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp


@pytest.fixture(scope="module", params=["off", "on"], ids=["in the server", "in a process of its own"])
def isolated(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "on")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path, isolated: bool) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("gemm")
    with ServerProcess(folder, COMMAND, cache_dir=kernel_cache, cpu_isolated=isolated, cpu_threads=2) as process:
        assert process.ready, process.log()
        yield process
        assert process.stop() == 0, process.log()
        assert "Traceback" not in process.log(), process.log()


@pytest.fixture
def setting(server: ServerProcess, isolated: bool) -> Iterator[Setting]:
    made = Setting(server, isolated)
    yield made
    made.close()


@pytest.mark.extended
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
