"""Calls of gRPC's server as events: no thread waits for a request to come or for a reply to leave.

The public interface of ``grpc`` gives every call a thread from its headers to its last byte, so a client that sends no
request, or does not read, holds one. gRPC itself works by batches of operations with a callback at their end, in its
one event thread. That step is not public: ``require`` says at the start whether this version has all that is used.

Callbacks must neither wait nor raise: what they are given is handed to threads.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from grpc import _server as grpc_server
from grpc._cython import cygrpc

from tilewright_kit.types.errors import CancelledError, ResourceExhaustedError, UnsupportedError
from tilewright_server.clients.client import ANONYMOUS, Client
from tilewright_server.endpoints.rpc.access.peers import Peers, Remote
from tilewright_server.endpoints.rpc.transport.pace import Pace
from tilewright_server.endpoints.rpc.transport.status import set_status
from tilewright_server.endpoints.rpc.transport.tracing import TRACEPARENT, Parts, trace_id
from tilewright_server.endpoints.rpc.transport.traffic import Refusal, Traffic
from tilewright_server.protocol.request_ids import HEADER_NAME, new_id, printable
from tilewright_server.session.quotas import Quotas, Resource

__all__ = ["SMALL_BYTES", "Outbox", "WireCall", "require"]

log = logging.getLogger("tilewright.rpc")

SMALL_BYTES = 16 * 1024
"""Messages up to this size are not counted: the number of calls bounds them."""
UNIX = ("unix:", "unix-abstract:")
"""Beginnings of peers over Unix sockets; connections of relays have names in the abstract namespace."""
FOREVER_S = 1e8
"""gRPC shows the absence of a deadline as a time in the far future."""
_NEEDED = (
    *((grpc_server, name) for name in ("_Context", "_RECEIVE_MESSAGE_TOKEN", "_SEND_MESSAGE_TOKEN", "_status")),
    *((grpc_server, name) for name in ("_get_initial_metadata_operation", "_is_rpc_state_active")),
    *((grpc_server, name) for name in ("_possibly_finish_call", "_process_event_and_continue", "_ServerStage")),
    *((grpc_server, name) for name in ("_request_call", "_request_registered_call", "_REQUEST_CALL_TAG")),
    (cygrpc, "ReceiveMessageOperation"),
    (cygrpc, "SendMessageOperation"),
)

_private: Any = grpc_server
_operations: Any = cygrpc
Received = Callable[["bytes | None"], None]


def require() -> None:
    """``UnsupportedError`` if this version of ``grpcio`` is built in another way than those that are known, or without
    the package that errors are made with."""
    if importlib.util.find_spec("google.rpc") is None:
        raise UnsupportedError(
            "the package googleapis-common-protos is missing",
            field="googleapis-common-protos",
            rule="grpcio_version",
            fix="pip install googleapis-common-protos",
        )
    missing = [name for owner, name in _NEEDED if not hasattr(owner, name)]
    if missing:
        raise UnsupportedError(
            f"this version of grpcio has no {', '.join(missing)}",
            field="grpcio",
            rule="grpcio_version",
            fix="install a version that is known to work: pip install 'grpcio>=1.72,<1.86'",
        )


class WireCall:
    """One call: its client, its deadline and its end, its messages. Thread-safe, as far as gRPC's own state is."""

    __slots__ = (
        "_call",
        "_context",
        "_counted",
        "_pace",
        "_peers",
        "_quotas",
        "_refusal",
        "_request",
        "_sampled",
        "_seen",
        "_state",
        "_traffic",
        "began_ns",
        "client",
        "lasting",
        "method",
        "parts",
        "sender",
    )

    def __init__(self, event: Any, state: Any, quotas: Quotas, traffic: Traffic, peers: Peers, pace: Pace) -> None:
        """``quotas`` count bytes that the client has not read yet, ``traffic`` the call; ``peers`` know who is behind a
        relay; ``pace`` counts large messages."""
        self._quotas = quotas
        self._pace = pace
        self._peers = peers
        self._seen: tuple[str, Remote | None] | None = None
        self._traffic = traffic
        self._counted = False
        self._refusal: Refusal | None = None
        self._request = ""
        self._sampled: bool | None = None
        self.began_ns = time.perf_counter_ns()
        """Beginning of the call, or of the present request of a stream."""
        self.method = ""
        self.sender = ""
        """Process or address that it is from, as ``Intake`` has found."""
        self.parts: Parts = ()
        """Parts of its time that were measured, for its trace."""
        self.lasting = False
        """It lasts as long as its client wants, so its time says nothing."""
        self._state = state
        self._call = event.call
        self._context = _private._Context(event, state, None)
        self.client: Client = ANONYMOUS

    # As methods of servicers see it

    @property
    def active(self) -> bool:
        """Neither ended nor cancelled."""
        return bool(self._context.is_active())

    def peer(self) -> str:
        """Address of the other end, as gRPC writes it; of a process behind a relay, the name of its connection."""
        return self._origin()[0]

    def _origin(self) -> tuple[str, Remote | None]:
        """Its peer, and the host if there is one behind a relay: the same for as long as the call lasts."""
        if self._seen is None:
            found = str(self._context.peer())
            try:
                remote = self._peers.remote(found)
            except CancelledError:  # whoever asks for the process behind it is told
                return found, None
            self._seen = (found if remote is None else remote.address), remote
        return self._seen

    @property
    def traced(self) -> bool:
        """Its parts are asked for: it is sampled, which is decided once."""
        tracer = self._traffic.tracer
        if tracer is None:
            return False
        if self._sampled is None:
            self._sampled = tracer.samples(self.metadata())
        return self._sampled

    @property
    def is_local(self) -> bool:
        """It came over a Unix socket."""
        return self.peer().startswith(UNIX)

    def certificate(self) -> Mapping[str, Sequence[bytes]] | None:
        """Properties of the connection as TLS proves them, without those of a certificate if the client sent none; None
        without TLS."""
        remote = self._origin()[1]
        if remote is not None:
            return remote.certificate
        found: Mapping[str, Sequence[bytes]] = self._context.auth_context()
        return found if b"ssl" in found.get("transport_security_type", ()) else None

    def metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._context.invocation_metadata() or ()

    @property
    def request(self) -> str:
        """Its id: the one that the client gave, or else that of its trace, or a new one."""
        found = self._request
        if not found:
            given = {key: value for key, value in self.metadata() if key in (HEADER_NAME, TRACEPARENT)}
            found = printable(given.get(HEADER_NAME, "")) or trace_id(given.get(TRACEPARENT)) or new_id()
            self._request = found
        return found

    def call_it(self, request: str) -> None:
        """Take an id that stands in the message, if the call has none that stands before it."""
        if request and not self._request and all(key != HEADER_NAME for key, _ in self.metadata()):
            self._request = printable(request)

    def remaining(self) -> float | None:
        """Seconds until the deadline, if there is one."""
        seconds = float(self._context.time_remaining())
        return seconds if seconds < FOREVER_S else None

    def on_end(self, callback: Callable[[], None]) -> bool:
        """Have ``callback`` run in gRPC's event thread when the call has ended; False if it has already."""
        return bool(self._context.add_callback(callback))

    # As it is served

    def receive(self, received: Received) -> bool:
        """Have ``received`` called with the next message; with None if the client sends no more, or is gone. False if
        the call has ended."""
        return self._start(_private._RECEIVE_MESSAGE_TOKEN, (), received)

    def exchange(self, reply: bytes, received: Received, later: Callable[[], None]) -> None:
        """Send a message, and ``receive`` the next: that is not taken before ``reply`` has been read. If the next is to
        wait, ``later`` is called in gRPC's event thread instead, when ``reply`` has been read.

        Raises ``ResourceExhaustedError`` if too much is unread already.
        """
        give = self.charge(len(reply))
        self._count(time.perf_counter_ns() - self.began_ns)
        self._pace.replied(self.sender, self.method, len(reply))

        def sent() -> None:
            give()
            later()

        def read(data: bytes | None) -> None:
            give()
            received(data)

        message = _operations.SendMessageOperation(reply, 0)
        if self._pace.holds(self.sender, self.method):
            if not self._start(_private._SEND_MESSAGE_TOKEN, (message,), None, sent):
                give()
            return
        if not self._start(_private._RECEIVE_MESSAGE_TOKEN, (message,), received if give is _nothing else read):
            give()

    def send(self, data: bytes, sent: Callable[[], None]) -> bool:
        """Send a message of several, and call ``sent`` when the next may follow. False if the call has ended."""
        message = _operations.SendMessageOperation(data, 0)
        return self._start(_private._SEND_MESSAGE_TOKEN, (message,), None, sent)

    def charge(self, nbytes: int) -> Callable[[], None]:
        """Count bytes as unread, if they are many; returns a function that forgets them. Raises
        ``ResourceExhaustedError``."""
        if nbytes <= SMALL_BYTES:
            return _nothing
        client = self.client
        self._quotas.take(Resource.UNREAD_BYTES, client, nbytes)
        self._pace.unread(self.sender, nbytes)
        return partial(self._discharge, client, nbytes)

    def _discharge(self, client: Client, nbytes: int) -> None:
        self._quotas.give(Resource.UNREAD_BYTES, client, nbytes)
        self._pace.unread(self.sender, -nbytes)

    def finish(self, data: bytes | None = None) -> None:
        """End the call, with a last message if ``data`` is one, and the status that was set.

        Raises ``ResourceExhaustedError`` if too much is unread already.
        """
        give = self.charge(len(data)) if data is not None else _nothing
        if not self._counted:
            self._counted = True
            self._count(None if self.lasting else time.perf_counter_ns() - self.began_ns)
        self._pace.replied(self.sender, self.method, len(data) if data is not None else 0)
        if give is not _nothing and not self.on_end(give):
            give()
            return
        state = self._state
        with state.condition:
            if _private._is_rpc_state_active(state):
                _private._status(_Event(self._call), state, data)

    def fail(self, error: BaseException) -> None:
        """End the call with the status and details of ``error``. Raises nothing."""
        try:
            if self.active:
                self._refusal = Refusal.of(set_status(self._context, error, self.request))
                self.finish()
        except BaseException:  # there is no memory to say it, say
            self.cancel()

    def begun(self) -> None:
        """Note in the audit log that a lasting call was taken."""
        self._traffic.begun(self.method, self.client, self)

    def set_error(self, error: BaseException) -> None:
        """Set the status that ``finish`` ends the call with."""
        self._refusal = Refusal.of(set_status(self._context, error, self.request))

    def cancel(self) -> None:
        self._call.cancel()

    def _count(self, ns: int | None) -> None:
        traffic = self._traffic
        traffic.ended(self.method, ns, self.client, self._refusal, self)
        if ns is not None and traffic.tracer is not None and self.traced:
            error = None if self._refusal is None else (self._refusal.code, self._refusal.reason)
            traffic.tracer.ended(self.method, ns, self.client, self.metadata(), self.parts, error, self)
        self._sampled = None  # the next request of a stream is another call

    def _start(
        self,
        token: str,
        operations: tuple[Any, ...],
        received: Received | None,
        sent: Callable[[], None] | None = None,
    ) -> bool:
        state = self._state

        def completed(event: Any) -> Any:
            """Runs in gRPC's event thread, for which a callback that raises would be the last."""
            with state.condition:
                ended = _private._possibly_finish_call(state, token)
            try:
                if received is not None:
                    received(event.batch_operations[-1].message())
                elif sent is not None:
                    sent()
            except BaseException as error:
                log.warning("an event of a call could not be taken: %r", error)
                self.fail(error)
            return ended

        with state.condition:
            if not _private._is_rpc_state_active(state):
                return False
            if operations and state.initial_metadata_allowed:
                operations = (_private._get_initial_metadata_operation(state, None), *operations)
            if received is not None:
                operations = (*operations, _operations.ReceiveMessageOperation(0))
            self._call.start_server_batch(operations, completed)
            state.due.add(token)
            if len(operations) > 1 or received is None:
                state.initial_metadata_allowed = False
        return True


def _nothing() -> None:
    """Undo the charge of a message that is too small to count."""


class _Event:
    """The part of gRPC's event of a new call that ``_status`` looks at."""

    __slots__ = ("call",)

    def __init__(self, call: Any) -> None:
        self.call = call


class Outbox:
    """Messages of the server's side of a stream, one under way at a time. Thread-safe."""

    def __init__(self, call: WireCall) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._charges: list[Callable[[], None]] = []
        self._uncharged = 0
        self._sending = self._ended = False
        call.on_end(self._discharge)

    def send(self, data: bytes) -> None:
        """Send it after those before it; nothing happens if the call has ended. A client that does not read loses its
        stream when too much waits for it."""
        with self._lock:
            if self._ended:
                return
            self._waiting.append(data)
            self._uncharged += len(data)
            try:
                if self._uncharged > SMALL_BYTES:
                    self._charges.append(self._call.charge(self._uncharged))
                    self._uncharged = 0
            except ResourceExhaustedError as error:
                self._ended = True
                self._waiting.clear()
                self._call.set_error(error)
        self._next()

    def end(self, error: BaseException | None = None) -> None:
        """End the stream after the last message. Idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            if error is not None and self._call.active:
                self._call.set_error(error)
        self._next()

    def _next(self) -> None:
        with self._lock:
            if self._sending:
                return
            data = self._waiting.popleft() if self._waiting else None
            if not self._waiting:  # all but the message that leaves now has been read
                charges, self._charges, self._uncharged = self._charges, [], 0
                for give in charges:
                    give()
            if data is None and not self._ended:
                return
            self._sending = True
        if data is None:
            self._call.finish()
        elif not self._call.send(data, self._sent):
            with self._lock:
                self._ended = True
                self._waiting.clear()

    def _discharge(self) -> None:
        with self._lock:
            self._ended = True
            self._waiting.clear()
            charges, self._charges = self._charges, []
        for give in charges:
            give()

    def _sent(self) -> None:
        with self._lock:
            self._sending = False
        self._next()
