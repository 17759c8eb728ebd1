"""Admission to a device: which execution runs now, which waits and for how long, which is turned away. The order is
that of ``clients.fair_queue``, which calls and compilations have in common.
"""

from __future__ import annotations

import threading
import time

from tilewright_kit.types.errors import ResourceExhaustedError, TilewrightError, UnavailableError
from tilewright_server.clients.fair_queue import FairQueue, Place, is_full
from tilewright_server.engine.call import Call, WouldWaitError

__all__ = ["Admission", "Waiter"]

_LEAST_NS = 1000
"""Charged for an execution at least, or those that fail at once would be free."""


class Waiter:
    """Execution that had to wait. ``queue_ns``: for how long."""

    __slots__ = ("granted", "place", "queue_ns", "weight", "woken")

    place: Place[Waiter]

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.granted = False
        self.woken = threading.Event()
        self.queue_ns = 0


class Admission:
    """A bounded, fair queue in front of ``lanes`` lanes, see ``FairQueue``. Thread-safe.

    Clients are charged with the device time of what ran, times its lanes. As long as nobody waits, nothing is counted.
    """

    def __init__(self, device_id: str, lanes: int, queue_limit: int) -> None:
        """``lanes`` is the sum of the weights that may run at a time; ``queue_limit`` bounds those that wait, of which
        one process has at most half."""
        self.lanes = lanes
        self.mean_ns = 100_000.0
        """Mean device time of an execution in nanoseconds: a hint for those who are turned away, and what is charged
        in advance."""
        self._device_id = device_id
        self._limit = queue_limit
        self._free = lanes
        self._queue: FairQueue[Waiter] = FairQueue()
        self._waiting = 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._draining = False

    @property
    def queue_depth(self) -> int:
        """Executions that wait."""
        return self._waiting

    def enter(self, weight: int, call: Call) -> Waiter | None:
        """Wait for admission; returns who waited, none if there was no need."""
        with self._lock:
            if self._draining:
                raise UnavailableError("the server is shutting down", rule="shutdown", fix="use another server")
            if self._free >= weight and not self._waiting:
                self._free -= weight
                return None
            if not call.patient:
                raise WouldWaitError
            of_principal, of_process = self._queue.waiting_of(call.client)
            if is_full(self._limit, self._waiting, of_principal, of_process):
                raise self._full(of_principal, of_process)
            waiter = self._line_up(weight, call)
        self._wait(waiter, call)
        return waiter

    def swap(self, weight: int, call: Call, waiter: Waiter | None, spent_ns: int) -> Waiter | None:
        """Leave after ``spent_ns``, and enter again in turn with those who wait, as one step: work that has begun is
        not turned away. If this raises, the caller has left."""
        with self._lock:
            if not self._waiting:
                return waiter
            again = self._line_up(weight, call)
            self._leave(weight, call, spent_ns, waiter)
        self._wait(again, call)
        return again

    def leave(self, weight: int, call: Call, spent_ns: int, waiter: Waiter | None) -> None:
        """End what ``enter`` or ``swap`` admitted, as ``waiter``, and what took ``spent_ns`` of device time."""
        with self._lock:
            if self._waiting or waiter is not None or self._draining:
                self._leave(weight, call, spent_ns, waiter)
            else:
                self._free += weight

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

    def _wait(self, waiter: Waiter, call: Call) -> None:
        begin = time.perf_counter_ns()
        forget = call.on_cancel(waiter.woken.set)
        try:
            while not waiter.granted:
                call.check()
                waiter.woken.wait(call.remaining())
            call.check()
        except TilewrightError:
            self._withdraw(waiter, call)
            raise
        finally:
            forget()
        waiter.queue_ns = time.perf_counter_ns() - begin

    def _withdraw(self, waiter: Waiter, call: Call) -> None:
        with self._lock:
            if waiter.granted:
                self._leave(waiter.weight, call, 0, waiter)
                return
            self._queue.remove(waiter.place)
            self._waiting -= 1
            self._admit()

    # Lock held

    def _line_up(self, weight: int, call: Call) -> Waiter:
        waiter = Waiter(weight)
        waiter.place = self._queue.push(waiter, call.client)
        self._waiting += 1
        return waiter

    def _leave(self, weight: int, call: Call, spent_ns: int, waiter: Waiter | None) -> None:
        self._free += weight
        spent = max(_LEAST_NS, spent_ns) * weight
        if waiter is not None:
            self._queue.give_back(waiter.place, spent)
        elif self._waiting:
            self._queue.charge(call.client, spent)
        self._admit()

    def _admit(self) -> None:
        """Admit those whose turn it is.

        A large team whose turn it is holds up smaller ones, or it would wait for ever; what it is charged for all of
        its lanes makes up for that.
        """
        while self._waiting:
            place = self._queue.first()
            if place is None or place.item.weight > self._free:
                return
            waiter = place.item
            self._queue.take(place, int(self.mean_ns) * waiter.weight)
            self._waiting -= 1
            self._free -= waiter.weight
            waiter.granted = True
            waiter.woken.set()
        if self._free == self.lanes:
            self._queue.forget()
            if self._draining:
                self._idle.notify_all()

    def _full(self, of_principal: int, of_process: int) -> ResourceExhaustedError:
        seconds = (self._waiting + 1) * self.mean_ns * 1e-9
        return ResourceExhaustedError(
            f"{self._waiting} executions wait for the device {self._device_id} already, {of_process} of them of this"
            f" client's process, {of_principal} of its user's",
            field="queue_limit",
            value=self._limit,
            rule="queue_full",
            fix="try again later, send less at a time, or raise the server's queue limit",
            retry_after_s=min(5.0, max(0.005, seconds)),
        )
