"""The shapes that are measured, and the peers that are measured against: NumPy (OpenBLAS) and PyTorch (MKL, oneDNN).

Import this only in a process that was started with ``timing.peer_environment``: the libraries read their thread counts
and their choice of kernels when they are loaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Shape:
    """A product [m, k] x [k, n]; ``note`` says what it stands for."""

    m: int
    n: int
    k: int
    note: str = ""

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


SHAPES = (
    Shape(256, 256, 256, "small square"),
    Shape(512, 512, 512, "square"),
    Shape(1024, 1024, 1024, "square"),
    Shape(2048, 2048, 2048, "square"),
    Shape(4096, 4096, 1024, "large"),
    Shape(4096, 64, 4096, "tall, few columns"),
    Shape(128, 4096, 4096, "128 tokens"),
    Shape(8192, 128, 1024, "tall and skinny"),
    Shape(1, 4096, 4096, "one token: bytes decide"),
    Shape(4096, 1, 4096, "matrix times vector"),
    Shape(8, 4096, 4096, "8 tokens"),
)
PACKED_SHAPES = (
    Shape(128, 4096, 4096, "128 tokens"),
    Shape(32, 4096, 4096, "32 tokens"),
    Shape(1, 4096, 4096, "one token"),
)
DTYPES = ("fp32", "bf16", "int8")

NUMPY_DTYPES: dict[str, Any] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8": ml_dtypes.float8_e4m3fn,
    "bf8": ml_dtypes.float8_e5m2,
    "int8": np.int8,
}


def random(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    """Random data of a NumPy dtype: normal for floats, the whole range for int8."""
    rng = np.random.default_rng(seed)
    if dtype == "int8":
        return rng.integers(-128, 128, shape, np.int8)
    return rng.standard_normal(shape, np.float32).astype(NUMPY_DTYPES[dtype])


def torch() -> Any:
    """PyTorch, or None where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch as module

    return module


def set_threads(threads: int) -> None:
    """PyTorch's own count; the others have it from the environment."""
    module = torch()
    if module is not None:
        module.set_num_threads(threads)


@dataclass(frozen=True)
class Peers:
    """Calls by name of the peer, and why one that might be expected is not there."""

    calls: dict[str, Callable[[], object]]
    left_out: tuple[str, ...] = ()


def peers(dtype: str, a: Array, b: Array, *, packed: bool = False) -> Peers:
    """Calls that compute ``a @ b.T`` for B stored as [n, k] (the ``rcr`` layout), each checked against float64 first.

    Outputs are written in place where the peer can.
    """
    found: dict[str, Callable[[], object]] = {}
    left_out: list[str] = []
    if dtype == "fp32" and not packed:
        out = np.empty((a.shape[0], b.shape[0]), np.float32)
        found["numpy"] = lambda: np.matmul(a, b.T, out=out)
    module = torch()
    if module is not None:
        name = "torch packed" if packed else "torch"
        try:
            call = (_torch_packed if packed else _torch_mm)(module, dtype, a, b)
            if call is not None:
                _require_right(call(), a, b)
                found[name] = call
        except Exception as error:  # a peer's own fault must not end the run, nor vanish
            shape = f"{a.shape[0]}x{b.shape[0]}x{a.shape[1]}"
            left_out.append(f"{name} cannot do {dtype} {shape}: {str(error).splitlines()[0][:120]}")
    return Peers(found, tuple(left_out))


def _require_right(result: Any, a: Array, b: Array) -> None:
    """A peer that computes something else is none. Looks at a few rows: the whole truth would take long."""
    rows = a[:4].astype(np.float64) @ b.astype(np.float64).T
    error = np.linalg.norm(result[:4].double().numpy() - rows) / np.linalg.norm(rows)
    if not error < 2e-2:
        raise ValueError(f"its result is off by {error:.1e}")


def _tensor(module: Any, array: Array, dtype: str) -> Any:
    if dtype == "bf16":
        return module.from_numpy(array.view(np.int16)).view(module.bfloat16)
    return module.from_numpy(array)


def _torch_mm(module: Any, dtype: str, a: Array, b: Array) -> Callable[[], object] | None:
    if dtype in ("fp8", "bf8"):
        return None  # no CPU product
    x, y = _tensor(module, a, dtype), _tensor(module, b, dtype).t()
    if dtype == "int8":
        if a.shape[0] == 1:
            return None  # _int_mm is not for vectors
        return lambda: module._int_mm(x, y)
    out = module.empty((x.shape[0], y.shape[1]), dtype=x.dtype)
    return lambda: module.mm(x, y, out=out)


def _torch_packed(module: Any, dtype: str, a: Array, b: Array) -> Callable[[], object] | None:
    """oneDNN's linear layer with weights in the format that it likes best for this M: what PyTorch's compiler uses."""
    if dtype not in ("fp32", "bf16"):
        return None
    x, weight = _tensor(module, a, dtype), _tensor(module, b, dtype)
    reorder = module.ops.mkldnn._reorder_linear_weight
    try:
        packed = reorder(weight, a.shape[0])
    except (NotImplementedError, RuntimeError):  # before PyTorch 2.13 it took oneDNN's own tensors
        packed = reorder(weight.to_mkldnn(), a.shape[0])
    return lambda: module.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
