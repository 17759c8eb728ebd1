"""Content of operands: random numbers, laid out as the problem says."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["Init", "contents", "view"]

Array = npt.NDArray[Any]
Init = Literal["normal", "uniform", "trunc-int"]
"""Standard normal; uniform from -1 to 1 (int8: all values); whole numbers from -2 to 2, whose sums are exact."""

_PERIOD = 4_194_301
"""Longer contents repeat with this period: a prime, so that no row or tile has the same place in two repeats."""


def contents(desc: TensorDesc, init: Init, rng: np.random.Generator) -> Array:
    """The memory of an operand, from its first element: one dimension of ``desc.span`` elements."""
    count = desc.span
    block = _draw(min(count, _PERIOD), desc.dtype, init, rng)
    return block if count <= _PERIOD else np.resize(block, count)


def _draw(count: int, dtype: DType, init: Init, rng: np.random.Generator) -> Array:
    if init == "trunc-int":
        return rng.integers(-2, 3, count, np.int8).astype(dtype.numpy)
    if not dtype.is_float:
        if init == "uniform":
            return rng.integers(-128, 128, count, np.int16).astype(dtype.numpy)
        return np.clip(np.rint(32 * rng.standard_normal(count, np.float32)), -128, 127).astype(dtype.numpy)
    if init == "uniform":
        return (2 * rng.random(count, np.float32) - 1).astype(dtype.numpy)
    return rng.standard_normal(count, np.float32).astype(dtype.numpy)


def view(memory: Array, desc: TensorDesc) -> Array:
    """The operand as an array of its shape, over its memory."""
    strides = [stride * desc.dtype.bytes for stride in desc.strides]
    raw: Any = memory.view(np.uint8)  # not every element type of ml_dtypes is a buffer
    found: Array = np.ndarray(desc.shape, desc.dtype.numpy, raw.data, 0, strides)
    return found
