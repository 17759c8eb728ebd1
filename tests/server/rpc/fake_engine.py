"""An engine without compilers: the operation ``copy`` copies its input ``x`` to its output ``y``.

For tests of everything around the engine.

Run as a script, it is a server of this engine, with settings from the environment.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tilewright_kit.contract.device import Buffer, DeviceInfo
from tilewright_kit.contract.problem import Operand, OperationRequest, Role
from tilewright_kit.types.errors import (
    DeviceError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    TilewrightError,
    UnavailableError,
)
from tilewright_server.engine.call import Call, WouldWaitError
from tilewright_server.engine.kernels.names import Catalogs
from tilewright_server.engine.types import Outcome, Selection
from tilewright_server.memory.shm import view

BEGUN = 0xBE
"""What launches that take their time put into the first byte of their output as they begin. Those that are ``held``
end when another byte is there."""
HELD_S = 120
"""The longest time for which a launch is held."""


class FakeDevice:
    """Host memory; ``kind`` may be one that does not share the host's addresses, to see that everything is staged."""

    def __init__(self, kind: str = "cpu") -> None:
        self.info: Any = SimpleNamespace(
            id=f"{kind}:0", kind=kind, name=kind, attributes={}, arch=SimpleNamespace(name="none")
        )
        self.live: dict[int, Any] = {}

    def allocate(self, nbytes: int) -> Buffer:
        if nbytes > 1 << 40:
            raise ResourceExhaustedError("no such memory", retry_after_s=0.5)
        block = ctypes.create_string_buffer(nbytes + 256)
        address = (ctypes.addressof(block) + 255) & ~255
        self.live[address] = block
        return Buffer(address, nbytes, block)

    def free(self, buffer: Buffer) -> None:
        del self.live[buffer.address]

    def write(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        assert 0 <= offset <= buffer.nbytes - len(data)
        view(buffer.address + offset, len(data))[:] = data

    def read(self, buffer: Buffer, offset: int, into: memoryview) -> None:
        assert 0 <= offset <= buffer.nbytes - len(into)
        into[:] = view(buffer.address + offset, len(into))


@dataclass(frozen=True)
class FakePrepared:
    operands: tuple[Operand, ...]
    seconds: float
    held: bool
    device: DeviceInfo
    kernels: tuple[str, ...] = ("copy_kernel",)
    notes: tuple[str, ...] = ()
    workspace_bytes: int = 0
    is_fallback: bool = False
    partial: frozenset[str] = frozenset()
    nbytes: int = 1000
    plan: Any = field(default_factory=lambda: SimpleNamespace(flops=0, to_dict=dict, operation="copy"))
    problem: Any = None
    program: Any = None
    values: Any = None
    successor: Any = None
    lost: bool = False

    @property
    def current(self) -> FakePrepared:
        return self if self.successor is None else self.successor.current

    def check(self, addresses: Sequence[int]) -> None:
        assert len(addresses) == len(self.operands)


class FakeEngine:
    def __init__(self, device: FakeDevice | None = None, queue_limit: int = 1024) -> None:
        self.kernels: Any = None
        self.catalogs = Catalogs({}, {})
        self.copied = 0
        self.statistics: Any = SimpleNamespace(copied=self._count)
        self.operations: Any = {"copy": None}
        self.plugins: Any = SimpleNamespace(finish=lambda: None)
        self.strategies: Any = {}
        self.device = device or FakeDevice()
        self.devices: Any = SimpleNamespace(
            default=self.device.info.id, get=self._device, infos=lambda: (self.device.info,), opened=dict
        )
        self._running = threading.BoundedSemaphore(1)
        self._room = threading.BoundedSemaphore(queue_limit)
        self._draining = False
        self._active = 0
        self._idle = threading.Condition()

    def _count(self, _: str, nbytes: int, *times: int) -> None:
        self.copied += nbytes

    def _device(self, name: str = "", timeout: float | None = None) -> FakeDevice:
        if name not in ("", self.device.info.id):
            raise NotFoundError("no such device", field="device", value=name)
        return self.device

    def remeasured(self) -> bool:
        return False

    def plan(self, request: OperationRequest, selection: Selection, call: Call) -> Any:
        if request.operation != "copy":
            raise NotFoundError("no such operation", field="operation", value=request.operation)
        if set(request.inputs) != {"x"} or not set(request.outputs) <= {"y"}:
            raise InvalidArgumentError("copy takes x and gives y", field="inputs")
        x = request.inputs["x"]
        y = request.outputs.get("y", x)
        if (y.dtype, y.shape) != (x.dtype, x.shape):
            raise InvalidArgumentError("y must be like x", field="y")
        seconds, held = (float(request.attributes.get(name, 0.0)) for name in ("seconds", "held"))  # type: ignore[arg-type]
        operands = (Operand("x", x, Role.INPUT), Operand("y", y, Role.OUTPUT))
        return FakePrepared(operands, seconds, bool(held), self.device.info)

    def current(self, prepared: Any, call: Call) -> Any:
        return prepared

    def execute(self, prepared: Any, addresses: Sequence[int], call: Call, repeat: int = 1) -> Outcome:
        if self._draining:
            raise UnavailableError("draining")
        if not self._room.acquire(blocking=False):
            raise ResourceExhaustedError("the queue is full", rule="queue_full", retry_after_s=0.05)
        with self._idle:
            self._active += 1
        try:
            if not self._running.acquire(blocking=False):
                if not call.patient:
                    raise WouldWaitError
                if not self._running.acquire(timeout=call.remaining()):
                    call.check()
                    raise DeviceError("a deadline that has passed is to be told")
            try:
                call.check()
                return self._copy(prepared, addresses)
            finally:
                self._running.release()
        finally:
            self._room.release()
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    def _copy(self, prepared: Any, addresses: Sequence[int]) -> Outcome:
        x, y = prepared.operands
        begun = time.monotonic_ns()
        if (prepared.seconds or prepared.held) and y.desc.size:
            ctypes.memset(addresses[1], BEGUN, 1)
        if prepared.seconds:
            time.sleep(prepared.seconds)
        while prepared.held and ctypes.string_at(addresses[1], 1)[0] == BEGUN:
            if time.monotonic_ns() > begun + HELD_S * 1e9:
                raise DeviceError("nobody let this launch end")
            time.sleep(0.001)
        if x.desc.size == 0:
            return Outcome(0)
        size = x.desc.dtype.bytes
        if x.desc.is_contiguous and y.desc.is_contiguous:
            ctypes.memmove(addresses[1], addresses[0], x.desc.nbytes)
            return Outcome(max(1, int(prepared.seconds * 1e9), prepared.held * (time.monotonic_ns() - begun)))
        for index in _indices(x.desc.shape):
            source = sum(i * s for i, s in zip(index, x.desc.strides, strict=True)) * size
            target = sum(i * s for i, s in zip(index, y.desc.strides, strict=True)) * size
            ctypes.memmove(addresses[1] + target, addresses[0] + source, size)
        return Outcome(1)

    def execute_many(self, executions: Sequence[Any], call: Call) -> list[Outcome | TilewrightError]:
        results: list[Outcome | TilewrightError] = []
        for prepared, addresses, repeat in executions:
            results.append(self.execute(prepared, addresses, call, repeat))
        return results

    def drain(self, timeout: float | None) -> bool:
        self._draining = True
        with self._idle:
            return self._idle.wait_for(lambda: self._active == 0, timeout)

    def close(self) -> None:
        pass


def _indices(shape: tuple[int, ...]) -> Any:
    import itertools

    return itertools.product(*(range(size) for size in shape))


def application() -> Any:
    """The class of servers of this engine."""
    from tilewright_server.app import Application

    class FakeApplication(Application):
        def make_engine(self, plugins: Any) -> Any:
            return FakeEngine(queue_limit=self.settings.queue_limit)

        def load_plugins(self) -> Any:
            return SimpleNamespace(startup=lambda _: (), shutdown=lambda _: (), failures=[], loaded=[])

    return FakeApplication


def main() -> int:
    from tilewright_server import settings

    return int(application()(settings.load()).run())


if __name__ == "__main__":
    sys.exit(main())
