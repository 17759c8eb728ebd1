"""Arrays that PyTorch and CuPy have on a GPU, described by what a launch depends on: without the driver, and without
an interface that would have to be built for every look. Neither library is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["FAMILIES", "Family", "family_of"]

_ALIGNED = 16
"""Bytes: kernels are chosen by addresses up to that."""


Key = list[Any]


class Family(NamedTuple):
    """Arrays of one library."""

    library: str
    describe: Callable[[Any, Key, list[int]], bool]
    """Add layout, element type, device and alignment of an array to a key, and its address to a list; false for one
    that has to be looked at more closely, or is refused.
    """
    address: Callable[[Any], int]


FAMILIES: dict[Any, Family | None] = {}
"""Those of the types that were looked for."""
_MAX_TYPES = 256


def family_of(kind: Any) -> Family | None:
    """The family that a type of arrays belongs to."""
    try:
        return FAMILIES[kind]
    except KeyError:
        if len(FAMILIES) >= _MAX_TYPES:
            FAMILIES.clear()
        found = FAMILIES[kind] = _find(kind)
        return found


def _find(kind: Any) -> Family | None:
    torch: Any = sys.modules.get("torch")
    tensors = (getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None))
    if any(kind is item for item in tensors if item is not None):
        return Family("torch", _of_torch(torch.strided, torch.is_grad_enabled), kind.data_ptr)
    if kind is getattr(sys.modules.get("cupy"), "ndarray", ""):
        return Family("cupy", _cupy, _cupy_address)
    return None


def _of_torch(strided: Any, is_grad_enabled: Callable[[], bool]) -> Callable[[Any, Key, list[int]], bool]:
    # Every attribute costs: the device as an object, and its type as a word, as much as all others.
    def describe(tensor: Any, key: Key, places: list[int]) -> bool:
        if not tensor.is_cuda or tensor.layout is not strided or tensor.is_neg():
            return False
        if tensor.requires_grad and is_grad_enabled():
            return False
        address = tensor.data_ptr()
        key.append((tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), address % _ALIGNED))
        places.append(address)
        return True

    return describe


def _cupy(array: Any, key: Key, places: list[int]) -> bool:
    place = array.data
    address = int(place.ptr)
    key.append(("cupy", array.dtype, array.shape, array.strides, place.device_id, address % _ALIGNED))
    places.append(address)
    return True


def _cupy_address(array: Any) -> int:
    return int(array.data.ptr)
