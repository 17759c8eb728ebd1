"""Pages of the HTTP listener: metrics, and the probes of a kubelet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from tilewright_server.endpoints.readiness import Readiness
from tilewright_server.endpoints.rpc.listeners import Listener, TcpAddress
from tilewright_server.endpoints.rpc.relay import Relayed
from tilewright_server.endpoints.rpc.server import RpcServer
from tilewright_server.hosting.monitoring.http import HttpListener, Page, http_address
from tilewright_server.hosting.monitoring.metrics import Metrics
from tilewright_server.protocol.inherited import Inherited
from tilewright_server.service import Service
from tilewright_server.settings import Settings

__all__ = ["health_listeners", "http_listener"]

log = logging.getLogger("tilewright")


def health_listeners(rpc: RpcServer, settings: Settings, inherited: Inherited, parts: ExitStack) -> list[Listener]:
    """The listener of the setting ``health_listen``, if it names one, which ``parts`` close: gRPC's health service
    alone, without TLS, as kubelets ask for it. Raises what ``Listener.bind`` does, and ``InvalidArgumentError``."""
    if not settings.health_listen:
        return []
    address = TcpAddress(*http_address(settings.health_listen, "health_listen"))
    peers = rpc.peers if settings.relay else None
    listener = Listener(address, peers=peers, inherited=inherited, settings=settings, setting="health_listen")
    listener.bind(rpc.serve_health())
    parts.callback(listener.close)
    log.info("health checks over gRPC at %s", listener.address)
    return [listener]


def http_listener(
    address: str,
    service: Service,
    rpc: RpcServer,
    readiness: Readiness,
    silent: Callable[[], bool],
    listeners: Callable[[], Iterable[Listener]],
    inherited: Inherited,
) -> HttpListener:
    """The listener of ``address``; ``silent`` says that gRPC does not answer, ``listeners`` are its own.

    Raises what ``HttpListener`` and ``Metrics`` do.
    """
    traffic = rpc.traffic

    def relays() -> list[Relayed]:
        return [relay.counts() for item in listeners() for relay in item.relays]

    metrics = Metrics(service, traffic.calls, traffic.times, rpc.waiting, lambda: not readiness.reason, relays)

    def counted() -> Page:
        return Page(200, metrics.page(), metrics.content_type)

    def alive() -> Page:
        return Page(503, b"gRPC does not answer\n") if silent() else Page(200, b"ok\n")

    def ready() -> Page:
        reason = readiness.reason
        return Page(503, f"{reason}\n".encode()) if reason else Page(200, b"ok\n")

    return HttpListener(address, {"/metrics": counted, "/healthz": alive, "/readyz": ready}, inherited)
