"""Traces of calls, by OpenTelemetry, where the program uses it: a span for each call of gRPC within one of its own."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["CallSpan", "call_span"]

API = "opentelemetry.trace"


class CallSpan:
    """A span of a call, and the metadata by which the server's part finds it."""

    __slots__ = ("_api", "_span", "metadata")

    def __init__(self, api: Any, path: str) -> None:
        self._api = api
        method = path.removeprefix("/")
        service, _, name = method.partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        self._span = api.get_tracer("tilewright").start_span(method, kind=api.SpanKind.CLIENT, attributes=attributes)
        context = self._span.get_span_context()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"
        self.metadata: tuple[tuple[str, str], ...] = (("traceparent", parent),)
        if context.trace_state:
            self.metadata = (*self.metadata, ("tracestate", context.trace_state.to_header()))

    def end(self, error: BaseException | None = None) -> None:
        """End the span, with the error that the call failed with."""
        if error is not None:
            self._span.set_status(self._api.StatusCode.ERROR, str(error))
        self._span.end()


def call_span(path: str) -> CallSpan | None:
    """The span of a call that begins; None unless the program uses OpenTelemetry and has a span open."""
    api = sys.modules.get(API)
    if api is None or not api.get_current_span().get_span_context().is_valid:
        return None
    return CallSpan(api, path)
