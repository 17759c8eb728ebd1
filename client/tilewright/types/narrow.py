"""Floating-point values of fewer than 8 bits, as the operation stores them: packed along k, the first value in the
lowest bits. NumPy throughout; what is multiplied often is packed once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.errors import InvalidArgumentError
from tilewright.types.spec import Array

__all__ = ["NARROW", "format_of", "pack_narrow", "unpack_narrow"]

NARROW = {"fp4": ("float4_e2m1fn", 4), "fp6": ("float6_e2m3fn", 6), "bf6": ("float6_e3m2fn", 6)}
"""Formats by name: the type of ``ml_dtypes``, which has a value in each byte, and bits."""
_BITS = 8


def format_of(array: Any) -> str | None:
    """The format of an array of a type of ``ml_dtypes``; None for arrays of other types."""
    name = getattr(getattr(array, "dtype", None), "name", "")
    return next((form for form, (dtype, _) in NARROW.items() if dtype == name), None)


def pack_narrow(values: Array) -> Array:
    """Values ``[..., K]`` of ``float4_e2m1fn``, ``float6_e2m3fn`` or ``float6_e3m2fn`` of ``ml_dtypes`` as bytes
    ``[..., ceil(K bits / 8)]`` of int8. What is left of a last byte is zero.
    """
    given = np.asarray(values)
    form = format_of(given)
    if form is None or given.ndim < 1:
        raise InvalidArgumentError(
            f"{given.dtype} is no type of fewer than 8 bits",
            field="values",
            value=str(given.dtype),
            rule="narrow_values",
            fix=f"convert the values: values.astype(ml_dtypes.{NARROW['fp4'][0]})",
        )
    bits = NARROW[form][1]
    codes = np.ascontiguousarray(given).view(np.uint8)
    own = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    return np.packbits(own.reshape(*codes.shape[:-1], codes.shape[-1] * bits), axis=-1, bitorder="little").view(np.int8)


def unpack_narrow(packed: Array, form: str, k: int) -> Array:
    """The first ``k`` values ``[..., k]`` of bytes ``[..., ceil(k bits / 8)]``, of the type of ``ml_dtypes``."""
    import ml_dtypes

    if form not in NARROW:
        raise InvalidArgumentError(
            f"there is no format {form!r}",
            field="form",
            value=form,
            rule="narrow_values",
            fix=f"use {', '.join(NARROW)}",
        )
    dtype, bits = NARROW[form]
    own = np.ascontiguousarray(packed).view(np.uint8)
    if own.shape[-1] != -(-k * bits // _BITS):
        raise InvalidArgumentError(
            f"{own.shape[-1]} bytes do not hold {k} values of {form}",
            field="k",
            value=k,
            rule="narrow_values",
            fix=f"give {own.shape[-1] * _BITS // bits}, or fewer that fill as many bytes",
        )
    codes = np.unpackbits(own, axis=-1, bitorder="little")[..., : k * bits].reshape(*own.shape[:-1], k, bits)
    found: Array = np.packbits(codes, axis=-1, bitorder="little")[..., 0].view(getattr(ml_dtypes, dtype))
    return found
