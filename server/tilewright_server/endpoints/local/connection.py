"""One connection of the local socket, served by a thread of its own.

The thread that reads a packet does what it asks for and answers, so replies come in the order of requests, and a client
that does not read holds up nobody but itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tilewright_kit.types.errors import AccessError, InvalidArgumentError, TilewrightError, UnsupportedError
from tilewright_proto.v1 import local_pb2
from tilewright_server import __version__
from tilewright_server.clients.client import Client
from tilewright_server.devices.contract import RECORD, REPLY, TIME, WAIT
from tilewright_server.endpoints.local.calls import Calls
from tilewright_server.endpoints.local.listener import check_peer
from tilewright_server.endpoints.local.seqpacket import MAX_PACKET, Wire, close_all
from tilewright_server.endpoints.local.shared_thread import SharedThread, soon
from tilewright_server.endpoints.rpc.transport.tracing import PacketTrace, Tracer
from tilewright_server.endpoints.rpc.transport.traffic import Refusal, log_refusal
from tilewright_server.engine.call import WouldWaitError
from tilewright_server.memory.errors import unknown_session
from tilewright_server.protocol.errors import as_tilewright_error
from tilewright_server.protocol.frames import (
    HEADER,
    HEADER_BYTES,
    MAX_FRAMES,
    REPLY_KIND,
    Kind,
    error_packet,
    malformed,
    packet,
)
from tilewright_server.protocol.request_ids import new_id, printable
from tilewright_server.protocol.request_ids import serve as serve_request
from tilewright_server.session.processes import is_known

if TYPE_CHECKING:
    from tilewright_server.engine.types import Outcome
    from tilewright_server.service import Service
    from tilewright_server.session.attachments import Attachment
    from tilewright_server.session.session import Session

__all__ = ["VERSION", "Connection", "Registry"]

log = logging.getLogger("tilewright.transport.local")

VERSION = 1
HELLO_TIMEOUT_S = 5.0
MAX_DEVICE_ID = 256
MAX_CONTEXT = 1008
"""Bytes of a trace context that are looked at."""
_EVENTS = WAIT | RECORD
_ANSWERED = REPLY | TIME
_LAUNCH_REPLY = Kind.LAUNCH | REPLY_KIND
SHORT_NS = 20_000
"""A launch that takes no longer on a CPU may be made by a thread that others wait for."""
ROW = 16
"""After so many launches of that kind, one after the other, a connection is read by that thread."""
_MAX_SHORT = 1024
NAMES = {item.value: item.name.title().replace("_", "") for item in Kind}
"""Names of packets in the log."""


class Registry(Protocol):
    """Registry of connections."""

    tracer: Tracer | None
    """Recorder of what clients want traced."""
    launches: SharedThread

    @property
    def crowded(self) -> bool:
        """True if connections are so many that one thread had better serve their launches."""
        ...

    def admit(self, connection: Connection, session: Session) -> None:
        """Count one more of a session. Raises ``ResourceExhaustedError``."""
        ...

    def gone(self, connection: Connection) -> None: ...


class Connection:
    """``run`` serves it to its end; ``finish`` and ``stop`` end it, from any thread."""

    def __init__(
        self,
        service: Service,
        accepted: socket.socket,
        registry: Registry,
        client: Client,
        allowed: Collection[int] = (),
    ) -> None:
        self.client = client
        self._allowed = allowed
        self._service = service
        self.wire = Wire(accepted)
        self._registry = registry
        self._session: Session | None = None
        self._forget: Callable[[], None] | None = None
        self._calls: Calls | None = None
        self._attachment: Attachment | None = None
        self._ended = threading.Event()
        self._tracer = registry.tracer
        self._context = b""
        """Trace that the next packet is part of."""
        self._given = ""
        self._name = new_id()
        self._short: set[int] = set()
        """Bindings whose launches are short."""
        self._row = 0
        """Launches of these since something else was asked for."""

    @property
    def request(self) -> str:
        """Id of the packet that is served: the one that its client gave, or one by its sequence number."""
        return self._given or f"{self._name}-{_named(self.wire.head)[2]}"

    def run(self) -> None:
        """Serve until either side ends it; then everything that was made over it ends."""
        serve_request(self)
        try:
            if self._introduced():
                self._serve()
        except OSError:  # as good as a hang-up
            pass
        except Exception:
            log.exception("a local connection failed")
        finally:
            self._end()

    def finish(self) -> None:
        """Take no more requests; those that came are answered."""
        self._leave(socket.SHUT_RD)

    def stop(self) -> None:
        """End it now."""
        self._leave(socket.SHUT_RDWR)

    def _leave(self, how: int) -> None:
        attachment = self._attachment
        self._ended.set()
        if attachment is not None:
            attachment.close()
        self.wire.shut(how)

    def _end(self) -> None:
        session = self._session
        try:
            if self._forget is not None:
                self._forget()
            if self._attachment is not None:
                self._attachment.close()
            self.wire.close()
            if session is not None:
                session.end_of(self)
        except Exception:
            log.exception("a local connection did not end well")
        finally:
            self._registry.gone(self)

    # The first packet

    def _introduced(self) -> bool:
        wire = self.wire
        wire.wait_at_most(HELLO_TIMEOUT_S)
        descriptors: list[int] = []
        slot = sequence = 0
        try:
            data = wire.receive(descriptors)
            if not data:
                return False
            kind, _, slot, sequence, value = _header(data)
            check_peer(wire.socket, self._allowed)
            self._hello(kind, value, bytes(data[HEADER_BYTES:]))
        except BlockingIOError:
            error: TilewrightError = malformed(f"nothing came within {HELLO_TIMEOUT_S:g} s", "nothing")
        except OSError:
            return False
        except Exception as failure:
            error = as_tilewright_error(failure)
        else:
            wire.wait_at_most(0)
            hello = local_pb2.HelloReply(
                server_version=__version__,
                packet_bytes=MAX_PACKET,
                launches=MAX_FRAMES,
                traces=self._tracer is not None,
                requests=True,
            )
            wire.send(packet(Kind.HELLO | REPLY_KIND, 0, slot, sequence, VERSION, hello.SerializeToString()))
            return True
        finally:
            close_all(descriptors)
        wire.send(self._refused(Kind.HELLO, slot, sequence, error))
        return False

    def _hello(self, kind: int, version: int, token: bytes) -> None:
        if kind != Kind.HELLO:
            raise malformed("the first packet of a connection is HELLO", kind)
        if version != VERSION:
            raise UnsupportedError(
                f"this server speaks version {VERSION} of the local protocol",
                field="value",
                value=version,
                rule="local_version",
                fix="use a client of the server's version, or gRPC",
            )
        session = self._service.sessions.find(token)
        if session is None or (is_known(session.client) and session.client.principal != self.client.principal):
            raise unknown_session()
        if not session.local:
            raise AccessError(
                "the session was opened over TCP",
                field="session",
                rule="region_transport",
                fix="open it over the server's Unix socket",
            )
        if is_known(self.client):
            session.identify(self.client)
        self._session = session
        self._registry.admit(self, session)
        self._forget = session.on_close(self.stop)
        self._calls = Calls(self._service, session, self)

    # All others

    def _serve(self) -> None:
        wire = self.wire
        descriptors: list[int] = []
        while True:
            try:
                if self._row < ROW or not self._registry.crowded:
                    data = wire.receive(descriptors)
                else:
                    data = self._registry.launches.receive(self, descriptors)
                if not data:
                    return
                if data[0] == Kind.LAUNCH and not descriptors:
                    self._launches(data)
                else:
                    self._row = 0
                    if self._other(data, descriptors):
                        return
            except TilewrightError as error:  # noqa: PERF203 - the connection goes on
                kind, slot, sequence = _named(wire.head)
                wire.send(self._refused(kind, slot, sequence, error))
            finally:
                if descriptors:
                    close_all(descriptors)

    def _launches(self, data: memoryview) -> None:
        if len(data) % HEADER_BYTES or len(data) > MAX_FRAMES * HEADER_BYTES:
            raise malformed(f"a packet of launches is 1 to {MAX_FRAMES} whole headers", f"{len(data)} bytes")
        session, service, send = self._session, self._service, self.wire.send
        assert session is not None, "HELLO comes first"
        trace = self._trace("Launch") if self._context else None
        alone = len(data) == HEADER_BYTES
        self._row = self._row + 1 if alone else 0
        for kind, flags, slot, sequence, value in HEADER.iter_unpack(data):
            try:
                if kind != Kind.LAUNCH:
                    raise malformed("a packet of launches holds nothing else", kind)
                if flags & _EVENTS:
                    raise _no_events(slot)
                outcome = service.launch(session, value)
            except Exception as error:  # noqa: PERF203 - one failure must not end the others
                self._row = 0
                failure = as_tilewright_error(error)
                if trace is not None:
                    trace.failed(failure)
                send(self._refused(kind, slot, sequence, failure))
            else:
                if alone and value not in self._short:
                    self._learn(session, value, outcome)
                if trace is not None:
                    trace.launched(outcome)
                if flags & _ANSWERED:
                    send(HEADER.pack(_LAUNCH_REPLY, 0, slot, sequence, outcome.device_ns))
        if trace is not None:
            trace.end()

    def _refused(self, kind: int, slot: int, sequence: int, error: TilewrightError, method: int = 0) -> bytes:
        """The reply to what was refused or failed, once the log has a line on it."""
        name = f"tilewright.local/{self._calls.name(method) if kind == Kind.CALL and self._calls else NAMES.get(kind)}"
        log_refusal(name, Refusal.of(error), self.client, self.request)
        return error_packet(kind, slot, sequence, error)

    def _trace(self, method: str) -> PacketTrace | None:
        """Trace of the packet that was read, if its client wants one."""
        context, self._context = self._context, b""
        return self._tracer.packet(context, method, self.client) if self._tracer is not None and context else None

    def _learn(self, session: Session, binding: int, outcome: Outcome) -> None:
        """Note whether launches of a binding are short."""
        if outcome.device_ns >= SHORT_NS or session.binding(binding).prepared.device.kind != "cpu":
            self._row = 0
            return
        if len(self._short) >= _MAX_SHORT:
            self._short.clear()
        self._short.add(binding)

    def launch_at_once(self, data: memoryview) -> bool | bytes:
        """See ``Launches``."""
        session = self._session
        if len(data) != HEADER_BYTES or session is None:
            return False
        kind, flags, slot, sequence, value = HEADER.unpack(data)
        if kind != Kind.LAUNCH or flags & _EVENTS or value not in self._short:
            return False
        try:
            if session.binding(value).binding.target.prepared.current.lost:
                return False
            outcome = soon(partial(self._service.launch, session, value, patient=False), SHORT_NS)
        except WouldWaitError:
            return False
        except Exception as error:
            serve_request(self)
            reply = self._refused(kind, slot, sequence, as_tilewright_error(error))
            serve_request(None)
        else:
            if outcome.device_ns >= SHORT_NS:
                self._short.discard(value)
            if not flags & _ANSWERED:
                return True
            reply = HEADER.pack(_LAUNCH_REPLY, 0, slot, sequence, outcome.device_ns)
        return self.wire.send_at_once(reply) or reply

    def _other(self, data: memoryview, descriptors: list[int]) -> bool:
        """Serve a packet of any other kind. True when the connection is not this thread's to read any more."""
        kind, _, slot, sequence, value = _header(data)
        payload = bytes(data[HEADER_BYTES:])
        if kind == Kind.TRACE and not descriptors:
            self._context = payload[:MAX_CONTEXT]
            return False
        if kind == Kind.REQUEST and not descriptors:
            self._given = printable(payload)
            return False
        try:
            if kind == Kind.CALL:
                self._call(slot, sequence, value, payload, descriptors)
                return False
            if descriptors:
                raise malformed("descriptors come with calls only", kind)
            if kind == Kind.ATTACH:
                self._attach(slot, sequence, payload)
                return True
            if kind == Kind.OPEN_EVENT:
                raise _no_events(slot)
            raise malformed("there is no such packet after HELLO", kind)
        except OSError:
            raise
        except Exception as error:
            self.wire.send(self._refused(kind, slot, sequence, as_tilewright_error(error), value))
            return False

    def _call(self, slot: int, sequence: int, method: int, payload: bytes, descriptors: list[int]) -> None:
        assert self._calls is not None, "HELLO comes first"
        trace = self._trace(self._calls.name(method)) if self._context else None
        try:
            answer = self._calls.call(method, payload, descriptors)
        except Exception as error:
            failure = as_tilewright_error(error)
            if trace is not None:
                trace.failed(failure)
                trace.end()
            if isinstance(error, OSError):  # of the call, not of the connection
                raise failure from error
            raise
        if trace is not None:
            trace.end()
        message = answer.message.SerializeToString()
        try:
            self.wire.send(packet(Kind.CALL | REPLY_KIND, 0, slot, sequence, answer.value, message), answer.descriptor)
        finally:
            if answer.descriptor >= 0:
                os.close(answer.descriptor)

    def _attach(self, slot: int, sequence: int, payload: bytes) -> None:
        """Hand the connection to a device, and wait until that has no more to do with it."""
        session = self._session
        assert session is not None, "HELLO comes first"
        attachments = self._service.attachments
        self._context = b""
        traced = None if self._tracer is None else partial(self._tracer.attached, self.client)
        device = _device_id(payload)
        attachment = attachments.attach(session, device, self.wire.socket.fileno(), self._ended.set, traced)
        self._attachment = attachment
        if session.closed or self._ended.is_set():  # whoever ended it meanwhile did not know of the attachment
            return
        try:
            attachments.publish(attachment)
        except TilewrightError as error:  # the device reads the connection already: it must end, after the answer
            self.wire.send(self._refused(Kind.ATTACH, slot, sequence, error))
            return
        with contextlib.suppress(OSError):
            self.wire.send(packet(Kind.ATTACH | REPLY_KIND, 0, slot, sequence))
        # The device has its own copy. With ours open, the client would not see the end of the device's process.
        self.wire.close()
        self._ended.wait()


def _header(data: memoryview) -> tuple[int, int, int, int, int]:
    if len(data) < HEADER_BYTES:
        raise malformed(f"a packet begins with a header of {HEADER_BYTES} bytes", f"{len(data)} bytes")
    return HEADER.unpack_from(data)


def _named(head: memoryview) -> tuple[int, int, int]:
    """Kind, slot and sequence of a packet that could not be taken."""
    kind, _, slot, sequence, _ = HEADER.unpack(head)
    return kind & ~REPLY_KIND, slot, sequence


def _device_id(payload: bytes) -> str:
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        text = ""
    if not 0 < len(text) <= MAX_DEVICE_ID or not text.isprintable():
        raise InvalidArgumentError(
            "that is no id of a device",
            field="payload",
            value=f"{len(payload)} bytes",
            rule="device_id",
            fix="send the id that BindReply.device says",
        )
    return text


def _no_events(slot: int) -> UnsupportedError:
    return UnsupportedError(
        "launches of this connection are complete before the next one begins: there are no events to wait for",
        field="slot",
        value=slot,
        rule="event_support",
        fix="launch without WAIT and RECORD; or attach the connection to a device that has events",
    )
