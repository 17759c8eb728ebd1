"""The standard health service, as a servicer of ours: its threads are its own, and no watcher holds one."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from tilewright_kit.types.errors import NotFoundError
from tilewright_server.endpoints.rpc.transport.calls import WireCall
from tilewright_server.endpoints.rpc.transport.method_handlers import Lane, Send, events, lane
from tilewright_server.session.quotas import Quotas, Resource

__all__ = ["HealthServicer"]


class HealthServicer:
    """``state`` has what is set and watched."""

    def __init__(self, quotas: Quotas) -> None:
        self.state = health.HealthServicer()
        self._quotas = quotas

    @lane(Lane.HEALTH)
    def check(self, request: health_pb2.HealthCheckRequest, _: WireCall) -> health_pb2.HealthCheckResponse:
        status = _Status()
        reply: health_pb2.HealthCheckResponse = self.state.Check(request, status)
        if status.code is not None:
            raise NotFoundError(
                "there is no such service", field="service", value=request.service, rule="health_service", fix="use ''"
            )
        return reply

    @lane(Lane.HEALTH)
    @events
    def watch(self, request: health_pb2.HealthCheckRequest, context: WireCall, send: Send) -> None:
        self._quotas.take(Resource.STREAMS, context.client)
        give = partial(self._quotas.give, Resource.STREAMS, context.client)
        if not context.on_end(give):
            give()
        elif self._knows(request):
            self.state.Watch(request, _Watched(context), send)
        else:  # nor will it ever: names of clients are not kept
            send(health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN))

    def _knows(self, request: health_pb2.HealthCheckRequest) -> bool:
        status = _Status()
        self.state.Check(request, status)
        return status.code is None


class _Status:
    """The part of a servicer's context that ``Check`` uses."""

    code: grpc.StatusCode | None = None

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code


class _Watched:
    """The part that ``Watch`` uses."""

    def __init__(self, call: WireCall) -> None:
        self._call = call

    def add_callback(self, callback: Any) -> bool:
        if self._call.on_end(callback):
            return True
        callback()
        return False
