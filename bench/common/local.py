"""Products that an engine of this very process plans, builds and runs: what a kernel costs, without the service."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from common import peers
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.execution.prepared import Prepared
from tilewright_server.engine.types import EngineOptions, Selection

__all__ = ["Local", "Product", "aligned", "describe"]

_PAGE = 4096


def aligned(shape: tuple[int, ...], dtype: Any) -> peers.Array:
    """Zeros that begin at a page, as everything does in shared memory; large arrays of NumPy lie 16 bytes off."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + _PAGE, np.uint8)
    start = -raw.ctypes.data % _PAGE
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def describe(array: peers.Array, dtype: str) -> TensorDesc:
    """The tensor that an array is."""
    return TensorDesc.of(dtype, array.shape, [stride // array.itemsize for stride in array.strides])


class Product:
    """A prepared plan, bound to operands."""

    def __init__(self, engine: Engine, prepared: Prepared, arrays: Mapping[str, peers.Array]) -> None:
        self._engine, self.prepared, self._arrays = engine, prepared, dict(arrays)
        self._addresses = [self._arrays[item.name].ctypes.data for item in prepared.operands]
        self.kernel = ", ".join(prepared.kernels)

    def timed(self, repeat: int) -> float:
        """Seconds on the device, of ``repeat`` executions."""
        return self._engine.execute(self.prepared, self._addresses, Call(), repeat).device_ns / 1e9


class Local:
    """An engine with ``threads`` threads. Its kernels are built into ``cache``, or into a folder that vanishes."""

    def __init__(self, threads: int, cache: Path | None = None) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        plugins = PluginManager()
        plugins.load_entry_points()
        options = EngineOptions(
            cache_dir=cache or Path(self._scratch.name) / "cache", cpu_threads=threads, default_device="cpu:0"
        )
        self.engine = Engine(options, plugins)

    def __enter__(self) -> Local:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()
        self._scratch.cleanup()

    @property
    def device(self) -> DeviceInfo:
        return self.engine.devices.info()

    def candidates(self, request: OperationRequest) -> list[KernelConfig]:
        """The kernels that the operation offers for a problem."""
        operation = self.engine.operations[request.operation]
        return list(operation.candidates(operation.parse(request), self.device))

    def build(self, kernels: Sequence[KernelConfig]) -> None:
        """Build kernels, as many at a time as there are workers."""
        for result in self.engine.build(kernels, self.device.arch, lambda _: None, Call()):
            if result.error is not None:
                raise result.error

    def product(self, request: OperationRequest, arrays: Mapping[str, peers.Array], kernel: str = "") -> Product:
        """Plan a request: with the kernel of that name, or with the one that the server would take."""
        return Product(self.engine, self.engine.plan(request, Selection(kernel=kernel), Call()), arrays)

    def packed(self, b: peers.Array, dtype: str, m: int, kernel: str = "") -> tuple[TensorDesc, peers.Array]:
        """B [K, N] in the format that suits products with ``m`` rows, or that the named kernel writes."""
        request = OperationRequest("gemm_pack_b", {"b": describe(b, dtype)}, {}, {"m": m})
        prepared = self.engine.plan(request, Selection(kernel=kernel), Call())
        desc = next(item.desc for item in prepared.operands if item.name == "out")
        out = aligned((desc.nbytes,), np.uint8)
        Product(self.engine, prepared, {"b": b, "out": out}).timed(1)
        return desc, out
