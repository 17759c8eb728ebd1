"""Counters of a running server, asked for without a session."""

from __future__ import annotations

from typing import Any

__all__ = ["server_statistics", "target_of"]

_STATISTICS = "/tilewright.v1.Kernels/Statistics"


def server_statistics(target: str, timeout: float) -> tuple[str, Any]:
    """Address and ``StatisticsReply`` of a server, by default the user's own. Raises ``UnavailableError``."""
    import grpc

    from tilewright.session.grpc import channel
    from tilewright.session.tls import tls_for
    from tilewright_kit.types.errors import UnavailableError
    from tilewright_proto.v1 import kernels_pb2

    where = target_of(target)
    try:
        with channel(where, tls_for(where)) as opened:
            ask = opened.unary_unary(_STATISTICS, response_deserializer=kernels_pb2.StatisticsReply.FromString)
            return where, ask(kernels_pb2.StatisticsRequest().SerializeToString(), timeout=timeout)
    except grpc.RpcError as error:
        raise UnavailableError(
            f"the server does not answer: {error.details()}",
            field="target",
            value=where,
            rule="server_answer",
            fix="start one with `tilewright serve`, or name its address with --target",
        ) from error


def target_of(target: str) -> str:
    """The address that a target names; the user's own server's for none."""
    from tilewright.session.settings import default_target, normalise_target

    return normalise_target(target) if target else default_target()
