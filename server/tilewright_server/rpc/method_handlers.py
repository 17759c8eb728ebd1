"""From servicer methods to gRPC handlers.

Handlers take and return bytes: messages are parsed in the worker thread instead of gRPC's one event thread, garbage
gets a typed error, and a method that answers the same bytes again need not serialise. A servicer's method has the
call's name in snake case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from grpc import ServicerContext as Context

from tilewright_kit.types.errors import CancelledError, InvalidArgumentError
from tilewright_server.engine.call import Call, Cancellation
from tilewright_server.rpc.status import abort

__all__ = ["Context", "call_of", "lease", "own_threads", "raw", "register"]

F = TypeVar("F", bound=Callable[..., Any])

FOREVER_S = 1e8
"""gRPC shows the absence of a deadline as a time in the far future."""


def raw(method: F) -> F:
    """Mark a method that takes the request's bytes and returns the reply's."""
    method.raw = True  # type: ignore[attr-defined]
    return method


def lease(method: F) -> F:
    """Mark a server-streaming method that takes a function to send with and returns at once: it holds no thread while
    its stream is open.
    """
    method.lease = True  # type: ignore[attr-defined]
    return method


def own_threads(method: F) -> F:
    """Mark a method whose calls may stay open for long: they get threads of their own, so that they cannot starve the
    others.
    """
    method.own_threads = True  # type: ignore[attr-defined]
    return method


def call_of(context: Context) -> Call:
    """The engine's view of a gRPC call: its deadline, and the end of the client's interest."""
    remaining = context.time_remaining()
    cancellation = Cancellation()
    call = Call.within(remaining if remaining is not None and remaining < FOREVER_S else None, cancellation)
    if not context.add_callback(cancellation.cancel):
        raise CancelledError("the caller has gone away", rule="cancelled", fix="send it again if it is still wanted")
    return call


def register(server: grpc.Server, servicer: object, service: ServiceDescriptor, stream_pool: Any) -> None:
    """Serve all methods of ``service`` by ``servicer``."""
    handlers = {method.name: _handler(servicer, method, stream_pool) for method in service.methods}
    server.add_registered_method_handlers(service.full_name, handlers)


def _handler(servicer: object, method: MethodDescriptor, stream_pool: Any) -> grpc.RpcMethodHandler:
    behaviour = getattr(servicer, _snake(method.name))
    parse = _passed if getattr(behaviour, "raw", False) else _parser(method)
    if method.client_streaming:
        handle = _streaming(behaviour)
    elif getattr(behaviour, "lease", False):
        handle = _leased(behaviour, parse)
    elif method.server_streaming:
        handle = _events(behaviour, parse)
    else:
        handle = _unary(behaviour, parse)
    if getattr(behaviour, "own_threads", False):
        handle.experimental_thread_pool = stream_pool  # type: ignore[attr-defined]
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(handle)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(handle)
    return grpc.unary_unary_rpc_method_handler(handle)


def _unary(behaviour: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
    def handle(data: bytes, context: Context) -> bytes:
        try:
            return _bytes(behaviour(parse(data), context))
        except Exception as error:
            abort(context, error)

    return handle


def _events(behaviour: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
    def handle(data: bytes, context: Context) -> Iterator[bytes]:
        try:
            for event in behaviour(parse(data), context):
                yield _bytes(event)
        except Exception as error:
            abort(context, error)

    return handle


def _leased(behaviour: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
    def handle(data: bytes, context: Context, send: Callable[[bytes | None], None]) -> None:
        try:
            behaviour(parse(data), context, lambda event: send(None if event is None else event.SerializeToString()))
        except Exception as error:
            abort(context, error)

    handle.experimental_non_blocking = True  # type: ignore[attr-defined]
    return handle


def _streaming(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    def handle(requests: Iterator[bytes], context: Context, send: Callable[[bytes | None], None]) -> None:
        try:
            behaviour(requests, context, send)
        except Exception as error:
            if context.is_active():
                abort(context, error)

    handle.experimental_non_blocking = True  # type: ignore[attr-defined]
    return handle


def _passed(data: bytes) -> bytes:
    return data


def _bytes(reply: Any) -> bytes:
    return reply if isinstance(reply, bytes) else reply.SerializeToString()


def _parser(method: MethodDescriptor) -> Callable[[bytes], Message]:
    kind = message_factory.GetMessageClass(method.input_type)
    return lambda data: parse_as(kind, data)


def parse_as(kind: Any, data: bytes) -> Any:
    """The message in ``data``; ``InvalidArgumentError`` if it is none."""
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
