"""An executor over a fake device, with programs that take as long as the test wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vector_operation import VectorConfig, VectorOperation, VectorProblem, request

import tilewright_arch
from tilewright_kit.contract.device import Buffer, DeviceInfo
from tilewright_server.engine.call import Call
from tilewright_server.engine.execution.executor import Executor
from tilewright_server.engine.execution.prepared import Prepared
from tilewright_server.engine.execution.workspace_arena import Arena
from tilewright_server.engine.statistics import Statistics
from tilewright_server.engine.types import Outcome

LANES = 4
ADDRESSES = [1 << 20, 2 << 20, 3 << 20]
INFO = DeviceInfo("cpu:0", "cpu", "fake", tilewright_arch.load("x86-64-v2"), LANES, 1 << 40)


class FakeDevice:
    """Memory that is only counted."""

    info = INFO

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.allocations = 0

    def allocate(self, nbytes: int) -> Buffer:
        self.allocations += 1
        address = 1 << 30 | self.allocations << 12
        self.live[address] = nbytes
        return Buffer(address, nbytes)

    def free(self, buffer: Buffer) -> None:
        del self.live[buffer.address]


class FakeProgram:
    """Runs until it is let go, and notes who ran beside it."""

    running = 0
    most = 0
    order: list[str] = []  # noqa: RUF012
    _lock = threading.Lock()

    def __init__(self, name: str, weight: int, gate: threading.Event | None = None) -> None:
        self.name, self.weight, self.gate = name, weight, gate
        self.started = threading.Event()
        self.fail: Exception | None = None
        self.workspaces: list[int] = []

    def run(self, addresses: Sequence[int], workspace: int, repeat: int = 1) -> tuple[int, ...]:
        cls = FakeProgram
        self.workspaces.append(workspace)
        with self._lock:
            cls.running += self.weight
            cls.most = max(cls.most, cls.running)
            cls.order.append(self.name)
        self.started.set()
        try:
            if self.fail is not None:
                raise self.fail
            if self.gate is not None:
                assert self.gate.wait(20)
        finally:
            with self._lock:
                cls.running -= self.weight
        return (1000 * repeat,)


class SlowProgram(FakeProgram):
    """Takes its time for each repeat, and counts them."""

    seconds = 0.001
    done = 0

    def run(self, addresses: Sequence[int], workspace: int, repeat: int = 1) -> tuple[int, ...]:
        super().run(addresses, workspace, repeat)
        time.sleep(self.seconds * repeat)
        self.done += repeat
        return (1000 * repeat,)


Make = Callable[..., Prepared]


class Bench:
    """An executor with a fake device under it."""

    def __init__(self, queue_limit: int = 100, workspace: int = 1 << 30) -> None:
        FakeProgram.running = FakeProgram.most = 0
        FakeProgram.order = []
        self.device = FakeDevice()
        self.statistics = Statistics()
        self.arena = Arena(self.device, workspace)  # type: ignore[arg-type]
        self.executor = Executor(self.device, LANES, self.arena, self.statistics, queue_limit)  # type: ignore[arg-type]
        self.threads = ThreadPoolExecutor(32)

    def prepare(self, name: str, weight: int = 1, gate: threading.Event | None = None, workspace: int = 0) -> Prepared:
        operation = VectorOperation()
        problem: VectorProblem = operation.parse(request(10))
        plan = operation.plan(problem, VectorConfig(stages=2 if workspace else 1), INFO)
        prepared = Prepared(
            problem,
            plan,
            INFO,
            program=FakeProgram(name, weight, gate),
            executor=self.executor,
            operation_counters=self.statistics.operation("vector"),
            kernel_counters=[self.statistics.kernel(name)],
        )
        prepared.workspace_bytes = workspace
        return prepared

    def start(self, prepared: Prepared, call: Call | None = None) -> Future[Outcome]:
        """Run in another thread, and return when it runs or waits."""
        depth = self.executor.queue_depth
        program: Any = prepared.program
        program.started.clear()
        future = self.threads.submit(self.executor.run, prepared, ADDRESSES, call or Call.within(20))
        for _ in range(2000):
            if program.started.is_set() or self.executor.queue_depth > depth or future.done():
                break
            time.sleep(0.001)
        return future


# Long work makes way, and ends when nobody wants it any more


def slow(bench: Bench, name: str = "slow", weight: int = LANES) -> tuple[Prepared, SlowProgram]:
    prepared = bench.prepare(name)
    program = SlowProgram(name, weight)
    prepared.program, prepared.weight = program, weight
    return prepared, program
