"""The gRPC server: its options, threads, services, health and reflection."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2

from tilewright_kit.types.errors import CancelledError
from tilewright_proto.v1 import dispatch_pb2, kernels_pb2, memory_pb2
from tilewright_server.clients.client import Client
from tilewright_server.endpoints.rpc.access.gate import Gate
from tilewright_server.endpoints.rpc.access.peers import Peers
from tilewright_server.endpoints.rpc.listeners import Listener
from tilewright_server.endpoints.rpc.services.dispatch import TOKEN_FIELD, DispatchServicer
from tilewright_server.endpoints.rpc.services.health import HealthServicer
from tilewright_server.endpoints.rpc.services.kernels import KernelsServicer
from tilewright_server.endpoints.rpc.services.memory import OPEN_SESSION, Leases, MemoryServicer
from tilewright_server.endpoints.rpc.transport.calls import UNIX, WireCall, require
from tilewright_server.endpoints.rpc.transport.event_loop import Front, start
from tilewright_server.endpoints.rpc.transport.intake import Intake
from tilewright_server.endpoints.rpc.transport.method_handlers import Lane, Reception, register
from tilewright_server.endpoints.rpc.transport.pace import Pace
from tilewright_server.endpoints.rpc.transport.streams import Streams
from tilewright_server.endpoints.rpc.transport.threads import UNLIMITED, Starter, Threads
from tilewright_server.endpoints.rpc.transport.tracing import open_tracer
from tilewright_server.endpoints.rpc.transport.traffic import Traffic
from tilewright_server.memory.errors import unknown_session
from tilewright_server.service import Service
from tilewright_server.session.processes import UNKNOWN
from tilewright_server.session.session import Session
from tilewright_server.session.sessions import Sessions
from tilewright_server.settings import Settings

if TYPE_CHECKING:
    from tilewright_server.endpoints.rpc.services.reflection import ReflectionServicer

__all__ = ["READY", "RpcServer"]

log = logging.getLogger("tilewright.rpc")

READY = "tilewright.ready"
"""Health service that serves while clients should be sent here: not before the default device is open."""
MAX_CALLS = 65536
"""Calls that may be open at once. A backstop: quotas refuse long before, and say when to come back."""
LEAST_RECEIVED = 4
"""Requests that may be on their way at a time, however large they may be."""
HEALTH_RECEIVED = 16
"""As many health checks. They never wait: whoever sends none gives way to whoever does."""
LAST_TOKEN_FIELD = b"\x3a\x10"
"""How the token begins in the one request that ends with it, ``BuildRequest``: field 7, sixteen bytes."""
HANDSHAKE_MS = 10_000
"""Time for TLS, or for the first bytes of HTTP/2."""
SETTINGS_MS = 2000
"""Time to acknowledge our settings. Until then gRPC takes lists of headers of 16 MiB, whatever they say."""
QUIET_S = 0.25
"""Time without a new call after which none is expected."""
REAPERS = 16
"""Sessions that may be taken down at a time."""


class RpcServer:
    """Servicers behind one gRPC server. It listens on what the caller binds ``server`` to."""

    def __init__(
        self, service: Service, settings: Settings, opened: memory_pb2.SessionEvent.Opened, gate: Gate
    ) -> None:
        """Raises ``UnsupportedError`` for a version of ``grpcio`` that is not known, ``RuntimeError`` if the system
        refuses threads, ``InvalidArgumentError`` if packages for traces are missing."""
        require()
        quotas = service.sessions.quotas
        self._starter = Starter()
        make = partial(Threads, starter=self._starter)
        lanes = {
            Lane.HEALTH: make("health", least=2, most=2, waiting=1024),
            Lane.SESSION: make("session", least=2, most=4, waiting=settings.calls_waiting),
            Lane.REPORT: make("report", least=1, most=2, waiting=settings.calls_waiting),
            # Each reads thousands of kernels, in Python: more at a time are not faster, and hold up others.
            Lane.CATALOG: make("catalog", least=1, most=2, waiting=settings.calls_waiting),
            Lane.WORK: make("work", least=4, most=settings.workers, waiting=settings.calls_waiting),
            Lane.COPY: make("copy", least=1, most=_copying(), waiting=settings.calls_waiting),
            Lane.BUILD: make("build", least=1, most=16, waiting=settings.builds_waiting),
            # No more calls wait than there are streams.
            Lane.STREAM: make("stream", least=2, most=settings.workers, waiting=UNLIMITED),
        }
        reapers = make("reaper", least=1, most=REAPERS)
        self._lanes = lanes
        self._threads = tuple(lanes.values())
        self.traffic = Traffic(settings.slow_call_s)
        self.traffic.tracer = open_tracer(settings.trace_endpoint, settings.trace_ratio)
        self.peers = Peers()
        self._pace = Pace(partial(_served, service.sessions), rates=settings)
        self._front = Front(quotas, self.traffic, self.peers, self._pace)
        self._make = partial(grpc.server, self._front, options=_options(settings), maximum_concurrent_rpcs=MAX_CALLS)
        self.server = self._make()
        self._more: list[tuple[grpc.Server, Intake]] = []
        """Servers of one service only, with what bounds their requests."""
        self.leases = Leases(service, reapers)
        self.streams = Streams(quotas)
        self._intake, intakes = _intakes(settings, self.peers, self._pace)
        self._intakes = intakes
        identify = partial(_identify, service.sessions, gate, self.peers)
        self._receive = partial(Reception, identify, lanes, self.streams)
        self._quotas, self._settings = quotas, settings
        reception = self._receive(intakes, quotas, settings.sessionless_limit)
        servicer = self._health_servicer = HealthServicer(quotas)
        self.health = servicer.state
        served = [health_pb2.DESCRIPTOR.services_by_name["Health"]]
        register(self.server, servicer, served[0], reception)
        self.health.set(health.OVERALL_HEALTH, health_pb2.HealthCheckResponse.NOT_SERVING)
        self.health.set(READY, health_pb2.HealthCheckResponse.NOT_SERVING)
        for ours, service_name, module in (
            (DispatchServicer(service), "Dispatch", dispatch_pb2),
            (MemoryServicer(service, self.leases, opened, gate, self._threads), "Memory", memory_pb2),
            (KernelsServicer(service), "Kernels", kernels_pb2),
        ):
            descriptor = module.DESCRIPTOR.services_by_name[service_name]
            register(self.server, ours, descriptor, reception)
            served.append(descriptor)
        self._reflection = _reflection(self.server, served, reception) if settings.reflection else None

    def serve(self, servicer: object, descriptor: ServiceDescriptor, *, apart: bool) -> grpc.Server:
        """Serve one more service, whose requests may be as large as messages may be; if it is to be ``apart``, by a
        server of its own. Returns its server, for its listeners. To be called before ``start``, and once."""
        server, intakes = self.server, self._intakes
        if apart:
            server = self._make()
            intake, intakes = _intakes(self._settings, self.peers, self._pace)
            self._more.append((server, intake))
        elif self._reflection is not None:
            self._reflection.add(descriptor)
        register(server, servicer, descriptor, self._receive(intakes, self._quotas, self._settings.message_limit))
        return server

    def serve_health(self) -> grpc.Server:
        """A server of health checks alone, for its listeners. To be called before ``start``, and once."""
        server, intake = self._make(), Intake(HEALTH_RECEIVED, partial(_sender, self.peers), patient=False)
        reception = self._receive(dict.fromkeys(Lane, intake), self._quotas, self._settings.sessionless_limit)
        register(server, self._health_servicer, health_pb2.DESCRIPTOR.services_by_name["Health"], reception)
        self._more.append((server, intake))
        return server

    def start(self, operations: Iterable[str], listeners: Iterable[Listener] = ()) -> None:
        """Take calls; healthy as a whole and for each operation. From now on ``listeners`` accept."""
        start(self.server, self._intake.tick)
        for server, intake in self._more:
            start(server, intake.tick)
        for listener in listeners:
            listener.start()
        for name in [health.OVERALL_HEALTH, *(f"tilewright.{operation}" for operation in operations)]:
            self.health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def set_ready(self, ready: bool) -> None:
        """Say to those who ask for ``READY`` whether to send clients here."""
        kind = health_pb2.HealthCheckResponse
        self.health.set(READY, kind.SERVING if ready else kind.NOT_SERVING)

    def waiting(self) -> dict[str, int]:
        """Calls that wait for a thread, by class."""
        return {lane.value: threads.waiting for lane, threads in self._lanes.items()}

    def wait_until_quiet(self, limit_s: float) -> None:
        """Wait until no call has begun for ``QUIET_S``: clients have heard that they are to go elsewhere.

        gRPC cancels calls that arrive while it begins to end.
        """
        deadline = time.monotonic() + limit_s
        begun = -1
        while begun != self._front.begun and time.monotonic() < deadline:
            begun = self._front.begun
            time.sleep(QUIET_S)

    def drain(self, grace_s: float) -> Any:
        """Take no more calls, and cancel what is left after ``grace_s``. Returns an event that is set at the end."""
        try:
            for server, _ in self._more:
                server.stop(grace_s)
            return self.server.stop(grace_s)
        except RuntimeError as error:  # no thread for the end of the grace period, which whoever drains waits for too
            log.warning("calls are cancelled after the drain only: %s", error)
            return threading.Event()

    def cancel(self) -> None:
        """Cancel all calls, and wait until all servers have stopped."""
        for server in (self.server, *(server for server, _ in self._more)):
            server.stop(None).wait()

    def close(self) -> None:
        """Wait for the threads; the server has stopped."""
        if self.traffic.tracer is not None:
            self.traffic.tracer.close()
        self._starter.close()
        for threads in self._threads:
            threads.close()


def _copying() -> int:
    """Threads that copy large contents: half of the processors, for others wait while they do."""
    return min(max((os.cpu_count() or 2) // 2, 2), 8)


def _served(sessions: Sessions) -> list[tuple[str, int]]:
    """Launches that were made for each session, and its process."""
    return [(session.client.process, session.account.launches) for session in sessions.all()]


def _intakes(settings: Settings, peers: Peers, pace: Pace) -> tuple[Intake, dict[Lane, Intake]]:
    """The intake of requests to one server, and those of all classes."""
    sender = partial(_sender, peers)
    intake = Intake(max(LEAST_RECEIVED, settings.receive_bytes // settings.message_limit), sender, pace)
    return intake, dict.fromkeys(Lane, intake) | {Lane.HEALTH: Intake(HEALTH_RECEIVED, sender, patient=False)}


def _sender(peers: Peers, call: WireCall) -> str:
    """The process that a call is from, or the machine; its connection where nothing else is known."""
    peer = call.peer()
    if not peer.startswith(UNIX):
        return peer.rpartition(":")[0]
    try:
        client = peers.client(peer)
    except CancelledError:
        return peer
    return client.process if client is not None else peer


def _identify(sessions: Sessions, gate: Gate, peers: Peers, call: WireCall, data: bytes) -> Client:
    """The caller: by the session that a request names, or else by its connection. The token is looked for without
    parsing, and nobody else has its bytes.

    Raises ``AccessError`` if the gate does not let the call pass, ``NotFoundError`` for a session of another principal.
    """
    session = sessions.find(data[2:18]) if data[:2] == TOKEN_FIELD else None
    if session is None and data[-18:-16] == LAST_TOKEN_FIELD:
        session = sessions.find(data[-16:])
    client = _local(gate, peers, call, session) if call.is_local else gate.admit(call)
    if session is None:
        return client
    if session.client.principal != client.principal:
        raise unknown_session()
    return session.client


def _local(gate: Gate, peers: Peers, call: WireCall, session: Session | None) -> Client:
    """The caller at the other end of a Unix socket: as the kernel named it to the relay, or where there is none, as it
    proved to be when it opened its session."""
    client = peers.client(call.peer())
    if client is not None:
        gate.check_user(client, call.method)
        return client
    if session is not None and session.local:
        gate.check_user(session.client, call.method)
        return session.client
    client = Client(f"uid:{os.geteuid()}", f"{UNKNOWN}{call.peer()}", b"")
    if call.method != OPEN_SESSION:  # which says first who it is
        gate.check_user(client, call.method, proved=False)
    return client


def _options(settings: Settings) -> Sequence[tuple[str, Any]]:
    keepalive_ms = int(settings.keepalive_s * 1000)
    return (
        ("grpc.max_receive_message_length", settings.message_limit),
        ("grpc.max_send_message_length", -1),  # bounded where replies are made
        ("grpc.max_concurrent_streams", 1000),
        ("grpc.max_metadata_size", 16 * 1024),
        # Closed when they come, so that gRPC never lacks a descriptor: it may then listen no more, or end the process.
        ("grpc.max_allowed_incoming_connections", settings.max_connections + settings.max_connections // 4),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.http2.settings_timeout", SETTINGS_MS),
        ("grpc.so_reuseport", 0),  # two servers on one port would share its clients at random
        ("grpc.http2.bdp_probe", 0),  # or a call that is not received yet may send megabytes
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", max(keepalive_ms // 2, 500)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.http2.max_pings_without_data", 0),
    )


def _reflection(server: grpc.Server, served: Iterable[ServiceDescriptor], reception: Reception) -> ReflectionServicer:
    from tilewright_server.endpoints.rpc.services.reflection import ReflectionServicer

    found = ReflectionServicer(server, reception)
    for descriptor in served:
        found.add(descriptor)
    return found
