"""The Open Inference Protocol of a server: at the addresses of our own protocol, or at others of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

from tilewright_server.endpoints.kserve.servicer import SERVICE, KServeServicer
from tilewright_server.endpoints.readiness import Readiness
from tilewright_server.endpoints.rpc.access.credentials import Certificates
from tilewright_server.endpoints.rpc.listeners import Listener, TcpAddress, UnixAddress
from tilewright_server.endpoints.rpc.server import RpcServer
from tilewright_server.protocol.inherited import Inherited
from tilewright_server.protocol.unix_paths import SocketAccess
from tilewright_server.service import Service
from tilewright_server.settings import Settings

__all__ = ["Host", "serve_kserve"]


class Host(Protocol):
    """The parts of a server that the protocol needs."""

    settings: Settings
    service: Service
    rpc: RpcServer
    readiness: Readiness
    listeners: list[Listener]
    inherited: Inherited


def serve_kserve(
    host: Host,
    addresses: Sequence[UnixAddress | TcpAddress],
    access: SocketAccess,
    certificates: Certificates | None,
    parts: ExitStack,
) -> list[Listener]:
    """Serve the protocol, if it is on, at ``addresses``, or where ``host`` listens if there are none. ``parts`` take it
    down again.

    Returns the listeners of the addresses. Raises what ``Listener.bind`` does.
    """
    settings = host.settings
    if not settings.kserve:
        return []
    servicer = KServeServicer(
        host.service,
        lambda: not host.readiness.reason,
        settings.log_level,
        open_socket=settings.socket_mode != "600",
        fill=settings.kserve_fill,
    )
    parts.callback(servicer.close)
    server = host.rpc.serve(servicer, SERVICE, apart=bool(addresses))
    own = []
    for address in addresses:
        peers = host.rpc.peers if settings.relay else None
        listener = Listener(
            address, access, peers=peers, inherited=host.inherited, settings=settings, setting="kserve_listen"
        )
        listener.bind(server, certificates)
        parts.callback(listener.close)
        own.append(listener)
    at = [listener.address for listener in own or host.listeners]
    servicer.listen(
        {str(item.path) for item in at if isinstance(item, UnixAddress)},
        {item.port for item in at if isinstance(item, TcpAddress)},
    )
    return own
