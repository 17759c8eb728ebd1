"""Where the time of a call went, and which kernels ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright_proto.v1 import dispatch_pb2

__all__ = ["Report", "Timing", "first_report", "joint_report", "plain"]


@dataclass(frozen=True)
class Timing:
    """Nanoseconds inside the server."""

    queue_ns: int = 0
    plan_ns: int = 0
    build_ns: int = 0
    copy_in_ns: int = 0
    device_ns: int = 0
    copy_out_ns: int = 0
    total_ns: int = 0


@dataclass(frozen=True)
class Report:
    """Report of one call. Times of launches in this process are those of the whole launch on a CPU, and not known on a
    GPU. Executions of prepared plans report ``device_ns``, ``queue_ns`` and ``bytes_copied``."""

    kernels: tuple[str, ...] = ()
    device: str = ""
    timing: Timing = field(default_factory=Timing)
    bytes_copied: int = 0
    """Bytes that the server copied in and out; zero for operands in shared memory and in resident buffers."""
    staged_bytes: int = 0
    """Bytes that this client copied, because an array was not in shared memory or in a layout that cannot be named."""
    plan_cached: bool = False
    notes: tuple[str, ...] = ()
    placement: str = "server"
    """Process that launched: ``server``, or ``caller``, which is this one."""

    @classmethod
    def of_wire(cls, message: dispatch_pb2.Report, staged_bytes: int = 0) -> Report:
        times = message.timing
        return cls(
            kernels=tuple(message.kernels),
            device=message.device,
            timing=Timing(
                times.queue_ns,
                times.plan_ns,
                times.build_ns,
                times.copy_in_ns,
                times.device_ns,
                times.copy_out_ns,
                times.total_ns,
            ),
            bytes_copied=message.bytes_copied,
            staged_bytes=staged_bytes,
            plan_cached=message.plan_cached,
            notes=tuple(message.notes),
        )


def first_report(planned: Report, ran: Report | None) -> Report:
    """The report of a call that made its plan first: planning and building as ``planned`` has them, the rest as it
    ran."""
    if ran is None:
        return planned
    times, own = planned.timing, ran.timing
    timing = replace(
        own,
        plan_ns=times.plan_ns,
        build_ns=times.build_ns,
        total_ns=own.total_ns or times.plan_ns + times.build_ns + own.queue_ns + own.device_ns,
    )
    return replace(ran, timing=timing, plan_cached=planned.plan_cached, notes=planned.notes)


def joint_report(plans: Sequence[Report], fresh: Sequence[Report], ran: Report) -> Report:
    """The report of a call of several plans in one message: kernels of all, and the work on those that it made."""
    ran = replace(ran, kernels=tuple(name for plan in plans for name in plan.kernels))
    if not fresh:
        return ran
    plan_ns, build_ns = (sum(getattr(plan.timing, name) for plan in fresh) for name in ("plan_ns", "build_ns"))
    planned = replace(
        fresh[0],
        timing=replace(fresh[0].timing, plan_ns=plan_ns, build_ns=build_ns),
        plan_cached=all(plan.plan_cached for plan in fresh),
        notes=tuple(note for plan in fresh for note in plan.notes),
    )
    return first_report(planned, ran)


def plain(value: Any) -> Any:
    """A protocol message as dicts, lists and scalars, zeros included and 64-bit numbers as numbers."""
    if isinstance(value, (bool, int, float, str, bytes)):
        return value
    if hasattr(value, "DESCRIPTOR"):
        return {item.name: plain(getattr(value, item.name)) for item in value.DESCRIPTOR.fields}
    if hasattr(value, "items"):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value]
