"""Layouts of tensors with heads: rows before heads, as the server takes heads before rows."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from tilewright.dispatch.operands.request import spec_of
from tilewright.tensor.interop import recognise
from tilewright.tensor.resident import ResidentTensor
from tilewright.types.spec import Spec, as_array, contiguous_strides

__all__ = ["heads_first", "heads_last"]


def heads_first(value: Any, field: str) -> Any:
    """[B, S, H, D] as [B, H, S, D], the same memory."""
    if value is None:
        return None
    if isinstance(value, (Spec, tuple)):
        return _swapped(spec_of(value, field))
    if type(value) is ResidentTensor:
        return ResidentTensor(value._state, _swapped(value.spec), value.offset)
    tensor = recognise(value, field)
    if tensor is not None and not hasattr(value, "swapaxes"):
        other = copy.copy(tensor)
        other.spec = _swapped(tensor.spec)
        return other
    array = value if hasattr(value, "swapaxes") else as_array(value, field)
    if len(array.shape) != 4:
        return array  # the server says what is wrong with it
    return array.swapaxes(1, 2)


def heads_last(value: Any) -> Any:
    """A result as [B, S, H, D]."""
    return value.swapaxes(1, 2) if hasattr(value, "swapaxes") else value


def _swapped(spec: Spec) -> Spec:
    if len(spec.shape) != 4:
        return spec
    b, h, s, d = spec.shape
    strides = spec.strides or contiguous_strides(spec.shape)
    swapped = (strides[0], strides[2], strides[1], strides[3])
    return replace(spec, shape=(b, s, h, d), strides=None if 1 in (h, s) and spec.strides is None else swapped)
