"""Where spans go in tests: to memory in this process, or to a receiver of OTLP, as a collector is one."""

from __future__ import annotations

import time
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

EXPORT = "Export"
SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


class Receiver:
    """Takes spans by OTLP, as a collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(1))
        handler = grpc.unary_unary_rpc_method_handler(self._export)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {EXPORT: handler}),))
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _export(self, data: bytes, _: object) -> bytes:
        for resource in trace_service_pb2.ExportTraceServiceRequest.FromString(data).resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return b""

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def gets(self, name: str, count: int) -> bool:
        """Wait until so many spans of a name have come; False after a minute."""
        deadline = time.monotonic() + 60
        while len(self.named(name)) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        return len(self.named(name)) == count

    def close(self) -> None:
        self._server.stop(None).wait()


class Memory:
    """A provider that keeps what it is given."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]
