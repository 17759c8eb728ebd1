"""Traces by OpenTelemetry, where the program uses it: a span for each call of gRPC within one of its own, and for each
launch, if it asks for these: they take a microsecond where there is no gRPC to wait for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, TypeVar

__all__ = ["CallSpan", "Returned", "call_span", "launching", "local_span", "trace_launches"]

API = "opentelemetry.trace"
Returned = Literal["status", "time", ""]
F = TypeVar("F", bound=Callable[..., Any])
_wanted = False
"""True if launches have spans."""


class CallSpan:
    """A span of a call, and the metadata by which the server's part finds it."""

    __slots__ = ("_api", "_span", "metadata")

    def __init__(self, api: Any, path: str, system: str = "grpc") -> None:
        self._api = api
        method = path.removeprefix("/")
        service, _, name = method.partition("/")
        attributes = {"rpc.system": system, "rpc.service": service, "rpc.method": name}
        self._span = api.get_tracer("tilewright").start_span(method, kind=api.SpanKind.CLIENT, attributes=attributes)
        self.metadata = _metadata(self._span)

    @property
    def context(self) -> str:
        """The same as the local socket carries it."""
        return _text(self.metadata)

    def __enter__(self) -> CallSpan:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """End the span, with the error that the call failed with."""
        if error is not None:
            self._span.set_status(self._api.StatusCode.ERROR, str(error))
        self._span.end()


def _metadata(span: Any) -> tuple[tuple[str, str], ...]:
    """W3C's headers of a span."""
    context = span.get_span_context()
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"
    if not context.trace_state:
        return (("traceparent", parent),)
    return ("traceparent", parent), ("tracestate", context.trace_state.to_header())


def _text(metadata: tuple[tuple[str, str], ...]) -> str:
    """The headers as a packet of the local socket has them."""
    return "\n".join(value for _, value in metadata)


def local_span(method: str) -> CallSpan | None:
    """The span of a call over the local socket; None unless the program records one of its own."""
    api = sys.modules.get(API)
    if api is None or not api.get_current_span().is_recording():
        return None
    return CallSpan(api, f"tilewright.local/{method}", "tilewright")


def call_span(path: str) -> CallSpan | None:
    """The span of a call that begins; None unless the program uses OpenTelemetry and has a span open."""
    api = sys.modules.get(API)
    if api is None or not api.get_current_span().get_span_context().is_valid:
        return None
    return CallSpan(api, path)


def trace_launches(on: bool = True) -> None:
    """Have launches make spans, in this process and over the local socket, within spans of the program that are
    recorded. To be called before clients connect and plans are made; what was bound before stays as it was.

    A launch on a CPU is its span. One over the local socket is one trace with the server's part, if the server records
    traces; otherwise it has a span `device` within it, of the time that the server measured. On a GPU the span ends
    when the launch is queued.
    """
    global _wanted
    _wanted = on


def launching(
    launch: F,
    name: str,
    attributes: dict[str, Any],
    returns: Returned = "status",
    announce: Callable[[str], bool] | None = None,
) -> F:
    """``launch`` itself, or with a span around it, if launches are to have one. It returns a status, zero where all is
    well, or the nanoseconds that a device took until now, or something else. ``announce`` tells the server of the span;
    False if it makes none of its own."""
    if not _wanted:
        return launch

    @wraps(launch)
    def traced(*args: Any) -> Any:
        api: Any = sys.modules.get(API)
        if api is None or not api.get_current_span().is_recording():
            return launch(*args)
        tracer = api.get_tracer("tilewright")
        kind = api.SpanKind.INTERNAL if announce is None else api.SpanKind.CLIENT
        span = tracer.start_span(name, kind=kind, attributes=attributes)
        try:
            told = announce is not None and announce(_text(_metadata(span)))
            result = launch(*args)
        except BaseException as error:
            span.set_status(api.StatusCode.ERROR, str(error))
            span.end()
            raise
        end = time.time_ns()
        if returns == "time" and result > 0 and not told:
            tracer.start_span("device", context=api.set_span_in_context(span), start_time=end - result).end(end)
        elif returns == "status" and result:
            span.set_status(api.StatusCode.ERROR, f"status {result}")
        span.end(end)
        return result

    return traced  # type: ignore[return-value]
