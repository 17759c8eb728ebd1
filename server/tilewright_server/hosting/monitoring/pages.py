"""Pages of the HTTP listener: metrics, and the probes of a kubelet."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tilewright_server.endpoints.readiness import Readiness
from tilewright_server.endpoints.rpc.listeners import Listener
from tilewright_server.endpoints.rpc.relay import Relayed
from tilewright_server.endpoints.rpc.server import RpcServer
from tilewright_server.hosting.monitoring.http import HttpListener, Page
from tilewright_server.hosting.monitoring.metrics import Metrics
from tilewright_server.protocol.inherited import Inherited
from tilewright_server.service import Service

__all__ = ["http_listener"]


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
        return [item.relay.counts() for item in listeners() if item.relay is not None]

    metrics = Metrics(
        service, traffic.calls, traffic.times, traffic.classes, rpc.waiting, lambda: not readiness.reason, relays
    )

    def counted() -> Page:
        return Page(200, metrics.page(), metrics.content_type)

    def alive() -> Page:
        return Page(503, b"gRPC does not answer\n") if silent() else Page(200, b"ok\n")

    def ready() -> Page:
        reason = readiness.reason
        return Page(503, f"{reason}\n".encode()) if reason else Page(200, b"ok\n")

    return HttpListener(address, {"/metrics": counted, "/healthz": alive, "/readyz": ready}, inherited)
