"""Reports of a running server to its operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["server_statistics", "sessions_of", "target_of"]

_STATISTICS = "/tilewright.v1.Kernels/Statistics"


def server_statistics(target: str, timeout: float) -> tuple[str, Any]:
    """Address and ``StatisticsReply`` of a server, by default the user's own. Raises ``UnavailableError``."""
    import grpc

    from tilewright.session.grpc import channel
    from tilewright.session.tls import tls_for
    from tilewright_proto.v1 import kernels_pb2

    where = target_of(target)
    try:
        with channel(where, tls_for(where)) as opened:
            ask = opened.unary_unary(_STATISTICS, response_deserializer=kernels_pb2.StatisticsReply.FromString)
            return where, ask(kernels_pb2.StatisticsRequest().SerializeToString(), timeout=timeout)
    except grpc.RpcError as error:
        raise _no_answer(where, error) from error


def sessions_of(target: str, timeout: float) -> tuple[str, Any]:
    """Address and ``ListSessionsReply`` of a server, asked within a session, which proves whose process this is.

    Raises ``UnavailableError``, and ``AccessError`` for a caller without the right.
    """
    import grpc

    from tilewright.session.grpc import channel, identified
    from tilewright.session.tls import tls_for
    from tilewright_kit.types.errors import AccessError
    from tilewright_proto.v1 import error_pb2, memory_pb2, memory_pb2_grpc

    where = target_of(target)
    try:
        with channel(where, tls_for(where)) as opened, identified(where, "interactive") as metadata:
            stub = memory_pb2_grpc.MemoryStub(opened)  # type: ignore[no-untyped-call]
            lease = stub.OpenSession(
                memory_pb2.OpenSessionRequest(client_name="tilewright sessions"), metadata=metadata
            )
            token = next(lease).opened.session
            try:
                return where, stub.ListSessions(memory_pb2.ListSessionsRequest(session=token), timeout=timeout)
            finally:
                lease.cancel()
    except grpc.RpcError as error:
        data = dict(error.trailing_metadata() or ()).get("tilewright-error-bin", b"")
        detail = error_pb2.ErrorDetail.FromString(data)
        if detail.code == AccessError.code:
            raise AccessError(
                detail.message, field=detail.field, value=detail.value, rule=detail.rule, fix=detail.fix
            ) from error
        raise _no_answer(where, error) from error


def _no_answer(where: str, error: Any) -> Exception:
    from tilewright_kit.types.errors import UnavailableError

    return UnavailableError(
        f"the server does not answer: {error.details()}",
        field="target",
        value=where,
        rule="server_answer",
        fix="start one with `tilewright serve`, or name its address with --target",
    )


def target_of(target: str) -> str:
    """The address that a target names. For none, that of ``TILEWRIGHT_TARGET``; else, as in the server's own container,
    the first one at which ``TILEWRIGHT_LISTEN`` has a server listen; else that of the user's own server."""
    from tilewright.session.settings import default_target, normalise_target
    from tilewright_server.protocol.unix_paths import own_place
    from tilewright_server.settings import default_listen, listen_of_environment

    if target:
        return normalise_target(target)
    usual = default_target()
    named = listen_of_environment() if usual == default_listen() else ""
    if named.startswith("unix:"):
        return f"unix:{own_place(Path(named.removeprefix('unix:')), tell=False)}"
    return named or usual
