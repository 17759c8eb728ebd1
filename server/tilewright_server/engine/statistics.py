"""Counters: cheap enough for every execution, exact under threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from tilewright_server.clients.client import Priority
from tilewright_server.engine.histogram import Histogram

__all__ = ["KernelCounters", "OperationCounters", "PriorityCounters", "Snapshot", "Statistics"]


MAX_KERNELS = 8192
"""Kernels that are counted by name."""
OTHERS = "others"
"""Name under which the rest is counted."""


@dataclass(slots=True)
class PriorityCounters:
    """Counters of one operation for clients of one priority."""

    success: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Failed executions and plans by error code."""
    queue: Histogram = field(default_factory=Histogram)
    plan: Histogram = field(default_factory=Histogram)
    build: Histogram = field(default_factory=Histogram)
    device: Histogram = field(default_factory=Histogram)

    @property
    def counted(self) -> bool:
        """True once anything is."""
        return bool(self.failures) or any(sum(item.counts) for item in (self.queue, self.plan, self.build))

    def copy(self) -> PriorityCounters:
        """A copy that no later count changes."""
        times = (item.copy() for item in (self.queue, self.plan, self.build, self.device))
        return PriorityCounters(self.success, dict(self.failures), *times)


@dataclass(slots=True)
class OperationCounters:
    """Counters of one operation; times are sums in nanoseconds."""

    name: str
    plan_hits: int = 0
    plan_misses: int = 0
    bytes_copied: int = 0
    plan_ns: int = 0
    copy_in_ns: int = 0
    copy_out_ns: int = 0
    caller_launches: int = 0
    """In processes of clients, as these count them."""
    caller_samples: int = 0
    """Those of them that were timed."""
    caller_sampled_ns: int = 0
    classes: tuple[PriorityCounters, ...] = field(
        default_factory=lambda: tuple(PriorityCounters() for _ in Priority), compare=False
    )
    """By the priority of clients."""

    @property
    def success(self) -> int:
        return sum(item.success for item in self.classes)

    @property
    def failure(self) -> int:
        return sum(sum(item.failures.values()) for item in self.classes)

    @property
    def failures(self) -> dict[str, int]:
        """Failed executions and plans by error code."""
        codes = sorted({code for item in self.classes for code in item.failures})
        return {code: sum(item.failures.get(code, 0) for item in self.classes) for code in codes}

    @property
    def queue_ns(self) -> int:
        """Sum of waits for devices."""
        return sum(item.queue.sum_ns for item in self.classes)

    @property
    def build_ns(self) -> int:
        """Sum of waits for compilers."""
        return sum(item.build.sum_ns for item in self.classes)

    @property
    def device_ns(self) -> int:
        """Sum of times on devices, all stages together."""
        return sum(item.device.sum_ns for item in self.classes)

    def copy(self) -> OperationCounters:
        """A copy that no later count changes."""
        return replace(self, classes=tuple(item.copy() for item in self.classes))


@dataclass(slots=True)
class KernelCounters:
    """Counters of one kernel on one device; a stage is a launch."""

    name: str
    device: str = ""
    launches: int = 0
    """By the server."""
    device_ns: int = 0
    caller_launches: int = 0
    """In processes of clients, as these count them."""
    caller_samples: int = 0
    """Those of them that were timed."""
    caller_sampled_ns: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All counters at one moment."""

    operations: tuple[OperationCounters, ...] = ()
    kernels: tuple[KernelCounters, ...] = ()
    artifact_hits: int = 0
    artifact_builds: int = 0
    artifact_failures: int = 0
    artifacts_quarantined: int = 0
    artifacts_evicted: int = 0
    queue_depth: int = 0
    workspace_bytes: int = 0
    plans: int = 0
    uptime_ns: int = 0
    losses: Mapping[str, int] = field(default_factory=dict)
    """Processes of devices that ended unasked, by device."""


@dataclass(slots=True)
class Statistics:
    """Counters by name. Whoever counts often keeps the counter object and calls ``executed`` or ``planned`` with it."""

    gauges: Callable[[], Mapping[str, int]] = dict
    """Gauges of others: fields of ``Snapshot`` by name."""
    started_ns: int = field(default_factory=time.monotonic_ns)
    _operations: dict[str, OperationCounters] = field(default_factory=dict)
    _kernels: dict[tuple[str, str], KernelCounters] = field(default_factory=dict)
    _losses: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def operation(self, name: str) -> OperationCounters:
        with self._lock:
            return self._operations.setdefault(name, OperationCounters(name))

    def kernel(self, name: str, device: str = "") -> KernelCounters:
        """Counters of a kernel on a device; the same for all that come when there are too many."""
        with self._lock:
            key = (name, device)
            if key not in self._kernels and len(self._kernels) >= MAX_KERNELS:
                key = (OTHERS, "")
            return self._kernels.setdefault(key, KernelCounters(*key))

    def launched_by_caller(
        self,
        operation: OperationCounters,
        kernels: Sequence[KernelCounters],
        launches: int,
        samples: int,
        sampled_ns: int,
    ) -> None:
        """A client has launched a plan in its own process. ``kernels`` are those of its stages."""
        with self._lock:
            operation.caller_launches += launches
            operation.caller_samples += samples
            operation.caller_sampled_ns += sampled_ns
            for kernel in kernels:
                kernel.caller_launches += launches
            if len(kernels) == 1:
                kernels[0].caller_samples += samples
                kernels[0].caller_sampled_ns += sampled_ns

    def executed(
        self,
        operation: OperationCounters,
        kernels: Sequence[KernelCounters],
        times: Sequence[int],
        repeat: int,
        queue_ns: int,
        priority: Priority,
        *,
        complete: bool = True,
    ) -> None:
        """An execution ended well, or not ``complete``: given up between repeats.

        ``times`` are those of its stages, one for each of ``kernels``.
        """
        with self._lock:
            counters = operation.classes[priority]
            counters.success += complete
            counters.queue.observe(queue_ns)
            counters.device.observe(sum(times))
            for stage, kernel in enumerate(kernels):  # zip(strict=True) takes as long as all the rest
                kernel.launches += repeat
                kernel.device_ns += times[stage]

    def failed(self, operation: str, code: str, priority: Priority) -> None:
        """An execution, or its plan, ended with an error of this code."""
        counters = self.operation(operation).classes[priority]
        with self._lock:
            counters.failures[code] = counters.failures.get(code, 0) + 1

    def lost(self, device: str) -> None:
        """The process of a device ended unasked."""
        with self._lock:
            self._losses[device] = self._losses.get(device, 0) + 1

    def planned(
        self, operation: OperationCounters, priority: Priority, *, hit: bool, plan_ns: int, build_ns: int
    ) -> None:
        with self._lock:
            operation.plan_hits += hit
            operation.plan_misses += not hit
            operation.plan_ns += plan_ns
            if not hit:
                operation.classes[priority].plan.observe(plan_ns)
            if build_ns:
                operation.classes[priority].build.observe(build_ns)

    def copied(self, operation: str, nbytes: int, copy_in_ns: int = 0, copy_out_ns: int = 0) -> None:
        """The server moved operands of an execution."""
        counters = self.operation(operation)
        with self._lock:
            counters.bytes_copied += nbytes
            counters.copy_in_ns += copy_in_ns
            counters.copy_out_ns += copy_out_ns

    def snapshot(self) -> Snapshot:
        """All counters and gauges now: operations by name, kernels by launches."""
        with self._lock:
            operations = [item.copy() for _, item in sorted(self._operations.items())]
            kernels = [copy(item) for item in self._kernels.values()]
            losses = dict(self._losses)
        kernels.sort(key=lambda item: (-item.launches - item.caller_launches, item.name, item.device))
        return Snapshot(
            tuple(operations),
            tuple(kernels),
            uptime_ns=time.monotonic_ns() - self.started_ns,
            losses=losses,
            **self.gauges(),
        )
