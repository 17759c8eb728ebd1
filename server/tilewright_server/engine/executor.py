"""Admission to a device: who runs now, who waits, who is turned away.

The caller's own thread runs its launches as soon as it is admitted: handing them to another thread would cost more than
a small kernel takes. Admission is by weight, first come, first served: the teams of all executions that run at the same
time never have more threads than the device has cores.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from tilewright_kit.device import Device
from tilewright_kit.errors import ResourceExhaustedError, TilewrightError, UnavailableError
from tilewright_server.engine.arena import Arena
from tilewright_server.engine.call import Call
from tilewright_server.engine.prepared import Prepared
from tilewright_server.engine.statistics import Statistics
from tilewright_server.engine.types import Outcome

__all__ = ["Execution", "Executor"]

Execution = tuple[Prepared, Sequence[int], int]
"""A plan, the addresses of its operands, and how often to run it."""


class _Waiter:
    __slots__ = ("granted", "weight", "woken")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.granted = False
        self.woken = threading.Event()


class Executor:
    """Runs prepared plans on one device. Thread-safe."""

    def __init__(self, device: Device, lanes: int, arena: Arena, statistics: Statistics, queue_limit: int) -> None:
        """``lanes`` is the sum of the weights that may run at a time."""
        self.device = device
        self.lanes = lanes
        self._arena = arena
        self._statistics = statistics
        self._limit = queue_limit
        self._free = lanes
        self._waiting: deque[_Waiter] = deque()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._draining = False
        self._mean_ns = 100_000.0

    @property
    def queue_depth(self) -> int:
        """Executions that wait."""
        return len(self._waiting)

    @property
    def workspace_bytes(self) -> int:
        return self._arena.reserved_bytes

    def run(self, prepared: Prepared, addresses: Sequence[int], call: Call, repeat: int = 1) -> Outcome:
        """See ``Engine.execute``."""
        prepared.check(addresses)
        call.check()
        weight = min(prepared.weight, self.lanes)
        queue_ns = self._enter(weight, call)
        try:
            return self._launch(prepared, addresses, repeat, queue_ns)
        finally:
            self._leave(weight)

    def run_many(self, executions: Sequence[Execution], call: Call) -> list[Outcome | TilewrightError]:
        """See ``Engine.execute_many``: one admission for all, the deadline looked at before each."""
        call.check()
        weight = min(max((prepared.weight for prepared, _, _ in executions), default=1), self.lanes)
        queue_ns = self._enter(weight, call)
        try:
            # All of them waited once, together.
            return [
                self._tried(execution, call, 0 if place else queue_ns) for place, execution in enumerate(executions)
            ]
        finally:
            self._leave(weight)

    def _tried(self, execution: Execution, call: Call, queue_ns: int) -> Outcome | TilewrightError:
        prepared, addresses, repeat = execution
        try:
            call.check()
            prepared.check(addresses)
            return self._launch(prepared, addresses, repeat, queue_ns)
        except TilewrightError as error:
            return error

    def refuse(self) -> None:
        """Turn newcomers away from now on."""
        with self._lock:
            self._draining = True

    def drain(self, deadline: float | None) -> bool:
        """Refuse newcomers; wait until nobody runs or waits. False if the deadline (monotonic) came first."""
        with self._lock:
            self._draining = True
            while self._free < self.lanes or self._waiting:
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                self._idle.wait(None if deadline is None else deadline - time.monotonic())
        return True

    def close(self) -> None:
        self._arena.close()

    def _launch(self, prepared: Prepared, addresses: Sequence[int], repeat: int, queue_ns: int) -> Outcome:
        program = prepared.program
        if program is None:
            return Outcome()
        arena = self._arena
        workspace = arena.take(prepared.workspace_bytes)
        try:
            times = program.run(addresses, workspace.address, repeat)
        finally:
            arena.give_back(workspace)
        self._statistics.executed(
            prepared.operation_counters, prepared.kernel_counters, times, max(1, repeat), queue_ns
        )
        device_ns = sum(times)
        # Only a hint for those who are turned away, so a lost update does not matter.
        self._mean_ns += 0.05 * (device_ns - self._mean_ns)
        return Outcome(device_ns, queue_ns, times)

    def _enter(self, weight: int, call: Call) -> int:
        """Wait for admission; returns the time spent waiting in nanoseconds."""
        with self._lock:
            if self._draining:
                raise UnavailableError("the server is shutting down", rule="shutdown", fix="use another server")
            if self._free >= weight and not self._waiting:
                self._free -= weight
                return 0
            if len(self._waiting) >= self._limit:
                raise self._full()
            waiter = _Waiter(weight)
            self._waiting.append(waiter)
        begin = time.perf_counter_ns()
        self._wait(waiter, call)
        return time.perf_counter_ns() - begin

    def _wait(self, waiter: _Waiter, call: Call) -> None:
        forget = call.on_cancel(waiter.woken.set)
        try:
            while not waiter.granted:
                call.check()
                waiter.woken.wait(call.remaining())
            call.check()
        except TilewrightError:
            self._withdraw(waiter)
            raise
        finally:
            forget()

    def _withdraw(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter.granted:
                self._free += waiter.weight
            else:
                self._waiting.remove(waiter)
            self._admit()

    def _leave(self, weight: int) -> None:
        with self._lock:
            self._free += weight
            if self._waiting or self._draining:
                self._admit()

    def _admit(self) -> None:
        """Admit from the head of the queue.

        A large team at the head holds up smaller ones behind it, or it would wait for ever. Lock held.
        """
        while self._waiting and self._waiting[0].weight <= self._free:
            waiter = self._waiting.popleft()
            self._free -= waiter.weight
            waiter.granted = True
            waiter.woken.set()
        if self._draining and self._free == self.lanes and not self._waiting:
            self._idle.notify_all()

    def _full(self) -> ResourceExhaustedError:
        seconds = (len(self._waiting) + 1) * self._mean_ns * 1e-9
        return ResourceExhaustedError(
            f"{self._limit} executions wait for this device already",
            field="device",
            value=self.device.info.id,
            rule="queue_full",
            fix="try again later, send less at a time, or raise the server's queue limit",
            retry_after_s=min(5.0, max(0.005, seconds)),
        )
