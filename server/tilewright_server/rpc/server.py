"""The gRPC server: its options, services, health and reflection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tilewright_proto.v1 import dispatch_pb2, kernels_pb2, memory_pb2
from tilewright_server.rpc.dispatch import DispatchServicer
from tilewright_server.rpc.kernels import KernelsServicer
from tilewright_server.rpc.memory import Leases, MemoryServicer
from tilewright_server.rpc.method_handlers import register
from tilewright_server.rpc.streams import Streams
from tilewright_server.service import Service
from tilewright_server.settings import Settings

__all__ = ["RpcServer"]

MAX_CALLS = 8192
"""Calls that may be open at once. A backstop: the engine's queue refuses long before, and says when to come back."""


class RpcServer:
    """Servicers behind one gRPC server. It listens on what the caller binds ``server`` to."""

    def __init__(self, service: Service, settings: Settings, opened: memory_pb2.SessionEvent.Opened) -> None:
        self._workers = ThreadPoolExecutor(settings.workers, thread_name_prefix="rpc")
        # A few more than streams are allowed, so that one too many is told so instead of waiting unheard.
        self._stream_threads = ThreadPoolExecutor(settings.max_streams + 8, thread_name_prefix="stream")
        self.server = grpc.server(self._workers, options=_options(settings), maximum_concurrent_rpcs=MAX_CALLS)
        self.leases = Leases(service)
        self.streams = Streams(settings.max_streams)
        self.health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.health.set(health.OVERALL_HEALTH, health_pb2.HealthCheckResponse.NOT_SERVING)
        names: list[str] = [health.SERVICE_NAME]
        for servicer, service_name, module in (
            (DispatchServicer(service, self.streams), "Dispatch", dispatch_pb2),
            (MemoryServicer(service, self.leases, opened), "Memory", memory_pb2),
            (KernelsServicer(service), "Kernels", kernels_pb2),
        ):
            descriptor = module.DESCRIPTOR.services_by_name[service_name]
            register(self.server, servicer, descriptor, self._stream_threads)
            names.append(descriptor.full_name)
        if settings.reflection:
            _add_reflection(self.server, names)

    def start(self, operations: Iterable[str]) -> None:
        """Take calls; healthy as a whole and for each operation."""
        self.server.start()
        for name in [health.OVERALL_HEALTH, *(f"tilewright.{operation}" for operation in operations)]:
            self.health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def drain(self, grace_s: float) -> Any:
        """Take no more calls, and cancel what is left after ``grace_s``. Returns an event that is set at the end."""
        return self.server.stop(grace_s)

    def close(self) -> None:
        """Wait for the threads; the server has stopped."""
        self._workers.shutdown(wait=True)
        self._stream_threads.shutdown(wait=True)


def _options(settings: Settings) -> Sequence[tuple[str, Any]]:
    keepalive_ms = int(settings.keepalive_s * 1000)
    return (
        ("grpc.max_receive_message_length", settings.message_limit),
        ("grpc.max_send_message_length", -1),  # bounded where replies are made
        ("grpc.max_concurrent_streams", 1000),
        ("grpc.max_metadata_size", 16 * 1024),
        ("grpc.so_reuseport", 0),  # two servers on one port would share its clients at random
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", max(keepalive_ms // 2, 500)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.http2.max_pings_without_data", 0),
    )


def _add_reflection(server: grpc.Server, names: Sequence[str]) -> None:
    from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

    class Reflection(reflection.ReflectionServicer):  # type: ignore[misc]
        """With threads of its own: streams that clients leave open must not hold workers."""

        def ServerReflectionInfo(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
            return super().ServerReflectionInfo(request_iterator, context)

    Reflection.ServerReflectionInfo.experimental_thread_pool = ThreadPoolExecutor(  # type: ignore[attr-defined]
        4, thread_name_prefix="reflection"
    )
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection([*names, reflection.SERVICE_NAME]), server)
