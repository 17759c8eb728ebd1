"""Traces by OpenTelemetry, where the program uses it: a span for each call of gRPC within one of its own, and for each
launch, if it asks for these: they take a microsecond where there is no gRPC to wait for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, TypeVar

__all__ = ["CallSpan", "Returned", "call_span", "launching", "trace_launches"]

API = "opentelemetry.trace"
Returned = Literal["status", "time", ""]
F = TypeVar("F", bound=Callable[..., int])
_wanted = False
"""True if launches have spans."""


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


def trace_launches(on: bool = True) -> None:
    """Have launches make spans, in this process and over the local socket, within spans of the program that are
    recorded. To be called before clients connect and plans are made; what was bound before stays as it was.

    A launch on a CPU is its span; one over the local socket has a span `device` within it, of the time that the server
    measured. On a GPU the span ends when the launch is queued.
    """
    global _wanted
    _wanted = on


def launching(launch: F, name: str, attributes: dict[str, Any], returns: Returned = "status") -> F:
    """``launch`` itself, or with a span around it, if launches are to have one. It returns a status, zero where all is
    well, or the nanoseconds that a device took until now, or something else."""
    if not _wanted:
        return launch

    @wraps(launch)
    def traced(*args: Any) -> int:
        api: Any = sys.modules.get(API)
        if api is None or not api.get_current_span().is_recording():
            return launch(*args)
        tracer = api.get_tracer("tilewright")
        span = tracer.start_span(name, attributes=attributes)
        try:
            result = launch(*args)
        except BaseException as error:
            span.set_status(api.StatusCode.ERROR, str(error))
            span.end()
            raise
        end = time.time_ns()
        if returns == "time" and result > 0:
            tracer.start_span("device", context=api.set_span_in_context(span), start_time=end - result).end(end)
        elif returns == "status" and result:
            span.set_status(api.StatusCode.ERROR, f"status {result}")
        span.end(end)
        return result

    return traced  # type: ignore[return-value]
