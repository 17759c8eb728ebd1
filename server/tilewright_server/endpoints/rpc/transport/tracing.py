"""Traces of calls, by OpenTelemetry: a span for each call that is sampled, with the parts that its time went to.

Spans are made when a call has ended, from the times that the server takes of every call anyway: a call that is not
sampled costs a look at its metadata.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_server.engine.client import Client

__all__ = ["Parts", "Tracer", "open_tracer"]

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
CONTEXT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")
"""A W3C trace context."""
SAMPLED = 1
"""Its flag: whoever calls records its part."""
Parts = Iterable[tuple[str, int]]
"""Names of parts of a call in the order in which they happen, and their times in nanoseconds."""


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

    def ended(
        self,
        method: str,
        ns: int,
        client: Client,
        metadata: Iterable[tuple[str, str | bytes]],
        parts: Parts,
        error: tuple[str, str] | None,
    ) -> None:
        """Note a call that took ``ns`` nanoseconds until now; ``error`` has the code and the reason of a refusal."""
        given = next((value for key, value in metadata if key == TRACEPARENT), None)
        parent = CONTEXT.fullmatch(given) if isinstance(given, str) else None
        if parent is None:
            if random.random() >= self._ratio:
                return
        elif not int(parent[1], 16) & SAMPLED:
            return
        with suppress(Exception):  # a trace that cannot be made is none
            self._note(method, ns, client, metadata, parts, error)

    def _note(
        self,
        method: str,
        ns: int,
        client: Client,
        metadata: Iterable[tuple[str, str | bytes]],
        parts: Parts,
        error: tuple[str, str] | None,
    ) -> None:
        carrier = {key: value for key, value in metadata if key in (TRACEPARENT, TRACESTATE) and isinstance(value, str)}
        end = time.time_ns()
        service, _, name = method.partition("/")
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": name,
            "tilewright.principal": client.principal,
        }
        begin = end - ns
        span = self._tracer.start_span(
            method,
            context=self._contexts.extract(carrier),
            kind=self._api.SpanKind.SERVER,
            attributes=attributes,
            start_time=begin,
        )
        inside = self._api.set_span_in_context(span)
        # Parts follow each other; what is none of them (copies, conversion) lies before the last.
        rest = [(name, part) for name, part in parts if part > 0]
        at = begin
        for index, (name, part) in enumerate(rest):
            start = at if index < len(rest) - 1 else max(at, end - part)
            at = min(end, start + part)
            self._tracer.start_span(name, context=inside, start_time=start).end(at)
        if error is not None:
            code, reason = error
            span.set_attribute("tilewright.code", code)
            span.set_status(self._api.StatusCode.ERROR, reason)
        span.end(end)

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
