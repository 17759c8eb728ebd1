"""Products on the GPU of this very process, on PyTorch's tensors: what a kernel costs, without the service.

Ours and the library's take turns. Before each launch the caches are flushed by a write of twice their size, and events
on one stream stand directly around the launch, so that neither launches nor warm caches count: what
``triton.testing.do_bench`` does, for two contenders at a time. What was written last still has to go to memory while
the launch runs; a flush by reading leaves nothing behind.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.selection.strategies import Explicit, Selector
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.devices.cuda.provider import CudaProvider
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.types import EngineOptions, Selection
from tilewright_tools.tuning.measure.testbed import Loaded

__all__ = ["Cuda", "Product", "describe"]

NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "bf8",
    torch.int8: "int8",
    torch.int32: "int32",
}
FLUSH_BYTES = 256 << 20


def describe(tensor: torch.Tensor) -> TensorDesc:
    return TensorDesc.of(NAMES[tensor.dtype], tuple(tensor.shape), tuple(tensor.stride()))


class Product:
    """A kernel, loaded and bound to tensors."""

    def __init__(
        self,
        cuda: Cuda,
        request: OperationRequest,
        tensors: Mapping[str, torch.Tensor],
        kernel: KernelConfig | str,
        plan_of: Callable[[Any, Any, DeviceInfo], ExecutionPlan] | None = None,
    ) -> None:
        """``kernel``: one, or the name of one that the operation knows. ``plan_of``: instead of the operation's own
        way to plan a kernel.
        """
        operation = cuda.engine.operations[request.operation]
        problem = operation.parse(request)
        self.config = cuda.choose(operation, problem, kernel)
        plan = (plan_of or operation.plan)(problem, self.config, cuda.info)
        for result in cuda.engine.build(list(plan.kernels), cuda.info.arch, lambda _: None, Call()):
            if result.error is not None:
                raise result.error
        self._loaded = Loaded(cuda.engine, cuda.device, plan)
        names = [item.name for item in plan.operands]
        self._program = cuda.device.program(self._loaded.stages, names, counter_bytes=plan.counter_bytes)
        self._addresses = [tensors[name].data_ptr() for name in names]
        self._workspace = torch.empty(max(plan.workspace_bytes, 16), dtype=torch.uint8, device="cuda")
        self._stream = cuda.stream
        self._keep = dict(tensors)

    def __call__(self) -> None:
        self._stream.launch(self._program, self._addresses, 0, 0, self._workspace.data_ptr())


class Cuda:
    """The first GPU, opened in this process and shared with PyTorch (both use the device's primary context)."""

    def __init__(self, cache: Path | None = None, strategy: str = "auto") -> None:
        torch.zeros(1, device="cuda")
        self._scratch = tempfile.TemporaryDirectory()
        plugins = PluginManager()
        plugins.load_entry_points()
        folder = cache or Path(self._scratch.name) / "cache"
        self.engine = Engine(EngineOptions(cache_dir=folder, default_device="cpu:0"), plugins)
        self.strategy = strategy
        provider = CudaProvider()
        self.info = provider.discover()[0]
        self.device = provider.open(self.info)
        self.stream = self.device.open_stream()
        self.torch_stream = torch.cuda.ExternalStream(int(self.stream.lane.stream))
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def __enter__(self) -> Cuda:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.synchronize()
        self.engine.close()
        self._scratch.cleanup()

    def choose(self, operation: Operation[Any, Any], problem: Any, kernel: KernelConfig | str) -> KernelConfig:
        """The kernel that the server would take, or the one given or named."""
        if isinstance(kernel, KernelConfig):
            return Selector(Explicit(kernel)).select(operation, problem, self.info).config
        strategy = self.engine.catalogs.strategy(Selection(strategy="" if kernel else self.strategy, kernel=kernel))
        return Selector(strategy).select(operation, problem, self.info).config

    def product(
        self, tensors: Mapping[str, torch.Tensor], attributes: Mapping[str, Any] | None = None, kernel: str = ""
    ) -> Product:
        """``out = epilogue(a @ b)`` on tensors named as the operation names its operands."""
        inputs = {name: describe(tensor) for name, tensor in tensors.items() if name != "out"}
        outputs = {"out": describe(tensors["out"])}
        return Product(self, OperationRequest("gemm", inputs, outputs, dict(attributes or {})), tensors, kernel)

    def alternate(
        self, calls: Mapping[str, Callable[[], object]], seconds: float = 0.15, *, by_reading: bool = False
    ) -> dict[str, float]:
        """Median seconds of each call on the device, in turns, with cold caches: flushed by a write, or by reading."""
        samples: dict[str, list[float]] = {name: [] for name in calls}
        torch.cuda.synchronize()
        with torch.cuda.stream(self.torch_stream):
            once = max(self._round(calls, samples, 3, by_reading), 1e-6)
            for times in samples.values():
                times.clear()
            self._round(calls, samples, max(15, min(300, round(seconds / once))), by_reading)
        return {name: statistics.median(times) for name, times in samples.items()}

    def _round(
        self, calls: Mapping[str, Callable[[], object]], samples: dict[str, list[float]], count: int, by_reading: bool
    ) -> float:
        words = self._flush.view(torch.int32)
        events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(count):
            for name, call in calls.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if by_reading:
                    words.amax()
                else:
                    words.zero_()
                begin.record()
                call()
                end.record()
                events.append((name, begin, end))
        torch.cuda.synchronize()
        total = 0.0
        for name, begin, end in events:
            samples[name].append(begin.elapsed_time(end) / 1e3)
            total += samples[name][-1]
        return total / (count * max(len(calls), 1))
