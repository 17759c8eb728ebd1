"""From servicer methods to gRPC handlers.

Requests are parsed in the thread that serves them instead of gRPC's one event thread, garbage gets a typed error, and a
method that answers the same bytes again need not serialise. A servicer's method has the call's name in snake case.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from tilewright_kit.types.errors import CancelledError, InvalidArgumentError
from tilewright_server.clients.client import Client
from tilewright_server.endpoints.rpc.transport.calls import SMALL_BYTES, Outbox, WireCall
from tilewright_server.endpoints.rpc.transport.event_loop import Entry
from tilewright_server.endpoints.rpc.transport.intake import Intake
from tilewright_server.endpoints.rpc.transport.streams import Streams
from tilewright_server.endpoints.rpc.transport.threads import Threads
from tilewright_server.engine.call import Call, Cancellation
from tilewright_server.protocol.request_ids import serve as serve_request
from tilewright_server.protocol.wire_structure import check_structure
from tilewright_server.session.quotas import Quotas, Resource

__all__ = ["Lane", "Reception", "Send", "call_of", "events", "lane", "parse_as", "raw", "register"]

F = TypeVar("F", bound=Callable[..., Any])
Send = Callable[["Message | None"], None]
"""Sends an event of a stream, without waiting for the client to read it; None ends the stream."""


class Lane(Enum):
    """Classes of calls, each with threads of its own: calls of one cannot keep those of another waiting."""

    HEALTH = "health"
    SESSION = "session"
    REPORT = "report"
    CATALOG = "catalog"
    WORK = "work"
    COPY = "copy"
    BUILD = "build"
    STREAM = "stream"


class Reception:
    """Parts that serve all methods: who a caller is, what he may, and threads by lane."""

    def __init__(
        self,
        identify: Callable[[WireCall, bytes], Client],
        threads: Mapping[Lane, Threads],
        streams: Streams,
        intake: Mapping[Lane, Intake],
        quotas: Quotas,
        sessionless_limit: int,
    ) -> None:
        self.identify = identify
        self._threads = threads
        self.streams = streams
        self.intake = intake
        self._quotas = quotas
        self._sessionless_limit = sessionless_limit

    def submit(self, where: Lane, call: WireCall, data: bytes, job: Callable[[], None]) -> None:
        """Serve the request ``data``. Runs in gRPC's event thread; a refusal ends the call."""
        try:
            client = call.client = self.identify(call, data)
            if where is not Lane.HEALTH:  # which whoever watches the server must always be able to ask for
                self._quotas.called(client)
            job = partial(_as, call, job)
            nbytes = len(data)
            if nbytes > SMALL_BYTES:
                self._check(client, nbytes)
                self._quotas.take(Resource.REQUEST_BYTES, client, nbytes)
                give = partial(self._quotas.give, Resource.REQUEST_BYTES, client, nbytes)
                try:
                    self._threads[where].submit(partial(_then, job, give), client)
                except BaseException:
                    give()
                    raise
            else:
                self._threads[where].submit(job, client)
        except BaseException as error:
            call.fail(error)

    def _check(self, client: Client, nbytes: int) -> None:
        if nbytes > self._sessionless_limit and not client.session:
            raise InvalidArgumentError(
                f"a request without a session has at most {self._sessionless_limit} bytes",
                field="request",
                value=nbytes,
                rule="sessionless_limit",
                fix="open a session and name it in the request, or put operands into shared memory",
            )


def _as(call: WireCall, job: Callable[[], None]) -> None:
    """Serve a call in a thread that knows whose request it is."""
    serve_request(call)
    try:
        job()
    finally:
        serve_request(None)


def _then(job: Callable[[], None], after: Callable[[], None]) -> None:
    try:
        job()
    finally:
        after()


def raw(method: F) -> F:
    """Mark a method that takes the request's bytes and returns the reply's."""
    method.raw = True  # type: ignore[attr-defined]
    return method


def events(method: F) -> F:
    """Mark a server-streaming method that takes a function to send with. Its stream ends when that is called with
    None, or when the method raises, not when it returns.
    """
    method.events = True  # type: ignore[attr-defined]
    return method


def lane(where: Lane) -> Callable[[F], F]:
    """Mark a method whose calls are of another class than ``WORK``."""

    def mark(method: F) -> F:
        method.lane = where  # type: ignore[attr-defined]
        return method

    return mark


def call_of(context: WireCall) -> Call:
    """The engine's view of a gRPC call: its deadline, its client, and the end of the client's interest."""
    cancellation = Cancellation()
    call = Call.within(context.remaining(), cancellation, context.client)
    if not context.on_end(cancellation.cancel):
        raise CancelledError("the caller has gone away", rule="cancelled", fix="send it again if it is still wanted")
    return call


def register(
    server: grpc.Server, servicer: object, service: ServiceDescriptor, reception: Reception, name: str = ""
) -> None:
    """Serve the methods of ``service`` that ``servicer`` has, under another ``name`` than the service's if one is
    given."""
    served = [method for method in service.methods if hasattr(servicer, _snake(method.name))]
    handlers = {method.name: _handler(servicer, method, reception) for method in served}
    server.add_registered_method_handlers(name or service.full_name, handlers)


def _handler(servicer: object, method: MethodDescriptor, reception: Reception) -> grpc.RpcMethodHandler:
    behaviour = getattr(servicer, _snake(method.name))
    where = getattr(behaviour, "lane", Lane.WORK)
    name = f"{method.containing_service.full_name}/{method.name}"
    parse = _passed if getattr(behaviour, "raw", False) else _parser(method)
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(_stream(name, behaviour, where, reception))
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(
            _one_request(name, _events(behaviour, parse), where, reception, lasting=True)
        )
    return grpc.unary_unary_rpc_method_handler(_one_request(name, _unary(behaviour, parse), where, reception))


def _one_request(
    name: str, serve: Callable[[WireCall, bytes], None], where: Lane, reception: Reception, *, lasting: bool = False
) -> Entry:
    def received(call: WireCall, data: bytes | None) -> None:
        if data is None:
            call.fail(InvalidArgumentError("the call came without a request", rule="wire_format", fix="send one"))
        else:
            reception.submit(where, call, data, partial(serve, call, data))

    intake = reception.intake[where]
    return Entry(name, lambda call: intake.receive(call, partial(received, call)), lasting=lasting)


def _unary(behaviour: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[[WireCall, bytes], None]:
    def serve(call: WireCall, data: bytes) -> None:
        if not call.active:  # cancelled while it waited: others are not to wait for what nobody reads
            call.finish()
            return
        try:
            call.finish(_bytes(behaviour(parse(data), call)))
        except Exception as error:
            call.fail(error)

    return serve


def _events(behaviour: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[[WireCall, bytes], None]:
    def serve(call: WireCall, data: bytes) -> None:
        outbox = Outbox(call)

        def send(event: Message | None) -> None:
            if event is None:
                outbox.end()
            else:
                outbox.send(event.SerializeToString())

        try:
            behaviour(parse(data), call, send)
        except Exception as error:
            outbox.end(error)

    return serve


def _stream(name: str, behaviour: Callable[..., bytes], where: Lane, reception: Reception) -> Entry:
    """A method that answers each message of a stream with one, ``behaviour(data, cancellation, client)``. The stream
    holds a thread while it works on a message only."""
    intake = reception.intake[where]

    def accept(call: WireCall) -> None:
        cancellation = Cancellation()
        call.client = reception.identify(call, b"")
        stream = reception.streams.open(call)
        call.on_end(cancellation.cancel)

        def received(data: bytes | None) -> None:
            if data is None:
                stream.complete()
            elif stream.work():
                intake.took(call, data)
                call.began_ns = time.perf_counter_ns()
                reception.submit(where, call, data, partial(answer, data))
                reception.streams.heard(stream, call.client)

        def answer(data: bytes) -> None:
            try:
                stream.answer(behaviour(data, cancellation, call.client), received, next_one)
            except Exception as error:
                stream.fail(error)

        def next_one() -> None:
            intake.next_of(call, received)

        next_one()

    return Entry(name, accept, lasting=True)


def _passed(data: bytes) -> bytes:
    return data


def _bytes(reply: Any) -> bytes:
    return reply if isinstance(reply, bytes) else reply.SerializeToString()


def _parser(method: MethodDescriptor) -> Callable[[bytes], Message]:
    kind = message_factory.GetMessageClass(method.input_type)
    return lambda data: parse_as(kind, data)


def parse_as(kind: Any, data: bytes) -> Any:
    """The message in ``data``; ``InvalidArgumentError`` if it is none, or one of too many parts."""
    check_structure(kind.DESCRIPTOR, data)
    try:
        return kind.FromString(data)
    except (DecodeError, UnicodeDecodeError):
        raise InvalidArgumentError(
            f"the request is not a {kind.DESCRIPTOR.full_name}",
            field="request",
            value=f"{len(data)} bytes",
            rule="wire_format",
            fix="make clients from the protocol files of this server's version",
        ) from None


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
