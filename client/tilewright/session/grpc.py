"""Parts of gRPC that both clients use: options, the session's lease, and what its failures mean."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from tilewright.errors import (
    CancelledError,
    TilewrightError,
    UnavailableError,
    from_rpc,
    outcome_unknown,
    unbegun,
)
from tilewright.session.settings import FORK_VARIABLE, SERVE, serve_command
from tilewright.session.state import Core, Session
from tilewright.session.tls import Tls, channel_credentials, channel_options
from tilewright.transport.rpc import EXECUTE, EXPORT_BUFFER, FETCH_OBJECT, OPEN_LAUNCH_PAGE, Method, Rpc
from tilewright_proto.v1 import memory_pb2

__all__ = [
    "CHANNEL_OPTIONS",
    "call_failed",
    "call_local",
    "channel",
    "channel_closed",
    "heard",
    "identified",
    "lease_ended",
    "no_fork_support",
    "no_server",
    "open_request",
    "opened",
    "serialised",
]

CHANNEL_OPTIONS = (
    # The server states its limits; a reply of any size that we asked for is welcome.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # A connection of our own: no other client's backoff, no parent's connection after a fork.
    ("grpc.use_local_subchannel_pool", 1),
)


def channel(target: str, tls: Tls | None, kind: Any = grpc) -> Any:
    """A channel of ``kind``, which is ``grpc`` or ``grpc.aio``. Raises ``InvalidArgumentError`` for files of TLS."""
    if tls is None:
        return kind.insecure_channel(target, options=CHANNEL_OPTIONS)
    options = (*CHANNEL_OPTIONS, *channel_options(tls))
    return kind.secure_channel(target, channel_credentials(tls), options=options)


NOT_CONNECTED = "failed to connect to all addresses"
"""gRPC's words for a call that never left this process."""


def serialised(request: Message | bytes) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


def open_request(name: str) -> bytes:
    return memory_pb2.OpenSessionRequest(client_name=name).SerializeToString()


@contextlib.contextmanager
def identified(target: str, priority: str) -> Iterator[tuple[tuple[str, str], ...]]:
    """Metadata for opening a session, valid inside the block: its priority, and for a server at a Unix socket which
    process opens it, by the number of a memory file whose random name only its maker knows. Servers count what clients
    hold by process."""
    named = (("tilewright-priority", priority),)
    if not target.startswith("unix:") or not hasattr(os, "memfd_create"):
        yield named
        return
    name = "tilewright-" + secrets.token_hex(16)
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError:  # no descriptor to spare: the server does without
        yield named
        return
    try:
        yield (*named, ("tilewright-process", f"{os.getpid()}:{descriptor}:{name}"))
    finally:
        os.close(descriptor)


def opened(data: bytes) -> Session:
    """The session of the lease's first message. Raises ``UnavailableError``."""
    try:
        event = memory_pb2.SessionEvent.FromString(data)
    except DecodeError:
        event = memory_pb2.SessionEvent()
    if event.WhichOneof("event") == "closing":
        raise UnavailableError(f"the server takes no sessions: {event.closing.reason}", rule="session_open")
    if not event.opened.session:
        raise UnavailableError(
            "what answers there is no Tilewright server of this protocol",
            rule="session_open",
            fix=f"start one with: {SERVE}",
        )
    return Session(event.opened)


def heard(session: Session, data: bytes) -> None:
    """Take a later message of the lease."""
    with contextlib.suppress(DecodeError):
        session.hear(memory_pb2.SessionEvent.FromString(data))


def lease_ended(session: Session, code: grpc.StatusCode | None, details: str | None) -> None:
    """Note why the server ended a session (or that it is gone)."""
    if not session.lost:
        session.lost = details or (code.name.lower() if code is not None else "the server ended it") or "it ended"


def no_server(target: str, error: Any, timeout: float) -> TilewrightError:
    """The error of a session that could not be opened."""
    if error is None:
        reason = "it ended the session at once"
    elif isinstance(error, asyncio.TimeoutError) or error.code() is grpc.StatusCode.CANCELLED:
        reason = f"no answer within {timeout:g} s"
    elif error.code() is grpc.StatusCode.UNAVAILABLE:
        found = from_rpc(error)
        if found.rule != "grpc_status":
            return found
        reason = str(error.details()).rsplit("last error: ", 1)[-1]
    elif error.code() is grpc.StatusCode.UNIMPLEMENTED:
        reason = "what listens there does not speak tilewright.v1"
    else:
        return from_rpc(error)
    return UnavailableError(
        f"no Tilewright server answers at {target} ({reason})",
        field="target",
        value=target,
        rule="server_reachable",
        fix=f"start one with: {serve_command(target)}",
    )


def no_fork_support() -> TilewrightError:
    """The error of a forked child whose gRPC would crash it."""
    return UnavailableError(
        "gRPC was imported before tilewright, without support for forking: a forked child cannot use it",
        field=FORK_VARIABLE,
        rule="fork_support",
        fix=f"import tilewright first, or set {FORK_VARIABLE}=1, or start the child by spawn or forkserver",
    )


def call_local(session: Session, call: Rpc) -> Any:
    """Make a call over the local socket, which the session has. Raises ``TilewrightError``. If the connection breaks,
    what was registered over it is gone, so the session is of no use any more.
    """
    control = session.control
    if control is None:
        raise UnavailableError("this session has no local socket", field="session", rule="local_socket")
    try:
        reply = control.call(call.method.number, serialised(call.request), call.fds)
    except UnavailableError as error:
        if control.broken:  # no such call has effects that outlive the session
            session.lost = session.lost or "the local connection broke"
            unbegun(error)
        raise
    parsed = call.method.parse(reply.payload)
    return (parsed, reply.fds) if call.method in (EXPORT_BUFFER, FETCH_OBJECT, OPEN_LAUNCH_PAGE) else parsed


def call_failed(core: Core, session: Session, error: Any, method: Method = EXECUTE) -> TilewrightError:
    """The exception for a failed call. A broken connection and a session that the server does not know any more end
    the session here too. A call with an effect that may have been carried out is said to be one of unknown outcome.
    """
    found = from_rpc(error)
    core.note(found)
    if core.closed:
        return closed_during_call(error) if found.rule == "grpc_status" else found
    sent = True
    if found.rule == "session_token":
        session.lost, sent = session.lost or "the server ended it", False
    elif isinstance(found, UnavailableError) and found.rule == "grpc_status":
        session.lost = session.lost or "the connection broke"
        sent = NOT_CONNECTED not in found.message
    elif not (session.lost and isinstance(found, CancelledError) and found.rule == "grpc_status"):
        return found
    if sent and method.effect:
        return outcome_unknown(f"the server at {core.target} went away ({found.message})")
    return unbegun(
        UnavailableError(
            f"the server at {core.target} went away during the call: {found.message}",
            field="session",
            rule="session_alive",
            fix="start the server again if it is gone, then call reconnect() or make a new client",
        )
    )


def channel_closed(core: Core, session: Session, error: object) -> TilewrightError:
    """The error of a call over a channel that was closed before: with the client, or with its session."""
    return closed_during_call(error) if core.closed else core.over(session.lost or "its channel was closed")


def closed_during_call(error: object) -> TilewrightError:
    return UnavailableError(
        "the client was closed",
        field="client",
        value=str(error),
        rule="client_open",
        fix="make another: tilewright.connect()",
    )
