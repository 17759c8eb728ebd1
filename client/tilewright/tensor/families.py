"""Arrays that PyTorch and CuPy have on a GPU, described by what a launch depends on: without the driver, and without
an interface that would have to be built for every look. Neither library is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Family", "family_of"]

_ALIGNED = 16
"""Bytes: kernels are chosen by addresses up to that."""


class Family(NamedTuple):
    """Arrays of one library."""

    library: str
    describe: Callable[[Any], tuple[Any, ...] | None]
    """Layout, element type, device and alignment of an array; ``None`` for one that has to be looked at more closely,
    or is refused.
    """
    address: Callable[[Any], int]


_families: dict[Any, Family | None] = {}
_MAX_TYPES = 256


def family_of(kind: Any) -> Family | None:
    """The family that a type of arrays belongs to."""
    try:
        return _families[kind]
    except KeyError:
        if len(_families) >= _MAX_TYPES:
            _families.clear()
        found = _families[kind] = _find(kind)
        return found


def _find(kind: Any) -> Family | None:
    torch: Any = sys.modules.get("torch")
    tensors = (getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None))
    if any(kind is item for item in tensors if item is not None):
        return Family("torch", functools.partial(_torch, torch.strided, torch.is_grad_enabled), kind.data_ptr)
    if kind is getattr(sys.modules.get("cupy"), "ndarray", ""):
        return Family("cupy", _cupy, _cupy_address)
    return None


def _torch(strided: Any, is_grad_enabled: Callable[[], bool], tensor: Any) -> tuple[Any, ...] | None:
    place = tensor.device
    if place.type != "cuda" or tensor.layout is not strided or tensor.is_neg():
        return None
    if tensor.requires_grad and is_grad_enabled():
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), place.index, tensor.data_ptr() % _ALIGNED


def _cupy(array: Any) -> tuple[Any, ...]:
    place = array.data
    return "cupy", array.dtype, array.shape, array.strides, place.device_id, place.ptr % _ALIGNED


def _cupy_address(array: Any) -> int:
    return int(array.data.ptr)
