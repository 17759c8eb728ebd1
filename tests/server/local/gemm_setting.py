"""A product that is prepared over the local socket: matrices in shared memory, a plan, and connections."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import numpy as np
from local_harness import (
    ATTACH,
    BIND,
    REGISTER,
    Wire,
    bind_request,
)
from rpc_harness import Client, MemoryFile, ServerProcess, floats, in_region

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

COMMAND = [sys.executable, str(Path(__file__).parents[1] / "app" / "operation_server.py"), "gemm"]
SIDE = 64
STEP = SIDE * SIDE * 4


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


def worker_of(server: ServerProcess) -> int:
    """Process id of the device's worker."""
    found: list[str] = []
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # threads come and go
            found += (task / "children").read_text().split()
    return int(next(pid for pid in found if b"devices.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()))
