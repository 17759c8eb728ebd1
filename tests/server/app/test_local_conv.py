"""Convolutions over the local socket: settled once, then launched by packets of sixteen bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import conv_messages as cm
import numpy as np
import pytest
from local_harness import ATTACH, REGISTER, REPLY, TIME, Wire, launches
from rpc_harness import Client, MemoryFile, ServerProcess, in_region

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import memory_pb2 as mp

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, str(Path(__file__).with_name("operation_server.py")), "grouped_conv"]
X, W, Y = (2, 8, 9, 7), (12, 4, 3, 3), (2, 12, 5, 4)
WORDS: dict[str, Any] = {"padding": 1, "stride": 2, "groups": 2}
CALLS: dict[str, Any] = {
    "conv": (("x", "w"), "y", {}),
    "conv_backward_data": (("dy", "w"), "dx", {"input_size": X[2:]}),
    "conv_backward_weight": (("x", "dy"), "dw", {"filter_size": W[2:]}),
}
SHAPES = {"x": X, "w": W, "dy": Y, "y": Y, "dx": X, "dw": W}
PAGE = 4096


@pytest.fixture(scope="module", params=["off", "on"], ids=["in the server", "in a process of its own"])
def isolated(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "on")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path, isolated: bool) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("conv")
    with ServerProcess(folder, COMMAND, cache_dir=kernel_cache, cpu_isolated=isolated, cpu_threads=2) as process:
        assert process.ready, process.log()
        yield process
        assert process.stop() == 0, process.log()
        assert "Traceback" not in process.log(), process.log()


class ConvSetting:
    """Tensors in one file that is registered with the device, and connections."""

    def __init__(self, server: ServerProcess, isolated: bool) -> None:
        self.isolated = isolated
        self.client = Client(server.addresses[0])
        self.control = self.connect()
        self.file = MemoryFile(PAGE * 8 * len(SHAPES))
        random = np.random.default_rng(5)
        self.arrays: dict[str, Any] = {}
        self.offsets: dict[str, int] = {}
        for place, (name, shape) in enumerate(SHAPES.items()):
            values = np.frombuffer(self.file.bytes, np.float32, prod(shape), place * 8 * PAGE)
            values[:] = random.standard_normal(len(values), np.float32)
            self.arrays[name] = cm.placed(values, shape)
            self.offsets[name] = place * 8 * PAGE
        source: dict[str, Any] = {"device_fd": {"device_uuid": "cpu"}} if isolated else {"attached": {}}
        request = mp.RegisterRegionRequest(**source, bytes=self.file.nbytes)
        reply = self.control.call(REGISTER, request, [self.file.fd])
        assert reply.error is None, reply.error
        self.region = reply.value

    def connect(self) -> Wire:
        return Wire(self.client.opened.local_socket, self.client.token, timeout=60)

    def lane(self) -> Wire:
        """A connection for launches."""
        wire = self.connect()
        if self.isolated:
            assert wire.ask(ATTACH, payload=b"cpu:0").error is None
        return wire

    def bind(self, operation: str, *, accumulate: bool = False) -> int:
        inputs, output, words = CALLS[operation]
        operands = [cm.operand(name, cm.spec(*SHAPES[name])) for name in inputs]
        target = cm.operand(output, cm.spec(*SHAPES[output]))
        words = WORDS | words | ({"accumulate": True} if accumulate else {})
        if accumulate:
            operands.append(cm.operand("acc", target.spec))
        plan = self.client.dispatch.Plan(
            dp.PlanRequest(
                session=self.client.token, operation=operation, inputs=operands, outputs=[target],
                attributes=cm.attributes(**words),
            )
        )  # fmt: skip
        names = [output if item.name == "acc" else item.name for item in (*plan.inputs, *plan.outputs)]
        return self.control.bind(plan.plan, *(in_region(self.region, self.offsets[name]) for name in names))

    def truth(self, operation: str) -> Any:
        inputs, _, words = CALLS[operation]
        return cm.truth(operation, {name: self.arrays[name] for name in inputs}, **WORDS, **words)

    def close(self) -> None:
        self.arrays.clear()
        self.control.close()
        self.client.close()
        self.file.close()


@pytest.fixture
def setting(server: ServerProcess, isolated: bool) -> Iterator[ConvSetting]:
    made = ConvSetting(server, isolated)
    yield made
    made.close()


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.extended
def test_launches_compute_what_is_in_memory_at_that_moment(setting: ConvSetting, operation: str) -> None:
    binding = setting.bind(operation)
    inputs, output, _ = CALLS[operation]
    with setting.lane() as lane:
        for number in range(200):
            if number % 50 == 0:
                setting.arrays[inputs[number // 50 % 2]][...] *= -1.25
                setting.arrays[output][...] = np.nan
            reply = lane.launch(binding, TIME)
            assert reply.error is None, reply.error
            assert reply.value > 0
            if number % 50 == 0:
                np.testing.assert_allclose(setting.arrays[output], setting.truth(operation), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("operation", ["conv_backward_data", "conv_backward_weight"])
@pytest.mark.some(2)
def test_every_launch_adds_to_a_gradient_once(setting: ConvSetting, operation: str) -> None:
    output = CALLS[operation][1]
    for array in setting.arrays.values():
        array[...] = np.rint(2 * array)  # small whole numbers: sums are exact in any order
    old, once = setting.arrays[output].copy(), setting.truth(operation)
    binding = setting.bind(operation, accumulate=True)
    with setting.lane() as lane:
        lane.send(launches(*[binding] * 20) + launches(binding, flags=REPLY))
        reply = lane.receive()
        assert reply is not None
        assert reply.flags == 0
    np.testing.assert_array_equal(setting.arrays[output], old + 21 * once)


@pytest.mark.some(1)
def test_a_step_of_training_is_three_launches_in_one_packet(setting: ConvSetting) -> None:
    bindings = [setting.bind(operation) for operation in CALLS]
    for _, output, _ in CALLS.values():
        setting.arrays[output][...] = np.nan
    with setting.lane() as lane:
        lane.send(launches(*bindings[:2]) + launches(bindings[2], flags=REPLY))
        assert lane.receive() is not None
    for operation, (_, output, _) in CALLS.items():
        np.testing.assert_allclose(setting.arrays[output], setting.truth(operation), rtol=1e-4, atol=1e-3)
