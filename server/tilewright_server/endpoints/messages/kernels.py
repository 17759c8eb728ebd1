"""Messages of the service ``tilewright.v1.Kernels``, made from the engine's records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tilewright_proto.v1 import dispatch_pb2
from tilewright_proto.v1 import kernels_pb2 as pb
from tilewright_server.protocol.errors import as_tilewright_error, clean, to_detail
from tilewright_server.session.sessions import Usage

if TYPE_CHECKING:
    from tilewright_kit.loading.loader import PluginManager
    from tilewright_server.build.pool import BuildEvent
    from tilewright_server.engine.kernels.catalog import Kernel
    from tilewright_server.engine.statistics import OperationCounters, Snapshot

__all__ = ["build_event", "statistics", "summary"]

STATES = {
    "queued": pb.BuildEvent.QUEUED,
    "building": pb.BuildEvent.BUILDING,
    "built": pb.BuildEvent.BUILT,
    "cached": pb.BuildEvent.CACHED,
    "failed": pb.BuildEvent.FAILED,
}
MAX_KERNELS = 1000
"""Kernels with most launches, of which statistics tell."""


def summary(kernel: Kernel) -> pb.KernelSummary:
    return pb.KernelSummary(
        name=kernel.name,
        key=kernel.key,
        operation=kernel.operation,
        arch=kernel.arch,
        built=kernel.built,
        registered=kernel.registered,
    )


def build_event(event: BuildEvent) -> pb.BuildEvent:
    error = None if event.error is None else to_detail(as_tilewright_error(event.error))
    return pb.BuildEvent(
        name=event.name,
        state=STATES[event.state],
        done=event.done,
        total=event.total,
        build_ns=event.build_ns,
        error=error,
    )


def statistics(
    snapshot: Snapshot, usage: Usage, plugins: PluginManager, devices: Mapping[str, Mapping[str, int]]
) -> pb.StatisticsReply:
    """``devices`` are counters of open devices by id; those that count nothing are left out."""
    return pb.StatisticsReply(
        operations=[_operation(item) for item in snapshot.operations],
        kernels=[
            pb.StatisticsReply.Kernel(
                name=item.name,
                launches=item.launches,
                device_ns=item.device_ns,
                device=item.device,
                caller_launches=item.caller_launches,
                caller_samples=item.caller_samples,
                caller_sampled_ns=item.caller_sampled_ns,
            )
            for item in snapshot.kernels[:MAX_KERNELS]
        ],
        artifact_hits=snapshot.artifact_hits,
        artifact_builds=snapshot.artifact_builds,
        artifact_failures=snapshot.artifact_failures,
        sessions=usage.sessions,
        regions=usage.regions,
        region_bytes=usage.region_bytes,
        buffers=usage.buffers,
        buffer_bytes=usage.buffer_bytes,
        queue_depth=snapshot.queue_depth,
        uptime_ns=snapshot.uptime_ns,
        plugins=_plugins(plugins),
        bindings=usage.bindings,
        attached_connections=usage.attached_connections,
        devices=[pb.StatisticsReply.Device(id=name, **counters) for name, counters in devices.items() if counters],
    )


def _operation(item: OperationCounters) -> pb.StatisticsReply.Operation:
    return pb.StatisticsReply.Operation(
        name=item.name,
        success=item.success,
        failure=item.failure,
        plan_hits=item.plan_hits,
        plan_misses=item.plan_misses,
        bytes_copied=item.bytes_copied,
        cumulative=dispatch_pb2.Timing(
            queue_ns=item.queue_ns,
            plan_ns=item.plan_ns,
            build_ns=item.build_ns,
            copy_in_ns=item.copy_in_ns,
            device_ns=item.device_ns,
            copy_out_ns=item.copy_out_ns,
        ),
        caller_launches=item.caller_launches,
        caller_samples=item.caller_samples,
        caller_sampled_ns=item.caller_sampled_ns,
    )


def _plugins(plugins: PluginManager) -> list[pb.PluginStatus]:
    loaded = [
        pb.PluginStatus(name=item.name, version=item.version, loaded=True, operations=item.names)
        for item in plugins.loaded
    ]
    failed = [
        pb.PluginStatus(name=item.name, version=item.version, reason=clean(item.reason, 500))
        for item in plugins.failures
    ]
    return loaded + failed
