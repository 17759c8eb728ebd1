"""A device in a process of its own, its losses, what tests launch on it, and the other end of a connection."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tilewright_kit.contract.device import Buffer
from tilewright_kit.contract.plan import I64, Geometry, Pointer, Struct, pack
from tilewright_kit.contract.source import SourceUnit
from tilewright_proto.v1 import error_pb2
from tilewright_server.devices.contract import (
    ProgramStage,
    WorkerSpec,
)
from tilewright_server.devices.registry import DeviceRegistry
from tilewright_server.devices.worker.device import WorkerDevice, WorkerProgram
from tilewright_server.devices.worker.process import Loss
from tilewright_server.protocol.frames import HEADER, HEADER_BYTES, Kind

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


def open_with(bench: Bench, name: str) -> WorkerDevice:
    spec = WorkerSpec(f"hosted_devices:{name}", bench.device._spec.options)
    return WorkerDevice(bench.device.info, spec, bench.losses.append)


def eventually(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


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


def bind_add(client: Client, binding: int = 7) -> Buffer:
    """``out += 1``; returns out."""
    bench = client.bench
    ones, out = bench.put(np.ones(N, np.float32)), bench.put(np.zeros(N, np.float32))
    bench.device.bind(client.number, binding, bench.add(), [ones.address, out.address, out.address], 0)
    return out


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


def describe_and_open(runtime: str) -> WorkerDevice:
    from tilewright_server.devices.cpu.isolated import CPU_FACTORY
    from tilewright_server.devices.cpu.provider import CpuProvider

    (info,) = CpuProvider().discover()
    return WorkerDevice(info, WorkerSpec(CPU_FACTORY, {"runtime": runtime}))
