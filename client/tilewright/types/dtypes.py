"""Element types: their names, NumPy dtypes (``ml_dtypes`` for bf16, fp8, bf8) and numbers in the protocol."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tilewright.errors import InvalidArgumentError
from tilewright_proto.v1 import tensor_pb2

__all__ = ["DTYPES", "DTypeLike", "dtype_name", "element_type", "from_wire", "wire_dtype"]

DTypeLike = Any
"""A name (``"bf16"``, ``"float32"``) or anything that ``numpy.dtype`` takes."""

DTYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "bf8": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
    "int32": np.dtype(np.int32),
}
"""The element types by name. fp8 is E4M3, bf8 is E5M2."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WIRE: dict[np.dtype[Any], int] = {dtype: tensor_pb2.DType.Value(name.upper()) for name, dtype in DTYPES.items()}
_FROM_WIRE = {number: dtype for dtype, number in _WIRE.items()}


def element_type(dtype: DTypeLike, field: str = "dtype") -> np.dtype[Any]:
    """The NumPy dtype for a name or dtype. Raises ``InvalidArgumentError`` for what no kernel takes, with the nearest
    that one does.
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise _refused(field, dtype, f"use one of {', '.join(DTYPES)}") from None
    if found in _NAMES:
        return found
    if found.newbyteorder("=") in _NAMES:
        raise _refused(field, found, "convert it to native byte order: x.astype(x.dtype.newbyteorder('='))")
    if found.kind == "f":
        raise _refused(field, found, "convert it: x.astype(numpy.float32)")
    if found.kind == "u":
        raise _refused(field, found, "convert it: x.astype(numpy.float32), or to numpy.int8 if all are below 128")
    if found.kind in "ib":
        raise _refused(field, found, "convert it: x.astype(numpy.int8) or x.astype(numpy.int32)")
    raise _refused(field, found, f"convert it to one of {', '.join(DTYPES)}")


def _refused(field: str, value: object, fix: str) -> InvalidArgumentError:
    shown = value.str + f" ({value.name})" if isinstance(value, np.dtype) else value
    return InvalidArgumentError(
        f"{shown} is not an element type of Tilewright", field=field, value=shown, rule="dtype_known", fix=fix
    )


def dtype_name(dtype: DTypeLike, field: str = "dtype") -> str:
    """The name that the server uses: ``dtype_name(numpy.float32)`` is ``"fp32"``."""
    return _NAMES[element_type(dtype, field)]


def wire_dtype(dtype: np.dtype[Any], field: str) -> int:
    """The protocol's number of a dtype. Raises ``InvalidArgumentError``."""
    number = _WIRE.get(dtype)
    return number if number is not None else _WIRE[element_type(dtype, field)]


def from_wire(number: int) -> np.dtype[Any]:
    """The dtype of a protocol number that the server sent."""
    try:
        return _FROM_WIRE[number]
    except KeyError:
        raise InvalidArgumentError(
            f"the server uses element type {number}, which this client does not know",
            field="dtype",
            value=number,
            rule="dtype_known",
            fix="update the client",
        ) from None
