"""Where NumPy's arrays lie."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

import numpy as np

from tilewright.types.spec import Array

__all__ = ["address_of"]

_at = c_void_p.from_address


def _described(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _reader() -> Callable[[Array], int]:
    """Reads the pointer behind the head of the array object (``PyArrayObject_fields.data``), where NumPy's C interface
    has it: a tenth of the time that the array's description takes. Falls back to the description where a look at some
    arrays does not find it there.
    """
    offset = object.__basicsize__
    whole = np.zeros((4, 6), np.float32)
    for array in (whole, whole[1:, 2:], whole.T[3:], np.zeros((), np.int8)):
        if _at(id(array) + offset).value != _described(array):
            return _described

    def found(array: Any) -> int:
        return _at(id(array) + offset).value or 0

    return found


address_of: Callable[[Array], int] = _reader()
"""Address of the first element."""
