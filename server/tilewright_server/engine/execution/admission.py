"""Admission to a device: which execution runs now, which waits and for how long, which is turned away."""

from __future__ import annotations

import threading
import time
from collections import deque

from tilewright_kit.types.errors import ResourceExhaustedError, TilewrightError, UnavailableError
from tilewright_server.engine.call import Call

__all__ = ["Admission"]


class _Waiter:
    __slots__ = ("granted", "weight", "woken")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.granted = False
        self.woken = threading.Event()


class Admission:
    """A bounded queue in front of ``lanes`` lanes, first come first served. Thread-safe."""

    def __init__(self, device_id: str, lanes: int, queue_limit: int) -> None:
        """``lanes`` is the sum of the weights that may run at a time; ``queue_limit`` bounds those that wait."""
        self.lanes = lanes
        self.mean_ns = 100_000.0
        """Mean device time of an execution in nanoseconds: a hint for those who are turned away."""
        self._device_id = device_id
        self._limit = queue_limit
        self._free = lanes
        self._waiting: deque[_Waiter] = deque()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._draining = False

    @property
    def queue_depth(self) -> int:
        """Executions that wait."""
        return len(self._waiting)

    def enter(self, weight: int, call: Call) -> int:
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
        return self._wait(waiter, call)

    def swap(self, weight: int, call: Call) -> int:
        """Leave, and enter again behind those who wait, as one step: work that has begun is not turned away."""
        with self._lock:
            if not self._waiting:
                return 0
            waiter = _Waiter(weight)
            self._waiting.append(waiter)
            self._free += weight
            self._admit()
        return self._wait(waiter, call)

    def leave(self, weight: int) -> None:
        with self._lock:
            self._free += weight
            if self._waiting or self._draining:
                self._admit()

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

    def _wait(self, waiter: _Waiter, call: Call) -> int:
        begin = time.perf_counter_ns()
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
        return time.perf_counter_ns() - begin

    def _withdraw(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter.granted:
                self._free += waiter.weight
            else:
                self._waiting.remove(waiter)
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
        seconds = (len(self._waiting) + 1) * self.mean_ns * 1e-9
        return ResourceExhaustedError(
            f"{self._limit} executions wait for this device already",
            field="device",
            value=self._device_id,
            rule="queue_full",
            fix="try again later, send less at a time, or raise the server's queue limit",
            retry_after_s=min(5.0, max(0.005, seconds)),
        )
