"""Operands on a GPU that is none."""

import gc
import time
from collections.abc import Callable
from typing import Any

from fake_cuda import FakeCuda

import tilewright as tw

STREAM = 42


def operands(torch: Any, fake: FakeCuda, size: int = 8, dtype: str = "float32") -> tuple[Any, Any, Any]:
    """a, b and c in one allocation, as an allocator that carves tensors out of large blocks does it."""
    base = fake.allocate(1 << 20)
    return tuple(torch.Tensor(base + offset, (size, size), dtype) for offset in (0, 4096, 8192))  # type: ignore[return-value]


def settled(client: tw.Client, condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true when what is to be released is released, by calls that nobody waits for."""
    gc.collect()
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        client.kernels.statistics()
        time.sleep(0.01)
    return condition()
