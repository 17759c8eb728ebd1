"""A caller's turn on a device: how long it has lasted, and making way for those who wait."""

from __future__ import annotations

import time

from tilewright_server.engine.call import Call
from tilewright_server.engine.execution.admission import Admission

__all__ = ["SLICE_NS", "Slices", "Turn"]

SLICE_NS = 5_000_000
"""After so long at most others get their turn, and a caller who went away or is too late is noticed."""
PIECE_NS = SLICE_NS // 2
"""Repeats that are done in a row. A turn ends when another piece would be too long for it."""
_GROWTH = 16


class Turn:
    """Admission to a device that is given up and asked for again while others wait. Of one thread."""

    __slots__ = ("_admission", "_call", "_held", "_since", "_waiter", "_weight", "queue_ns")

    def __init__(self, admission: Admission, weight: int, call: Call) -> None:
        """Waits for admission."""
        self._admission = admission
        self._weight = weight
        self._call = call
        self._waiter = waiter = admission.enter(weight, call)
        self.queue_ns = 0 if waiter is None else waiter.queue_ns
        """Time spent waiting since it was last asked for."""
        self._held = True
        self._since = time.perf_counter_ns()

    def yield_to_waiters(self) -> None:
        """Let others run if this would last too long. Raises what ends the wait; the turn is over then."""
        if not self._admission.queue_depth:
            return
        spent_ns = time.perf_counter_ns() - self._since
        if spent_ns <= SLICE_NS - PIECE_NS:
            return
        self._held = False
        waiter = self._admission.swap(self._weight, self._call, self._waiter, spent_ns)
        self._held = True
        if waiter is not None and waiter is not self._waiter:
            self.queue_ns += waiter.queue_ns
        self._waiter = waiter
        self._since = time.perf_counter_ns()

    def take_queue_ns(self) -> int:
        """The waiting time that nobody has been told of yet."""
        queue_ns, self.queue_ns = self.queue_ns, 0
        return queue_ns

    def end(self) -> None:
        if self._held:
            self._held = False
            spent_ns = time.perf_counter_ns() - self._since
            self._admission.leave(self._weight, self._call, spent_ns, self._waiter)


class Slices:
    """How many repeats fit into a piece of a slice, learnt from those that ran."""

    __slots__ = ("_begin", "_next", "done", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._next = 1
        self._begin = 0

    def begin(self) -> int:
        """Repeats to do now; 0 when all are done."""
        self._next = min(self._next, self.total - self.done)
        self._begin = time.perf_counter_ns()
        return self._next

    def end(self) -> None:
        """They are done."""
        each = max(1, (time.perf_counter_ns() - self._begin) // self._next)
        self.done += self._next
        self._next = max(1, min(PIECE_NS // each, _GROWTH * self._next))
