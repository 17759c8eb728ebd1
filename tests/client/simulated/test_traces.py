"""One trace from a program through client and server to the process of a GPU, whose driver is simulated."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from simulated_gpu import PART, Gpu, service

import tilewright as tw

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("cuda") is None,
        reason="NVIDIA's packages are not installed: pip install 'tilewright[cuda]'",
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)"),
]
pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
pytest.importorskip("opentelemetry.exporter.otlp", reason="opentelemetry-exporter-otlp is not installed")

from opentelemetry import trace  # noqa: E402
from span_receivers import Memory, Receiver  # noqa: E402


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    memory = Memory()
    monkeypatch.setattr(trace, "get_tracer", memory.provider.get_tracer)
    tw.trace_launches()
    yield memory
    tw.trace_launches(False)


def test_one_trace_goes_from_the_program_to_events_of_the_gpu(
    libraries: tuple[Path, Path],
    tmp_path: Path,
    kernel_cache: Path,
    gpu: Gpu,
    torch: Any,
    own: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds, of the server
    collector = Receiver()
    a, b, out = (torch.Tensor(gpu.allocate(PART), (128, 128), "bfloat16") for _ in range(3))
    flags = ("--trace-endpoint", collector.endpoint, "--trace-ratio", "0")
    with service(libraries, tmp_path, kernel_cache, *flags) as target, tw.connect(target, launch="server") as client:
        bound = client.plan_gemm(a, b).bind(a, b, out=out)
        bound()
        assert gpu.comes_to_rest(torch.current)
        release = gpu.hold(torch.current)
        with own.provider.get_tracer("program").start_as_current_span("step") as step:
            bound()
            with client.pipeline() as pipeline:
                for _ in range(5):
                    pipeline.launch(bound)
        release()
        bound()  # within no span: not traced
        assert gpu.comes_to_rest(torch.current)
        launches = {span.get_span_context().span_id: span for span in own.exporter.get_finished_spans()}
        sent = [span for span in launches.values() if span.name == "launch"]
        assert collector.gets("device", len(sent))
    collector.close()
    served = collector.named("tilewright.local/Launch")
    assert len(served) == len(sent)
    counts = []
    for span in served:
        assert int.from_bytes(span.trace_id, "big") == step.get_span_context().trace_id
        caller = launches[int.from_bytes(span.parent_span_id, "big")]
        assert (caller.name, caller.parent.span_id) == ("launch", step.get_span_context().span_id)
        assert caller.start_time <= span.start_time_unix_nano <= span.end_time_unix_nano
        counts += [item.value.int_value for item in span.attributes if item.key == "tilewright.launches"]
        (device,) = (item for item in collector.named("device") if item.parent_span_id == span.span_id)
        assert device.start_time_unix_nano < device.end_time_unix_nano
    assert sum(counts) == 6
