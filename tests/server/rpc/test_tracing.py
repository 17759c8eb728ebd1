"""Traces of calls: one trace from a client's own span to the parts of the server's time, and nothing when it is off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from rpc_harness import REAL, ServerProcess

import tilewright as tw
from tilewright.transport.tracing import call_span, launching
from tilewright_kit.types.errors import NotFoundError
from tilewright_server.clients.client import ANONYMOUS
from tilewright_server.devices.tracing import PacketTimes
from tilewright_server.endpoints.rpc.transport.calls import WireCall
from tilewright_server.endpoints.rpc.transport.tracing import Tracer, trace_id
from tilewright_server.endpoints.rpc.transport.traffic import Traffic
from tilewright_server.protocol.request_ids import Given

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="opentelemetry-exporter-otlp is not installed"
)

from opentelemetry import trace
from span_receivers import Memory, Receiver

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARTS = (("plan", 1000), ("build", 0), ("queue", 2000), ("device", 3000))


@pytest.fixture
def collector() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def ended(tracer: Tracer, parent: str | bytes | None, error: tuple[str, str] | None = None) -> None:
    metadata = () if parent is None else (("traceparent", parent),)
    if tracer.samples(metadata):
        tracer.ended("tilewright.v1.Dispatch/Run", 10_000, ANONYMOUS, metadata, PARTS, error, Given("chat-1"))


def test_it_is_decided_once_for_a_call_whether_it_is_sampled() -> None:
    """So its parts are noted if it is, and only then; the next request of a stream is decided anew."""
    traffic = Traffic()
    traffic.tracer = Tracer(Memory().provider, 0.5)
    nothing: Any = None
    event: Any = SimpleNamespace(call=None, invocation_metadata=())
    answers = []
    for _ in range(100):
        call = WireCall(event, None, nothing, traffic, nothing, nothing)
        answers.append(call.traced)
        assert all(call.traced == answers[-1] for _ in range(20))
    assert 10 < sum(answers) < 90


def test_a_trace_goes_from_the_program_through_the_client_to_the_parts_of_the_call(
    tmp_path: Path, collector: Receiver, monkeypatch: pytest.MonkeyPatch, kernel_cache: Path
) -> None:
    own = Memory()
    monkeypatch.setattr(trace, "get_tracer", own.provider.get_tracer)
    a = np.eye(16, dtype=np.float32)
    with ServerProcess(tmp_path, REAL, cache_dir=kernel_cache, **tracing_to(collector)) as server:
        with tw.connect(server.addresses[0], launch="server") as client:
            with own.provider.get_tracer("program").start_as_current_span("step") as step:
                assert (client.gemm(a, a) == a).all()
                assert (client.gemm(a, a) == a).all()
            client.gemm(a, a)  # within no span: not traced
        with grpc.insecure_channel(server.addresses[0]) as channel:  # any client of any protocol
            alive = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            alive(b"", metadata=(("traceparent", f"00-{TRACE}-{SPAN}-01"),), timeout=60)
        assert server.stop() == 0, server.log()
    (live,) = collector.named("inference.GRPCInferenceService/ServerLive")
    assert (live.trace_id.hex(), live.parent_span_id.hex()) == (TRACE, SPAN)
    of_client = {span.get_span_context().span_id: span for span in own.exporter.get_finished_spans()}
    calls = [span for span in of_client.values() if span.name.startswith("tilewright.")]
    assert len(calls) >= 2
    assert all(span.parent.span_id == step.get_span_context().span_id for span in calls)
    served = {span.span_id: span for span in collector.spans if span.name.startswith("tilewright.")}
    assert len(served) == len(calls)
    for span in served.values():
        assert int.from_bytes(span.trace_id, "big") == step.get_span_context().trace_id
        caller = of_client[int.from_bytes(span.parent_span_id, "big")]
        assert caller.name == span.name
        assert caller.start_time <= span.end_time_unix_nano and span.start_time_unix_nano < span.end_time_unix_nano
    parts = [span for span in collector.spans if "/" not in span.name]
    assert {"plan", "device"} <= {span.name for span in parts}
    for span in parts:
        whole = served[span.parent_span_id]
        assert whole.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= whole.end_time_unix_nano


def test_calls_of_a_client_that_does_not_record_are_not_recorded() -> None:
    memory = Memory()
    tracer = Tracer(memory.provider, 1.0)
    ended(tracer, f"00-{TRACE}-{SPAN}-00")
    assert memory.names == []
    ended(tracer, f"00-{TRACE}-{SPAN}-01")
    assert memory.names == ["plan", "queue", "device", "tilewright.v1.Dispatch/Run"]
    assert {f"{span.get_span_context().trace_id:032x}" for span in memory.exporter.get_finished_spans()} == {TRACE}
    assert memory.exporter.get_finished_spans()[-1].attributes["tilewright.request"] == "chat-1"


def test_the_ratio_decides_on_calls_without_a_trace() -> None:
    memory = Memory()
    never, always = Tracer(memory.provider, 0.0), Tracer(memory.provider, 1.0)
    for _ in range(100):
        ended(never, None)
    assert memory.names == []
    ended(always, None)
    assert memory.names[-1] == "tilewright.v1.Dispatch/Run"
    half = Tracer(memory.provider, 0.5)
    memory.exporter.clear()
    for _ in range(1000):
        ended(half, None)
    assert 350 < memory.names.count("tilewright.v1.Dispatch/Run") < 650


@pytest.mark.parametrize("parent", ["", "x", "01", b"\xff\xfe", f"00-{TRACE}-0-01", "é" * 4000])
def test_what_is_no_trace_context_harms_nothing(parent: str | bytes) -> None:
    memory = Memory()
    ended(Tracer(memory.provider, 0.0), parent)
    assert memory.names == []
    ended(Tracer(memory.provider, 1.0), parent)
    assert memory.exporter.get_finished_spans()[-1].parent is None  # a trace of its own


@pytest.mark.parametrize(
    "context", [b"", b"\n", b"\xff" * 2000, f"00-{TRACE}-{SPAN}".encode(), f"00-{TRACE}-{SPAN}-00".encode()]
)
def test_packets_without_a_context_that_records_are_not_recorded(context: bytes) -> None:
    memory = Memory()
    tracer = Tracer(memory.provider, 1.0)
    assert tracer.packet(context, "Launch", ANONYMOUS) is None
    tracer.attached(ANONYMOUS, context, PacketTimes(1, 2, 1, 1))
    assert memory.names == []


def test_a_state_of_a_trace_comes_along_and_a_failed_launch_says_why() -> None:
    memory = Memory()
    packet = Tracer(memory.provider, 0.0).packet(f"00-{TRACE}-{SPAN}-01\nk=v".encode(), "Launch", ANONYMOUS)
    assert packet is not None
    packet.failed(NotFoundError("no such binding"))
    packet.end()
    (span,) = memory.exporter.get_finished_spans()
    assert span.status.description == "no such binding"
    assert span.attributes["tilewright.code"] == "NOT_FOUND"
    assert span.get_span_context().trace_state.to_header() == "k=v"
    assert f"{span.parent.span_id:016x}" == SPAN


@pytest.mark.parametrize(
    ("parent", "told"), [(f"00-{TRACE}-{SPAN}-00", TRACE), ("x", ""), (b"\xff", ""), (None, ""), ("a-b-c-d", "")]
)
def test_a_call_is_logged_under_the_id_of_its_trace(parent: str | bytes | None, told: str) -> None:
    assert trace_id(parent) == told


def test_a_refused_call_says_why() -> None:
    memory = Memory()
    ended(Tracer(memory.provider, 1.0), None, ("INVALID_ARGUMENT", "no such operation"))
    span = memory.exporter.get_finished_spans()[-1]
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.status.description == "no such operation"
    assert span.attributes["tilewright.code"] == "INVALID_ARGUMENT"


def test_a_client_without_a_span_of_the_program_sends_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call_span("/a.B/C") is None
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert call_span("/a.B/C") is None


def test_an_endpoint_without_the_packages_is_an_error_at_the_start(tmp_path: Path) -> None:
    hidden = [sys.executable, "-c", f"import sys; sys.modules['opentelemetry.sdk.trace'] = None; {REAL[2]}"]
    server = ServerProcess(tmp_path, hidden, trace_endpoint="http://127.0.0.1:1")
    assert (server.ready, server.wait()) == ("", 1)
    assert "pip install 'tilewright[otel]'" in server.log()


def tracing_to(collector: Receiver) -> dict[str, Any]:
    return {"trace_endpoint": collector.endpoint, "trace_ratio": 0}


@pytest.fixture
def traced_launches() -> Iterator[None]:
    tw.trace_launches()
    yield
    tw.trace_launches(False)


@pytest.mark.extended
def test_launches_have_spans_where_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced_launches: None
) -> None:
    own = Memory()
    monkeypatch.setattr(trace, "get_tracer", own.provider.get_tracer)
    a = np.eye(16, dtype=np.float32)
    with ServerProcess(tmp_path, REAL) as server:
        with tw.connect(server.addresses[0], launch="server") as far, tw.connect(server.addresses[0]) as near:
            shared = far.asarray(a)
            calls = {
                "server": far.plan_gemm(shared, shared).bind(shared, shared, out=far.empty(a.shape, "fp32")),
                "caller": near.plan_gemm(a, a).bind(a, a, out=np.empty_like(a)),
            }
            plan = near.plan_gemm(a, a)
            for call in calls.values():
                call()
            assert own.names == [], "nothing of the program is recorded"
            for placement, call in calls.items():
                own.exporter.clear()
                with own.provider.get_tracer("program").start_as_current_span("step") as step:
                    call()
                spans = {span.name: span for span in own.exporter.get_finished_spans()}
                name = "launch" if placement == "server" else "launch gemm"
                assert set(spans) == {"step", name} | ({"device"} if placement == "server" else set())
                launch = spans[name]
                assert launch.parent.span_id == step.get_span_context().span_id
                assert launch.attributes["tilewright.launch"] == placement
                if placement == "server":
                    device = spans["device"]
                    assert device.parent.span_id == launch.get_span_context().span_id
                    assert launch.start_time <= device.start_time < device.end_time <= launch.end_time
                else:
                    assert launch.attributes["tilewright.problem"].startswith("gemm(a: fp32[16, 16]")
            own.exporter.clear()
            with own.provider.get_tracer("program").start_as_current_span("step"):
                plan(a, a)
            assert own.names == ["launch gemm", "step"]
        assert server.stop() == 0, server.log()


def test_one_trace_goes_over_the_local_socket_and_streams(
    tmp_path: Path,
    collector: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    kernel_cache: Path,
    traced_launches: None,
) -> None:
    own = Memory()
    monkeypatch.setattr(trace, "get_tracer", own.provider.get_tracer)
    a = np.eye(16, dtype=np.float32)
    with ServerProcess(tmp_path, REAL, cache_dir=kernel_cache, **tracing_to(collector)) as server:
        with tw.connect(server.addresses[0], launch="server") as client:
            plan = client.plan_gemm(a, a)
            with own.provider.get_tracer("program").start_as_current_span("step") as step:
                shared, out = client.asarray(a), client.empty(a.shape, "fp32")
                bound = plan.bind(shared, shared, out=out)
                bound()
                with client.pipeline() as pipeline:
                    for _ in range(3):
                        pipeline.launch(bound)
                with plan.stream() as stream:
                    assert (stream.submit(shared, shared).result() == a).all()
            bound()  # within no span: not traced
        assert server.stop() == 0, server.log()
    sent = {span.get_span_context().span_id: span for span in own.exporter.get_finished_spans()}
    served = [span for span in collector.spans if "/" in span.name]
    assert {span.name for span in served} == {
        "tilewright.local/RegisterRegion",
        "tilewright.local/Launch",
        "tilewright.v1.Dispatch/Bind",
        "tilewright.v1.Dispatch/ExecuteStream",
    }
    for span in served:
        assert int.from_bytes(span.trace_id, "big") == step.get_span_context().trace_id
        caller = sent[int.from_bytes(span.parent_span_id, "big")]
        assert caller.name == ("launch" if span.name.endswith("/Launch") else span.name)
        assert caller.parent.span_id == step.get_span_context().span_id
        assert caller.start_time <= span.start_time_unix_nano <= span.end_time_unix_nano
    launches = [span for span in served if span.name.endswith("/Launch")]
    counts = [value.value.int_value for span in launches for value in span.attributes if "launches" in value.key]
    assert sum(counts) == 4, "the pipeline's three, and the one before"
    for span in launches:
        devices = [item for item in collector.spans if (item.name, item.parent_span_id) == ("device", span.span_id)]
        assert len(devices) == dict(zip((item.span_id for item in launches), counts, strict=True))[span.span_id]
        for device in devices:
            assert span.start_time_unix_nano <= device.start_time_unix_nano < device.end_time_unix_nano
            assert device.end_time_unix_nano <= span.end_time_unix_nano


def test_a_launch_that_fails_says_so_and_one_that_is_not_wanted_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, traced_launches: None
) -> None:
    own = Memory()
    monkeypatch.setattr(trace, "get_tracer", own.provider.get_tracer)
    with own.provider.get_tracer("program").start_as_current_span("step"):
        assert launching(lambda: 0, "fine", {})() == 0
        assert launching(lambda: 7, "refused", {})() == 7
        assert launching(lambda: 7, "timed", {}, "time")() == 7
        with pytest.raises(ZeroDivisionError):
            launching(lambda: 1 // 0, "raises", {})()
    ended = [(span.name, span.status.status_code.name) for span in own.exporter.get_finished_spans()]
    assert ended == [
        ("fine", "UNSET"),
        ("refused", "ERROR"),
        ("device", "UNSET"),
        ("timed", "UNSET"),
        ("raises", "ERROR"),
        ("step", "UNSET"),
    ]
    tw.trace_launches(False)
    assert launching(len, "launch", {}) is len
