"""The service ``tilewright.v1.Memory``."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tilewright_kit.types.errors import InvalidArgumentError, UnavailableError, UnsupportedError
from tilewright_proto.v1 import memory_pb2 as pb
from tilewright_server.clients.client import Priority
from tilewright_server.devices.contract import uses_host_memory
from tilewright_server.endpoints.messages.regions import exported, region_reply, region_source
from tilewright_server.endpoints.messages.sessions import session_summary
from tilewright_server.endpoints.rpc.access.gate import Gate
from tilewright_server.endpoints.rpc.transport.calls import WireCall
from tilewright_server.endpoints.rpc.transport.method_handlers import Lane, Send, call_of, events, lane
from tilewright_server.endpoints.rpc.transport.threads import Threads
from tilewright_server.memory.buffers import ResidentBuffer
from tilewright_server.memory.device_regions import exportable_bytes
from tilewright_server.service import Service
from tilewright_server.session.processes import is_known, proved_process
from tilewright_server.session.session import Session

__all__ = ["OPEN_SESSION", "Leases", "MemoryServicer"]

OPEN_SESSION = "tilewright.v1.Memory/OpenSession"


MOST_SESSIONS = 1000
"""Sessions that one reply tells of."""
PROCESS_METADATA = "tilewright-process"
"""Says with ``OpenSession`` which process opens it, see ``proved_process``."""
PRIORITY_METADATA = "tilewright-priority"
"""Names the priority of a session with ``OpenSession``; without it, it is interactive."""


class Leases:
    """Open lease streams, and the ends of their sessions.

    gRPC reports the end of a stream in its one event thread, which must not wait; giving memory back can take a while,
    so that is done elsewhere.
    """

    def __init__(self, service: Service, reapers: Threads) -> None:
        """Several ``reapers``: the memory of one session may wait for a device that hangs, and must not keep the
        others waiting."""
        self._service = service
        self._lock = threading.Lock()
        self._open: dict[Session, Send] = {}
        self._closing = False
        self._reapers = reapers

    def begin(self, session: Session, send: Send) -> None:
        with self._lock:
            if not self._closing:
                self._open[session] = send
                return
        self._service.sessions.close(session)
        raise UnavailableError("the server is shutting down", rule="draining", fix="use another server")

    def end(self, session: Session) -> None:
        """The stream is gone: end the session soon, in another thread."""
        with self._lock:
            self._open.pop(session, None)
            if not self._closing:
                self._reapers.submit(partial(self._service.sessions.close, session), session.client)

    def close(self, reason: str) -> None:
        """Tell all clients, and end their streams. Their sessions are left to ``Sessions.close_all``."""
        with self._lock:
            self._closing = True
            sends = list(self._open.values())
        for send in sends:
            send(pb.SessionEvent(closing=pb.SessionEvent.Closing(reason=reason)))
            send(None)
        self._reapers.close()


class MemoryServicer:
    """Sessions, regions and resident buffers."""

    def __init__(
        self,
        service: Service,
        leases: Leases,
        opened: pb.SessionEvent.Opened,
        gate: Gate,
        threads: Sequence[Threads] = (),
    ) -> None:
        """``threads`` serve calls, and know how many of each session there are."""
        self._threads = threads
        self._service = service
        self._sessions = service.sessions
        self._leases = leases
        self._gate = gate
        self._opened = opened
        """The hello that every client gets, without its token."""

    @lane(Lane.SESSION)
    @events
    def open_session(self, request: pb.OpenSessionRequest, context: WireCall, send: Send) -> None:
        local = context.is_local
        if local and not is_known(context.client):  # no relay has asked the kernel
            proved = proved_process(_metadatum(context, PROCESS_METADATA))
            context.client = proved or context.client
            self._gate.check_user(context.client, OPEN_SESSION, proved=proved is not None)
        client = replace(context.client, priority=_priority(context))
        session = self._sessions.open(request.client_name, local=local, client=client)
        self._leases.begin(session, send)
        if not context.on_end(lambda: self._leases.end(session)):
            self._leases.end(session)
            return
        event = pb.SessionEvent(opened=self._opened)
        event.opened.session = session.token
        event.opened.shared_memory = local
        if not local:
            event.opened.ClearField("local_socket")
            event.opened.ClearField("mps_pipe_directory")
        context.begun()
        send(event)
        session.caller_launches.tell_by(lambda number: send(pb.SessionEvent(choices=number)))

    def register_region(self, request: pb.RegisterRegionRequest, _: WireCall) -> pb.RegisterRegionReply:
        session = self._sessions.get(request.session)
        return region_reply(self._service.register(session, region_source(request), request.bytes))

    def unregister_region(self, request: pb.UnregisterRegionRequest, context: WireCall) -> pb.UnregisterRegionReply:
        self._sessions.get(request.session).unregister(request.region, call_of(context).deadline)
        return pb.UnregisterRegionReply()

    @lane(Lane.REPORT)
    def status(self, request: pb.StatusRequest, _: WireCall) -> pb.StatusReply:
        session = self._sessions.get(request.session)
        regions, buffers, plans = session.objects()
        kind = pb.StatusReply
        return pb.StatusReply(
            regions=[
                kind.Region(
                    region=item.id,
                    bytes=item.size,
                    zero_copy=item.zero_copy,
                    in_use=item.pins,
                    device=item.device_id,
                )
                for item in regions
            ],
            buffers=[
                kind.Buffer(
                    buffer=item.id,
                    bytes=item.size,
                    device=item.device_id,
                    in_use=item.pins,
                    exported=item.exported,
                )
                for item in buffers
            ],
            plans=plans,
            bindings=[item.id for item in session.bindings()],
        )

    @lane(Lane.REPORT)
    def list_sessions(self, _: pb.ListSessionsRequest, context: WireCall) -> pb.ListSessionsReply:
        if context.is_local:
            self._gate.check_owner(context.client)
        sessions = self._sessions.all()
        now = time.monotonic()
        found = [session_summary(item, now, self._threads) for item in sessions[:MOST_SESSIONS]]
        for item, session in zip(found, sessions, strict=False):
            item.own = session.token == context.client.session
        return pb.ListSessionsReply(sessions=found, total=len(sessions))

    def create_buffer(self, request: pb.CreateBufferRequest, context: WireCall) -> pb.CreateBufferReply:
        session = self._sessions.get(request.session)
        device = self._service.engine.devices.get(request.device, call_of(context).remaining())
        exportable = request.exportable
        buffer = session.create_buffer(
            request.bytes,
            lambda size: ResidentBuffer(device, size, exportable=exportable),
            (lambda size: exportable_bytes(device, size)) if exportable else int,
            on_host=uses_host_memory(device.info),
        )
        return pb.CreateBufferReply(buffer=buffer.id)

    @lane(Lane.COPY)
    def write_buffer(self, request: pb.WriteBufferRequest, _: WireCall) -> pb.WriteBufferReply:
        place = request.WhichOneof("source")
        if place is None:
            raise InvalidArgumentError(
                "there is nothing to write", field="source", rule="source", fix="set data or region"
            )
        source = request.data if place == "data" else (request.region.region, request.region.offset)
        self._service.write_buffer(request.session, request.buffer, request.offset, source, request.bytes)
        return pb.WriteBufferReply()

    @lane(Lane.COPY)
    def read_buffer(self, request: pb.ReadBufferRequest, context: WireCall) -> pb.ReadBufferReply | bytes:
        read = partial(self._service.read_buffer, request.session, request.buffer, request.offset, request.bytes)
        if request.HasField("region"):
            read((request.region.region, request.region.offset))
            return pb.ReadBufferReply()

        def begin(nbytes: int) -> bytes:
            """A reply that may not be held is not made; one that is made is copied once, to where it is sent from."""
            context.charge(nbytes)()
            return _field(pb.ReadBufferReply.DATA_FIELD_NUMBER, nbytes) if nbytes else b""

        return read(None, begin)

    def free_buffer(self, request: pb.FreeBufferRequest, context: WireCall) -> pb.FreeBufferReply:
        self._sessions.get(request.session).free_buffer(request.buffer, call_of(context).deadline)
        return pb.FreeBufferReply()

    def export_buffer(self, request: pb.ExportBufferRequest, _: WireCall) -> pb.ExportBufferReply:
        buffer, handle = self._service.export_buffer(self._sessions.get(request.session), request.buffer)
        if handle.fd >= 0:
            os.close(handle.fd)
            raise UnsupportedError(
                f"{buffer.device_id} exports memory by descriptor, which gRPC cannot carry",
                field="buffer",
                value=request.buffer,
                rule="export_descriptor",
                fix="export it over the local socket",
            )
        return exported(buffer, handle)


def _field(number: int, nbytes: int) -> bytes:
    """The beginning of a field of so many bytes, as it is on the wire."""
    found = bytearray((number << 3 | 2,))
    while nbytes > 0x7F:
        found.append(nbytes & 0x7F | 0x80)
        nbytes >>= 7
    found.append(nbytes)
    return bytes(found)


def _metadatum(context: WireCall, name: str) -> str:
    """A value of a call's metadata; empty if it has none."""
    return next((str(value) for key, value in context.metadata() if key == name), "")


def _priority(context: WireCall) -> Priority:
    name = _metadatum(context, PRIORITY_METADATA)
    known = {priority.name.lower(): priority for priority in Priority}
    if name and name not in known:
        raise InvalidArgumentError(
            "there is no such priority",
            field=PRIORITY_METADATA,
            value=name,
            rule="priority",
            fix=f"use {', '.join(known)}, or leave it out",
        )
    return known.get(name, Priority.INTERACTIVE)
