"""DLPack capsules: read by their C layout, and made. Knows no library of arrays.

The layout is that of ``dlpack.h``: https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tilewright.errors import InvalidArgumentError

__all__ = [
    "CPU",
    "CUDA",
    "CUDA_HOST",
    "CUDA_MANAGED",
    "ROCM",
    "ROCM_HOST",
    "VERSION",
    "Borrowed",
    "dtype_of",
    "make_capsule",
    "take",
]

CPU, CUDA, CUDA_HOST, ROCM, ROCM_HOST, CUDA_MANAGED = 1, 2, 3, 10, 11, 13
"""Values of ``DLDeviceType``."""
VERSION = (1, 1)
"""The newest version that is understood; later ones of the same major number add only what may be ignored."""
READ_ONLY, COPIED = 1, 2
"""Bits of a versioned capsule's flags."""

_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
_E4M3FN, _E5M2 = 10, 12
_DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (_INT, 8): np.dtype(np.int8),
    (_INT, 16): np.dtype(np.int16),
    (_INT, 32): np.dtype(np.int32),
    (_INT, 64): np.dtype(np.int64),
    (_UINT, 8): np.dtype(np.uint8),
    (_UINT, 16): np.dtype(np.uint16),
    (_UINT, 32): np.dtype(np.uint32),
    (_UINT, 64): np.dtype(np.uint64),
    (_FLOAT, 16): np.dtype(np.float16),
    (_FLOAT, 32): np.dtype(np.float32),
    (_FLOAT, 64): np.dtype(np.float64),
    (_BFLOAT, 16): np.dtype(ml_dtypes.bfloat16),
    (_COMPLEX, 64): np.dtype(np.complex64),
    (_COMPLEX, 128): np.dtype(np.complex128),
    (_BOOL, 8): np.dtype(np.bool_),
    (_E4M3FN, 8): np.dtype(ml_dtypes.float8_e4m3fn),
    (_E5M2, 8): np.dtype(ml_dtypes.float8_e5m2),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class _Device(ctypes.Structure):
    _fields_ = (("kind", c_int32), ("ordinal", c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device", _Device),
        ("ndim", c_int32),
        ("dtype", _DataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


_Deleter = CFUNCTYPE(None, c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", c_void_p), ("deleter", _Deleter))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", _Deleter),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )


_api = ctypes.pythonapi
_api.PyCapsule_IsValid.argtypes, _api.PyCapsule_IsValid.restype = (ctypes.py_object, c_char_p), ctypes.c_int
_api.PyCapsule_GetPointer.argtypes, _api.PyCapsule_GetPointer.restype = (ctypes.py_object, c_char_p), c_void_p
_api.PyCapsule_SetName.argtypes, _api.PyCapsule_SetName.restype = (ctypes.py_object, c_char_p), ctypes.c_int

_NAMES: dict[bytes, tuple[type[ctypes.Structure], bytes]] = {
    b"dltensor_versioned": (_Versioned, b"used_dltensor_versioned"),
    b"dltensor": (_Managed, b"used_dltensor"),
}
"""Name of a capsule to the structure in it, and the name that it has once it was taken. The capsule keeps a pointer to
its name, so these bytes must stay."""


class Borrowed(NamedTuple):
    """A tensor out of a capsule. The memory is valid for as long as ``owner`` lives."""

    owner: Owner
    kind: int
    ordinal: int
    address: int
    """Address of the first element."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """In elements."""
    flags: int


class Owner:
    """Holds what was in a capsule, and gives it back to its producer once, when the last reference goes."""

    __slots__ = ("__weakref__", "release")

    def __init__(self, address: int, deleter: Any) -> None:
        self.release: Callable[[], object]
        """Give it back now. Idempotent."""
        if deleter:
            finalizer = weakref.finalize(self, deleter, address)
            # At the end of the interpreter the producer's library may be gone already.
            finalizer.atexit = False
            self.release = finalizer
        else:
            self.release = lambda: None


def take(capsule: Any, field: str) -> Borrowed:
    """Take the tensor out of a capsule, as its only consumer. Raises ``InvalidArgumentError`` for what is no capsule,
    was taken before, or has a dtype or version that is not known; the producer gets the tensor back then too.
    """
    for name, (layout, used) in _NAMES.items():  # noqa: B007 - used below
        if _api.PyCapsule_IsValid(capsule, name):
            address = _api.PyCapsule_GetPointer(capsule, name)
            _api.PyCapsule_SetName(capsule, used)
            break
    else:
        raise InvalidArgumentError(
            f"{field}.__dlpack__() gave no fresh DLPack capsule",
            field=field,
            value=type(capsule).__name__,
            rule="dlpack_capsule",
            fix="pass an object whose __dlpack__ makes a new capsule for every call",
        )
    held: Any = layout.from_address(address)
    owner = Owner(address, held.deleter)
    try:
        if layout is _Versioned and held.major != VERSION[0]:
            raise InvalidArgumentError(
                f"{field} speaks DLPack {held.major}.{held.minor}",
                field=field,
                value=held.major,
                rule="dlpack_version",
                fix=f"use a library that offers DLPack {VERSION[0]}",
            )
        tensor = held.tensor
        rank = tensor.ndim
        strides = tuple(tensor.strides[:rank]) if tensor.strides else None
        return Borrowed(
            owner,
            tensor.device.kind,
            tensor.device.ordinal,
            (tensor.data or 0) + tensor.byte_offset,
            dtype_of(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes, field),
            tuple(tensor.shape[:rank]) if rank else (),
            strides,
            held.flags if layout is _Versioned else 0,
        )
    except BaseException:
        owner.release()
        raise


def dtype_of(code: int, bits: int, lanes: int, field: str) -> np.dtype[Any]:
    """The NumPy dtype of a ``DLDataType``. Raises ``InvalidArgumentError`` for one that has none here."""
    found = _DTYPES.get((code, bits)) if lanes == 1 else None
    if found is None:
        raise InvalidArgumentError(
            f"{field} has elements of DLPack type code {code}, {bits} bits, {lanes} lanes",
            field=field,
            value=(code, bits, lanes),
            rule="dtype_known",
            fix="convert it to float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8 or int32",
        )
    return found


# ---- making capsules ----


class _Export:
    """One capsule's structure and what it refers to."""

    __slots__ = ("held", "owner", "shape", "strides")

    held: Any
    owner: object
    shape: Any
    strides: Any


_exports: dict[int, _Export] = {}
"""By address of the structure: alive until their deleter is called."""


def _forget(address: int | None) -> None:
    _exports.pop(address or 0, None)


_raw_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", _api))
_raw_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", _api))


def _destroy(capsule: int | None) -> None:
    """Nobody took the capsule: nobody else will call the deleter. (The capsule itself is dying: only its address may be
    touched.)"""
    for name in _NAMES:
        if _raw_is_valid(capsule, name):
            _exports.pop(_raw_pointer(capsule, name), None)


_deleter = _Deleter(_forget)
_destructor = ctypes.PYFUNCTYPE(None, c_void_p)(_destroy)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", _api))
_VERSIONED_NAME, _PLAIN_NAME = tuple(_NAMES)


def make_capsule(
    owner: object,
    kind: int,
    ordinal: int,
    address: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *,
    versioned: bool,
) -> Any:
    """A capsule for memory that lives for as long as ``owner``, which is referred to until the capsule's consumer is
    done. ``strides`` are in elements.
    """
    export = _Export()
    held: Any = (_Versioned if versioned else _Managed)()
    export.owner = owner
    export.held = held
    export.shape = (c_int64 * len(shape))(*shape)
    export.strides = (c_int64 * len(strides))(*strides)
    code, bits = _CODES[dtype]
    tensor = held.tensor
    tensor.data = address or None
    tensor.device.kind, tensor.device.ordinal = kind, ordinal
    tensor.ndim = len(shape)
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code, bits, 1
    tensor.shape = ctypes.cast(export.shape, POINTER(c_int64))
    tensor.strides = ctypes.cast(export.strides, POINTER(c_int64))
    held.deleter = _deleter
    if versioned:
        held.major, held.minor = VERSION
    place = ctypes.addressof(held)
    _exports[place] = export
    destructor = ctypes.cast(_destructor, c_void_p)
    return _new_capsule(place, _VERSIONED_NAME if versioned else _PLAIN_NAME, destructor)
