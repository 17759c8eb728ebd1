"""Limits that the system sets for this process, and what the server makes of them."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewright_server.devices.cpu.topology import cgroup_folders, find_topology
from tilewright_server.engine.types import EngineOptions, RegisteredLimits
from tilewright_server.session.quotas import Limits, Quotas, Resource
from tilewright_server.settings import Settings, default_cache_dir

__all__ = [
    "ProcessLimits",
    "engine_options",
    "fitted",
    "make_quotas",
    "process_limits",
    "quota_limits",
    "raise_descriptor_limit",
    "session_limits",
]

OWN_THREADS = 48
"""Threads of the server beside those that calls and connections ask for: gRPC's, devices', those there from the start.
"""
STACK_BYTES = 8 << 20
"""Address space of a thread's stack where the system names no other size."""
SPARE_DESCRIPTORS = 256
"""Descriptors that sockets of clients never take."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits in force; None where there is none."""

    threads: int | None
    """Threads that may still be started."""
    descriptors: int | None
    memory_bytes: int
    """Memory that the machine has, or that the container may use."""
    address_space_bytes: int | None
    mappings: int | None = None
    """Mappings that a process may have: of memory, files, kernels and stacks of threads."""

    def describe(self) -> str:
        """One line for logs."""
        parts = [
            "threads " + _shown(self.threads),
            "descriptors " + _shown(self.descriptors),
            f"memory {self.memory_bytes >> 20} MiB",
            "address space " + _shown(self.address_space_bytes, 20, " MiB"),
            "mappings " + _shown(self.mappings),
        ]
        return ", ".join(parts)


def process_limits(root: Path = Path("/")) -> ProcessLimits:
    """Limits of this process and of the groups that it is in. ``root`` is where ``/proc`` and ``/sys`` are found."""
    left = [_left_in(folder) for folder in cgroup_folders(root, "pids")]
    if os.geteuid() != 0:  # does not hold for root
        own = _soft(resource.RLIMIT_NPROC)
        left.append(None if own is None else max(0, own - _threads_of_user(root, os.getuid())))
    return ProcessLimits(
        threads=min((count for count in left if count is not None), default=None),
        descriptors=_soft(resource.RLIMIT_NOFILE),
        memory_bytes=find_topology(root=root).memory_bytes,
        address_space_bytes=_soft(resource.RLIMIT_AS),
        mappings=_number(root / "proc" / "sys" / "vm" / "max_map_count"),
    )


def fitted(settings: Settings, limits: ProcessLimits) -> tuple[Settings, Sequence[str]]:
    """Settings that these limits allow, and a line on each that had to be lowered."""
    changes: dict[str, Any] = {}
    threads = limits.threads
    if limits.address_space_bytes is not None:
        stack = _soft(resource.RLIMIT_STACK) or STACK_BYTES
        room = limits.address_space_bytes // 4 // stack
        threads = room if threads is None else min(threads, room)
        _lower(changes, settings, "region_bytes", limits.address_space_bytes // 2)
    if threads is not None:
        spare = max(0, threads - OWN_THREADS)
        _lower(changes, settings, "workers", max(4, spare // 4))
        _lower(changes, settings, "local_connections", max(8, spare // 4))
    if limits.descriptors is not None:
        spare = max(0, limits.descriptors - SPARE_DESCRIPTORS)
        _lower(changes, settings, "local_connections", max(8, spare // 4))
        _lower(changes, settings, "max_connections", max(16, limits.descriptors // 4))
    if limits.mappings is not None:
        for name in ("all_regions", "all_buffers"):
            _lower(changes, settings, name, max(16, limits.mappings // 4))
    budget = min(limits.memory_bytes, limits.address_space_bytes or limits.memory_bytes) // 8
    _lower(changes, settings, "receive_bytes", max(settings.message_limit, budget))
    for name in ("request_bytes", "unread_bytes"):  # of which one process has seven sixteenths
        _lower(changes, settings, name, max(settings.message_limit * 16 // 7 + 1, budget))
    _lower(changes, settings, "kserve_region_bytes", limits.memory_bytes // 4)  # pages that the server makes
    _lower(changes, settings, "all_plan_bytes", max(settings.plan_bytes // 4, budget))
    told = [f"{name} is {value} instead of {getattr(settings, name)}" for name, value in changes.items()]
    if not settings.host_buffer_bytes:
        changes["host_buffer_bytes"] = limits.memory_bytes // 4 * 3
    return (replace(settings, **changes) if changes else settings), told


def _lower(changes: dict[str, Any], settings: Settings, name: str, most: int) -> None:
    if most < changes.get(name, getattr(settings, name)):
        changes[name] = most


def _soft(limit: int) -> int | None:
    soft = resource.getrlimit(limit)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _number(path: Path) -> int | None:
    """The number that a file holds; None if it holds none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _left_in(group: Path) -> int | None:
    """Processes and threads that a control group may still start."""
    try:
        most, now = ((group / name).read_text().strip() for name in ("pids.max", "pids.current"))
    except OSError:
        return None
    return max(0, int(most) - int(now)) if most.isdigit() and now.isdigit() else None


def _threads_of_user(root: Path, uid: int) -> int:
    count = 0
    for status in (root / "proc").glob("[0-9]*"):
        try:
            if status.stat().st_uid == uid:
                count += sum(1 for _ in (status / "task").iterdir())
        except OSError:  # noqa: PERF203 - processes come and go
            continue
    return count


def _shown(value: int | None, shift: int = 0, unit: str = "") -> str:
    return "unlimited" if value is None else f"{value >> shift}{unit}"


def raise_descriptor_limit(wanted: int = 65536) -> None:
    """Connections and unsealed memory files take a descriptor each, and the usual soft limit is for programs that use
    select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def session_limits(settings: Settings) -> Limits:
    """Limits of one session as the settings have them."""
    return Limits(
        regions=settings.max_regions,
        buffers=settings.max_buffers,
        buffer_bytes=settings.buffer_bytes,
        plans=settings.max_plans,
        plan_bytes=settings.plan_bytes,
        bindings=settings.max_bindings,
    )


def make_quotas(settings: Settings) -> Quotas:
    """Quotas of all clients together, as the settings say them."""
    return Quotas(quota_limits(settings), settings.call_rate)


def quota_limits(settings: Settings) -> dict[Resource, int]:
    """The most of each resource that all clients together may hold."""
    limits = {
        Resource.SESSIONS: settings.max_sessions,
        Resource.CONNECTIONS: settings.local_connections,
        Resource.STREAMS: settings.max_streams,
        Resource.REGIONS: settings.all_regions,
        Resource.REGION_BYTES: settings.region_bytes,
        Resource.KSERVE_REGION_BYTES: settings.kserve_region_bytes,
        Resource.BUFFERS: settings.all_buffers,
        Resource.BUFFER_BYTES: settings.all_buffer_bytes,
        Resource.PLANS: settings.all_plans,
        Resource.PLAN_BYTES: settings.all_plan_bytes,
        Resource.REQUEST_BYTES: settings.request_bytes,
        Resource.UNREAD_BYTES: settings.unread_bytes,
    }
    if settings.host_buffer_bytes:  # 0 before the limits of the system were looked at
        limits[Resource.HOST_BUFFER_BYTES] = settings.host_buffer_bytes
    return limits


def engine_options(settings: Settings) -> EngineOptions:
    """Options of the engine, as the settings say them."""
    return EngineOptions(
        cache_dir=settings.cache_dir or default_cache_dir(),
        cache_bytes=settings.cache_bytes,
        build_workers=settings.build_workers,
        build_timeout_s=settings.build_timeout_s,
        queued_builds=settings.queued_builds,
        registered=RegisteredLimits(
            settings.max_registered_kernels, settings.registered_kernels, settings.shared_kernels
        ),
        compiler=settings.compiler,
        hip_compiler=settings.hip_compiler,
        default_device=settings.device,
        default_strategy=settings.strategy,
        perf_database=settings.perf_database,
        selection_lock=settings.selection_lock,
        cpu_arch=settings.cpu_arch,
        cpu_threads=settings.cpu_threads,
        cpu_isolated=settings.cpu_isolated,
        queue_limit=settings.queue_limit,
        workspace_bytes=settings.workspace_bytes,
        plan_cache_bytes=settings.plan_cache_bytes,
        max_loaded_kernels=settings.max_loaded_kernels,
    )
