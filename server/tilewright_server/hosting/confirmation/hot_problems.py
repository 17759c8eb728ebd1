"""Problems by the device time that their kernels take."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright_kit.contract.problem import OperationRequest
from tilewright_server.engine.execution.prepared import Prepared
from tilewright_server.engine.lru import Lru
from tilewright_server.engine.planning.request_key import request_bytes, request_key
from tilewright_server.engine.statistics import KernelCounters
from tilewright_server.engine.types import Selection

__all__ = ["HotProblem", "HotProblems", "spent_ns"]

_LIMIT = 1024
_MAX_BYTES = 4 << 20
_UNSAMPLED_NS = 10_000
"""Time of a launch in a client's process that nobody has timed yet."""


@dataclass(slots=True, eq=False)
class HotProblem:
    """A problem that plans were asked for, on one device. ``share`` is the part of the last interval that its kernels
    ran: of a kernel that several problems use, each has all of it."""

    request: OperationRequest
    selection: Selection
    device: str
    counters: Sequence[KernelCounters]
    share: float = 0.0
    seen_ns: float = -1.0
    """``spent_ns`` at the last look; negative before the first."""

    def spent_ns(self) -> float:
        """Device time of its kernels so far."""
        return spent_ns(self.counters)


def spent_ns(counters: Sequence[KernelCounters]) -> float:
    """Device time of kernels so far: of launches in clients' processes by those that were timed."""
    return sum(_spent_ns(counter) for counter in counters)


def _spent_ns(counter: KernelCounters) -> float:
    each = counter.caller_sampled_ns / counter.caller_samples if counter.caller_samples else _UNSAMPLED_NS
    return counter.device_ns + counter.caller_launches * each


class HotProblems:
    """Problems that the server was asked for and whose kernel it chose itself. Thread-safe, bounded."""

    def __init__(self) -> None:
        self._problems: Lru[tuple[object, ...], HotProblem] = Lru(_LIMIT, _MAX_BYTES)
        self._recent: set[int] = set()
        self._lock = threading.Lock()

    def note(self, request: OperationRequest, selection: Selection, prepared: Prepared, _count: int = 1) -> None:
        """Hear of a plan that was asked for. Costs next to nothing for one that was heard of since the last look."""
        if id(prepared) in self._recent:
            return
        with self._lock:
            self._recent.add(id(prepared))
        chosen = selection.kernel or selection.config or selection.strategy not in ("", "auto", "measured")
        if chosen or prepared.program is None or prepared.values is not None:
            return
        key = (*request_key(request, selection), prepared.device.id)
        problem = self._problems.get(key)
        if problem is None:
            problem = HotProblem(request, selection, prepared.device.id, prepared.kernel_counters)
            self._problems.put(key, problem, request_bytes(request))
        elif problem.counters != prepared.kernel_counters:  # it has got another kernel
            problem.counters, problem.seen_ns = prepared.kernel_counters, -1.0

    def is_alone(self, problem: HotProblem) -> bool:
        """True if no other problem that was heard of has a kernel in common with it, so that counters are its own."""
        own = {id(counter) for counter in problem.counters}
        return not any(
            own & {id(counter) for counter in other.counters}
            for other in self._problems.values()
            if other is not problem
        )

    def hottest(self, interval_s: float, least_share: float) -> list[HotProblem]:
        """Those whose kernels ran for at least that part of the last interval, the busiest first. To be called once in
        each."""
        with self._lock:
            self._recent.clear()
        hot = []
        for problem in self._problems.values():
            spent = problem.spent_ns()
            problem.share = (spent - problem.seen_ns) / (1e9 * interval_s) if problem.seen_ns >= 0 else 0.0
            problem.seen_ns = spent
            if problem.share >= least_share:
                hot.append(problem)
        return sorted(hot, key=lambda item: -item.share)
