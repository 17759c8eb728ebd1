"""Traces of calls, by OpenTelemetry: a span for each call that is sampled, with the parts that its time went to.

Spans are made when a call has ended, from the times that the server takes of every call anyway: a call that is not
sampled costs a look at its metadata and a number of chance, once, and nothing is noted for it.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from tilewright_kit.types.errors import InvalidArgumentError, TilewrightError
from tilewright_server.clients.client import Client
from tilewright_server.devices.tracing import PacketTimes
from tilewright_server.endpoints.rpc.transport.status import status_of
from tilewright_server.engine.types import Outcome
from tilewright_server.protocol.request_ids import Named, current

__all__ = ["TRACEPARENT", "PacketTrace", "Parts", "Tracer", "open_tracer", "trace_id"]

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
CONTEXT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")
"""A W3C trace context."""
LOCAL = "tilewright.local/"
"""Beginning of the names of spans of the local socket."""
SAMPLED = 1
"""Its flag: whoever calls records its part."""
Parts = Iterable[tuple[str, int]]
"""Names of parts of a call in the order in which they happen, and their times in nanoseconds."""


class Span(NamedTuple):
    """Span of what has ended, with the times of its parts: nanoseconds since 1970."""

    method: str
    begin: int
    end: int
    parts: Iterable[tuple[str, int, int]] = ()
    error: tuple[str, str] | None = None
    """Code and reason of a refusal."""
    launches: int | None = None
    request: str = ""
    """Id of the request."""


def laid_out(parts: Parts, begin: int, end: int) -> Iterable[tuple[str, int, int]]:
    """Parts in their places. They follow each other; what is none of them (copies, conversion) lies before the last."""
    rest = [(name, part) for name, part in parts if part > 0]
    at = begin
    for index, (name, part) in enumerate(rest):
        start = at if index < len(rest) - 1 else max(at, end - part)
        at = min(end, start + part)
        yield name, start, at


def carried(context: bytes) -> dict[str, str] | None:
    """A context as it comes over the local socket (``local.proto``); None unless its client records it."""
    parent, _, state = context.decode("latin-1").partition("\n")
    found = CONTEXT.fullmatch(parent)
    if found is None or not int(found[1], 16) & SAMPLED:
        return None
    return {TRACEPARENT: parent, TRACESTATE: state} if state else {TRACEPARENT: parent}


def trace_id(parent: str | bytes | None) -> str:
    """Id of a trace, for logs; empty for what is no context."""
    return parent.split("-")[1] if isinstance(parent, str) and CONTEXT.fullmatch(parent) else ""


class PacketTrace:
    """Trace of one packet of the local socket while it is served."""

    def __init__(self, note: Callable[[Span], None], method: str) -> None:
        self._note = note
        self._method = LOCAL + method
        self._begin = time.time_ns()
        self._parts: list[tuple[str, int, int]] = []
        self._launches: int | None = None
        self._error: tuple[str, str] | None = None

    def launched(self, outcome: Outcome) -> None:
        """Note a launch that has just ended."""
        end = time.time_ns()
        device = end - outcome.device_ns
        if outcome.queue_ns:
            self._parts.append(("queue", device - outcome.queue_ns, device))
        self._parts.append(("device", device, end))
        self._launches = (self._launches or 0) + 1

    def failed(self, error: TilewrightError) -> None:
        """Note why a launch or the call failed."""
        self._error = (status_of(error).name, error.reason)

    def end(self) -> None:
        """Note the packet."""
        end = time.time_ns()
        self._note(Span(self._method, self._begin, end, self._parts, self._error, self._launches, current()))


class Tracer:
    """Makes spans of calls that have ended. Thread-safe; raises nothing."""

    def __init__(self, provider: Any, ratio: float) -> None:
        """``provider`` records all that it is given. Calls whose client records them are sampled, those whose client
        does not are not, and of calls without a trace ``ratio`` of 1."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api: Any = trace
        self._provider = provider
        self._tracer = provider.get_tracer("tilewright")
        self._contexts = TraceContextTextMapPropagator()
        self._ratio = ratio

    def samples(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """True if a call with this metadata is to be noted: as its client has decided, or else by chance."""
        for key, value in metadata:
            if key == TRACEPARENT:
                parent = CONTEXT.fullmatch(value) if isinstance(value, str) else None
                if parent is not None:
                    return bool(int(parent[1], 16) & SAMPLED)
                break
        return random.random() < self._ratio

    def ended(
        self,
        method: str,
        ns: int,
        client: Client,
        metadata: Iterable[tuple[str, str | bytes]],
        parts: Parts,
        error: tuple[str, str] | None,
        named: Named,
    ) -> None:
        """Note a call that is sampled and took ``ns`` nanoseconds until now; ``error`` has the code and the reason of a
        refusal."""
        carrier = {key: value for key, value in metadata if key in (TRACEPARENT, TRACESTATE) and isinstance(value, str)}
        end = time.time_ns()
        laid = laid_out(parts, end - ns, end)
        span = Span(method, end - ns, end, laid, error, request=named.request)
        self._note(span, "grpc", carrier, client)

    def packet(self, context: bytes, method: str, client: Client) -> PacketTrace | None:
        """Trace of a packet of the local socket that begins now, with the context that its client gave."""
        carrier = carried(context)
        return None if carrier is None else PacketTrace(partial(self._local, carrier, client), method)

    def attached(self, client: Client, context: bytes, times: PacketTimes) -> None:
        """Note a packet of launches that a device served by itself."""
        carrier = carried(context)
        if carrier is None:
            return
        device = times.queued_ns - times.device_ns if times.waits else times.queued_ns
        parts = [("device", device, device + times.device_ns)] if times.device_ns else []
        span = Span(LOCAL + "Launch", times.started_ns, times.queued_ns, parts, None, times.launches)
        self._local(carrier, client, span)

    def _local(self, carrier: Mapping[str, str], client: Client, span: Span) -> None:
        self._note(span, "tilewright", carrier, client)

    def _note(self, span: Span, system: str, carrier: Mapping[str, str], client: Client) -> None:
        with suppress(Exception):  # a trace that cannot be made is none
            self._make(span, system, carrier, client)

    def _make(self, noted: Span, system: str, carrier: Mapping[str, str], client: Client) -> None:
        service, _, name = noted.method.partition("/")
        attributes: dict[str, Any] = {
            "rpc.system": system,
            "rpc.service": service,
            "rpc.method": name,
            "tilewright.principal": client.principal,
        }
        if noted.request:
            attributes["tilewright.request"] = noted.request
        if noted.launches is not None:
            attributes["tilewright.launches"] = noted.launches
        span = self._tracer.start_span(
            noted.method,
            context=self._contexts.extract(carrier),
            kind=self._api.SpanKind.SERVER,
            attributes=attributes,
            start_time=noted.begin,
        )
        inside = self._api.set_span_in_context(span)
        for part, begin, end in noted.parts:
            self._tracer.start_span(part, context=inside, start_time=begin).end(end)
        if noted.error is not None:
            code, reason = noted.error
            span.set_attribute("tilewright.code", code)
            span.set_status(self._api.StatusCode.ERROR, reason)
        span.end(noted.end)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def open_tracer(endpoint: str, ratio: float) -> Tracer | None:
    """A tracer that sends spans to an OTLP receiver (``http://HOST:4317``); None without an ``endpoint``.

    Raises ``InvalidArgumentError`` if the packages are missing.
    """
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidArgumentError(
            f"traces need a package that is missing: {error.name}",
            field="trace_endpoint",
            value=endpoint,
            rule="trace_packages",
            fix="pip install 'tilewright[otel]', or leave trace_endpoint empty",
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "tilewright"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)))
    return Tracer(provider, ratio)
