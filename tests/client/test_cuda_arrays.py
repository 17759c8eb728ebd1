"""PyTorch's tensors on a GPU, through the service: correct, in order, without a copy and without waiting on the host.

Needs a GPU and PyTorch: ``pytest -m gpu tests/client``.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tilewright as tw
from tilewright.gpu import cuda
from tilewright_tools.cli.private_server import PrivateServer

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

SLEEP_CYCLES = 400_000_000
"""About 0.2 s of an H200."""


@pytest.fixture(scope="module")
def torch() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not module.cuda.is_available():
        pytest.skip("there is no GPU that PyTorch can use")
    return module


@pytest.fixture(scope="module")
def target(torch: Any) -> Iterator[str]:
    with PrivateServer(("--device", "cuda:0"), timeout=60.0) as running:
        yield running


@pytest.fixture
def client(target: str) -> Iterator[tw.Client]:
    with tw.connect(target) as opened:
        if not any(device.kind == "cuda" for device in opened.session.devices):
            pytest.skip("the service runs no CUDA device")
        yield opened


def random(torch: Any, *shape: int, dtype: str = "bfloat16") -> Any:
    if dtype == "int8":
        return torch.randint(-8, 8, shape, dtype=torch.int8, device="cuda")
    values = torch.randn(shape, device="cuda")
    return values.to(getattr(torch, dtype))


def check(torch: Any, result: Any, a: Any, b: Any, factor: float = 1.0) -> None:
    wanted = (a.double() @ b.double()) * factor
    error = (result.double() - wanted).norm() / wanted.norm()
    bound = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 8e-3, torch.int32: 0.0}[result.dtype]
    assert error.item() <= bound, f"relative error {error.item():.2e}"


class ByCapsule:
    """Shows a tensor by DLPack only."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.tensor.__dlpack__(**arguments)


class ByInterface:
    """Shows a tensor by the CUDA array interface only."""

    def __init__(self, tensor: Any) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__
        self.tensor = tensor


# ---- results ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"])
def test_tensors_go_in_and_come_out(torch: Any, client: tw.Client, dtype: str) -> None:
    a, b = random(torch, 128, 256, dtype=dtype), random(torch, 192, 256, dtype=dtype).t()
    result = client.gemm(a, b)
    assert isinstance(result, torch.Tensor)
    assert result.device == a.device
    check(torch, result, a.float(), b.float())
    out = torch.empty_like(result)
    assert client.gemm(a, b, out=out) is out
    assert torch.equal(out, result)
    assert client.report is not None
    assert client.report.bytes_copied == client.report.staged_bytes == 0


def test_activations_and_bias_are_fused(torch: Any, client: tw.Client) -> None:
    a, b, bias = random(torch, 64, 128), random(torch, 128, 96), random(torch, 96)
    result = client.gemm(a, b, bias=bias, activation="relu")
    wanted = torch.relu(a.float() @ b.float() + bias.float())
    assert ((result.float() - wanted).norm() / wanted.norm()).item() < 1e-2


def test_other_libraries_tensors_go_by_dlpack_and_by_the_interface(torch: Any, client: tw.Client) -> None:
    a, b = random(torch, 64, 64, dtype="float16"), random(torch, 64, 64, dtype="float16")
    for wrap in (ByCapsule, ByInterface):
        out = torch.zeros(64, 64, dtype=torch.float16, device="cuda")
        client.gemm(wrap(a), wrap(b), out=wrap(out))
        check(torch, out, a, b)
        result = client.gemm(wrap(a), wrap(b))
        assert isinstance(result, tw.DeviceArray)
        check(torch, torch.from_dlpack(result), a, b)
        check(torch, torch.from_numpy(result.numpy()).cuda(), a, b)


def test_memory_of_the_server_is_an_array_here(torch: Any, client: tw.Client) -> None:
    mine = client.device_empty((64, 64), "bf16")
    view = torch.from_dlpack(mine)
    view.copy_(random(torch, 64, 64))
    torch.cuda.synchronize()
    result = client.gemm(mine, view)
    check(torch, torch.from_dlpack(result), view, view)


def test_views_into_larger_allocations(torch: Any, client: tw.Client) -> None:
    large = random(torch, 1000, 1000)
    a, b = large[100:228, 64:320], large[300:556, 512:640]
    out = torch.zeros(500, 500, dtype=torch.bfloat16, device="cuda")
    part = out[16:144, 8:136]
    client.gemm(a, b, out=part)
    check(torch, part, a, b)
    assert out[:16].abs().sum().item() == 0
    check(torch, client.gemm(a.t(), b.t().contiguous().t()[:128]), a.t(), b[:128])


def test_odd_addresses_and_sizes(torch: Any, client: tw.Client) -> None:
    flat = random(torch, 40_000, dtype="float16")
    for offset in (1, 2, 3, 4):
        a = flat[offset : offset + 33 * 77].view(33, 77)
        b = flat[offset + 5000 : offset + 5000 + 77 * 51].view(77, 51)
        assert a.data_ptr() % 16
        check(torch, client.gemm(a, b), a, b)


# ---- order ----


def test_a_slow_producer_is_waited_for_by_the_device_alone(torch: Any, client: tw.Client) -> None:
    a, b = torch.zeros(256, 256, dtype=torch.bfloat16, device="cuda"), random(torch, 256, 256)
    value, out = random(torch, 256, 256), torch.empty(256, 256, dtype=torch.bfloat16, device="cuda")
    bound = client.plan_gemm(a, b).bind(a, b, out=out)
    bound()
    for side in (torch.cuda.current_stream(), torch.cuda.Stream()):
        for _ in range(5):
            torch.cuda.synchronize()
            a.zero_(), out.zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(SLEEP_CYCLES // 10)
                a.copy_(value)
                bound()
                copy = out * 2  # sees the result, in the order of the stream
                a.zero_()  # the launch has read it by then
            side.synchronize()
            check(torch, copy, value, b, 2.0)


def test_two_streams_do_not_mix(torch: Any, client: tw.Client) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    b = random(torch, 256, 256)
    inputs = [torch.zeros(256, 256, dtype=torch.bfloat16, device="cuda") for _ in streams]
    values = [random(torch, 256, 256) for _ in streams]
    outs = [torch.zeros_like(a) for a in inputs]
    plan = client.plan_gemm(inputs[0], b)
    bounds = [plan.bind(a, b, out=out) for a, out in zip(inputs, outs, strict=True)]
    for bound in bounds:
        bound()
    torch.cuda.synchronize()
    for number, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES // (10 - 9 * number))
            inputs[number].copy_(values[number])
        bounds[number].launch(stream=stream)
    torch.cuda.synchronize()
    for number in range(2):
        check(torch, outs[number], values[number], b)


def test_a_launch_returns_before_the_kernel_begins(
    torch: Any, client: tw.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = random(torch, 512, 512), random(torch, 512, 512)
    out = torch.zeros(512, 512, dtype=torch.bfloat16, device="cuda")
    bound = client.plan_gemm(a, b).bind(a, b, out=out)
    bound()
    torch.cuda.synchronize()
    waited: list[str] = []
    for name in ("synchronize", "finish"):
        monkeypatch.setattr(cuda.Driver, name, lambda *_, name=name: waited.append(name))
    torch.cuda._sleep(SLEEP_CYCLES)
    launch = bound.launch()
    with client.pipeline() as pipeline:
        for _ in range(100):
            pipeline.launch(bound)
    client.gemm(a, b, out=out)
    assert not launch.done
    assert not torch.cuda.current_stream().query()
    assert waited == []
    torch.cuda.synchronize()
    assert launch.done
    check(torch, out, a, b)


def test_a_chain_of_launches_is_in_order(torch: Any, client: tw.Client) -> None:
    x = torch.eye(64, device="cuda", dtype=torch.float32)
    y, turn = torch.empty_like(x), torch.eye(64, device="cuda").roll(1, 0).contiguous()
    there, back = client.plan_gemm(x, turn).bind(x, turn, out=y), client.plan_gemm(y, turn).bind(y, turn, out=x)
    with client.pipeline() as pipeline:
        for _ in range(32 * 20 + 5):
            pipeline.launch(there)
            pipeline.launch(back)
    assert torch.equal(x, torch.eye(64, device="cuda").roll(10, 0))


def test_small_launches_are_fast(torch: Any, client: tw.Client) -> None:
    a = random(torch, 16, 64)
    b, out = random(torch, 64, 64), torch.empty(16, 64, dtype=torch.bfloat16, device="cuda")
    bound = client.plan_gemm(a, b).bind(a, b, out=out)
    taken = []
    for number in range(3000):
        start = time.perf_counter_ns()
        bound()
        taken.append(time.perf_counter_ns() - start)
        if number % 200 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    start = time.perf_counter()
    with client.pipeline() as pipeline:
        for _ in range(50_000):
            pipeline.launch(bound)
    torch.cuda.synchronize()
    rate = 50_000 / (time.perf_counter() - start)
    p50 = statistics.median(taken) / 1e3
    sys.stdout.write(f"\nbound(): p50 {p50:.1f} us; pipeline: {rate:.0f} launches/s\n")
    assert p50 < 100
    assert rate > 20_000


def test_the_snippets_of_the_guide_run(client: tw.Client) -> None:
    guide = Path(__file__).resolve().parents[2] / "docs" / "client.md"
    snippets = re.findall(r"^```python gpu\n(.*?)^```", guide.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 3
    names: dict[str, Any] = {"client": client, "tw": tw}
    for snippet in snippets:
        exec(snippet, names)


# ---- memory that comes and goes ----


def test_blocks_that_were_freed_and_used_again(torch: Any, client: tw.Client) -> None:
    for _ in range(4):
        a, b = random(torch, 2048, 2048), random(torch, 2048, 2048)
        check(torch, client.gemm(a, b), a, b)
        del a, b
        client.release_exports()
        torch.cuda.empty_cache()
    for _ in range(4):  # without telling the client: the blocks change under it
        a, b = random(torch, 2048, 2048), random(torch, 2048, 2048)
        check(torch, client.gemm(a, b), a, b)
        del a, b
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


EXPANDABLE = """
import sys, warnings
warnings.simplefilter("ignore")
import tilewright as tw
import torch
client = tw.connect(sys.argv[1])
a, b = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
c = client.gemm(a, b)
error = ((c.double() - a.double() @ b.double()).norm() / (a.double() @ b.double()).norm()).item()
assert error < 2e-3, error
a = torch.randn(4096, 4096, device="cuda")
c = client.gemm(a, a)
error = ((c - a @ a).norm() / (a @ a).norm()).item()
assert error < 2e-3, error
client.close()
"""


def test_expandable_segments_go_by_descriptor(torch: Any, client: tw.Client) -> None:
    words = "expandable_segments:True"
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": words, "PYTORCH_ALLOC_CONF": words}
    command = [sys.executable, "-c", EXPANDABLE, client.target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


DYING = """
import os, sys, warnings
warnings.simplefilter("ignore")
import tilewright as tw
import torch
client = tw.connect(sys.argv[1])
block = torch.empty(int(sys.argv[2]), dtype=torch.uint8, device="cuda")  # which the service maps as a whole
a = block[: 4 << 24].view(torch.float32).view(4096, 4096).normal_()
b = torch.randn(4096, 16, device="cuda")
bound = client.plan_gemm(a, b).bind(a, b, out=torch.empty(4096, 16, device="cuda"))
bound()
torch.cuda.synchronize()
sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.readline()
bound()
os.kill(os.getpid(), 9)
"""


def test_the_death_of_a_client_frees_what_it_held(torch: Any, client: tw.Client) -> None:
    """A quarter of what is free, so that it shows beside what other processes take and give back meanwhile."""
    client.gemm(random(torch, 64, 64), random(torch, 64, 64))
    torch.cuda.synchronize()
    sessions = client.kernels.statistics()["sessions"]
    nbytes = torch.cuda.mem_get_info()[0] // 4
    command = [sys.executable, "-c", DYING, client.target, str(nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as dying:
        assert dying.stdout is not None
        assert dying.stdout.readline() == "ready\n"
        free = torch.cuda.mem_get_info()[0]
        dying.communicate("\n", timeout=60)

    def is_over() -> bool:
        given_back = torch.cuda.mem_get_info()[0] - free > nbytes // 2
        return given_back and client.kernels.statistics()["sessions"] == sessions

    deadline = time.monotonic() + 60
    while not is_over():
        assert time.monotonic() < deadline, "the memory of a dead client, or its session, is still held"
        time.sleep(0.05)
    a, b = random(torch, 64, 64), random(torch, 64, 64)
    check(torch, client.gemm(a, b), a, b)


def test_wrong_memory_is_refused_with_its_reason(torch: Any, client: tw.Client) -> None:
    a = random(torch, 64, 64)
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.gemm(a.requires_grad_(), a)
    assert caught.value.rule == "autograd"
    with pytest.raises(tw.InvalidArgumentError):
        client.gemm(a.detach().double(), a.detach().double())
    plan = client.plan_gemm(a.detach(), a.detach())
    with pytest.raises(tw.InvalidArgumentError, match="plan was made for"):
        plan(a.detach()[:32], a.detach())


# ---- graphs ----


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a product on another stream"])
def test_a_captured_graph_launches_in_this_process(client: tw.Client, torch: Any, beside: bool) -> None:
    a, b, c, d = (random(torch, *shape) for shape in ((257, 520), (520, 136), (64, 72), (72, 80)))
    out, other = (torch.full(shape, float("nan"), device="cuda", dtype=a.dtype) for shape in ((257, 136), (64, 80)))
    bound = client.plan_gemm(a, b, out=out).bind(a, b, out=out)
    bound.launch()
    client.grouped_gemm([c], [d], out=[other])
    assert client.report is not None
    assert client.report.placement == "caller"
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        bound.launch()
        if beside:
            with torch.cuda.stream(side):
                client.grouped_gemm([c], [d], out=[other])
    a.copy_(random(torch, *a.shape))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    check(torch, out, a, b)
    check(torch, other, c, d)


def test_a_captured_graph_has_a_workspace_of_its_own(client: tw.Client, torch: Any) -> None:
    a, b = random(torch, 64, 4096), random(torch, 4096, 64)
    plan = client.plan_gemm(a, b, split_k=16)
    plan(a, b)
    assert client.report is not None
    assert client.report.placement == "caller"
    assert "cluster1x1x" not in client.report.kernels[0]  # parts that meet in a cluster need none
    out = torch.full((64, 64), float("nan"), device="cuda", dtype=a.dtype)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        plan(a, b, out=out)
    for _ in range(3):
        a.copy_(random(torch, *a.shape))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(torch, out, a, b)
