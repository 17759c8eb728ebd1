"""A server with simulated AMD GPUs, and this process as its client, whose tensors are the GPU's."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from driver_calls import DriverCalls

__all__ = ["SERVE", "TO_DEVICE", "TO_HOST", "Gpu", "OnGpu", "check", "operands", "serving"]

SERVE = """
import os, sys
from tilewright_server.devices.hip import discovery
discovery._LIBRARIES = (os.environ["TW_SIMULATED_HIP"],)
from tilewright_tools.cli import main
sys.argv[0] = "tilewright"
sys.exit(main())
"""
TO_DEVICE, TO_HOST = 1, 2


@contextmanager
def serving(folder: Path, cache: Path, variables: dict[str, str], device: str = "hip:0") -> Iterator[str]:
    """A server's address."""
    flags = ["--listen", f"unix:{folder}/s", "--cache-dir", str(cache), "--device", device]
    command = [sys.executable, "-c", SERVE, "serve", *flags, "--log-level", "warning"]
    env = {**os.environ, **variables}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready")
        try:
            yield f"unix:{folder}/s"
        finally:
            process.terminate()
        assert process.wait(20) == 0


class Gpu(DriverCalls):
    """What a framework would do in this process."""

    def use(self, device: int) -> None:
        self.call("hipSetDevice", device)

    def allocate(self, nbytes: int) -> int:
        return self.made("hipMalloc", ctypes.c_size_t(nbytes))

    def mapped(self, nbytes: int) -> int:
        size, zero = ctypes.c_size_t(nbytes), ctypes.c_uint64()
        handle = self.made("hipMemCreate", size, (ctypes.c_int * 32)(1, 1, 1, 0), zero)
        address = self.made("hipMemAddressReserve", size, zero, zero, zero)
        self.call("hipMemMap", ctypes.c_uint64(address), size, zero, ctypes.c_uint64(handle), zero)
        self.call("hipMemSetAccess", ctypes.c_uint64(address), size, (ctypes.c_int * 3)(1, 0, 3), ctypes.c_size_t(1))
        return address

    def stream(self) -> int:
        return self.made("hipStreamCreateWithFlags", 1)

    def idle(self, stream: int) -> bool:
        return bool(self.library.hipStreamQuery(ctypes.c_uint64(stream)) == 0)

    def hold(self, stream: int) -> Callable[[], None]:
        event = ctypes.c_uint64()
        self.call("simHold", ctypes.c_uint64(stream), ctypes.byref(event))
        return lambda: self.call("simRelease", event)

    def copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        self.call("hipMemcpy", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), kind)


class OnGpu:
    """An array of the host in memory of the GPU; what other libraries see of it."""

    def __init__(self, gpu: Gpu, array: Any, address: int = 0, stream: int = 1) -> None:
        self.gpu, self.shape, self.dtype, self.nbytes = gpu, array.shape, array.dtype, array.nbytes
        self.address = address or gpu.allocate(array.nbytes)
        gpu.copy(self.address, np.ascontiguousarray(array).ctypes.data, array.nbytes, TO_DEVICE)
        self.__cuda_array_interface__ = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": stream,
        }

    def numpy(self) -> Any:
        found = np.empty(self.shape, self.dtype)
        self.gpu.copy(found.ctypes.data, self.address, self.nbytes, TO_HOST)
        return found


def operands(dtype: Any, m: int = 64, n: int = 48, k: int = 96) -> tuple[Any, Any]:
    generator = np.random.default_rng(k)
    if np.dtype(dtype) == np.int8:
        return tuple(generator.integers(-8, 8, shape, np.int8) for shape in ((m, k), (k, n)))  # type: ignore[return-value]
    return tuple(generator.standard_normal(shape, np.float32).astype(dtype) for shape in ((m, k), (k, n)))  # type: ignore[return-value]


def check(found: Any, a: Any, b: Any) -> None:
    """Against NumPy's product of the same elements: sums in fp32, in any order, and the rounding of the output."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    exact = a @ b
    if np.issubdtype(found.dtype, np.integer):
        assert (found == exact).all()
        return
    sums = a.shape[1] * 2.0**-24 * (np.abs(a) @ np.abs(b))
    allowed = sums + float(ml_dtypes.finfo(found.dtype).eps) * (np.abs(exact) + sums)
    assert (np.abs(found.astype(np.float64) - exact) <= allowed).all()
