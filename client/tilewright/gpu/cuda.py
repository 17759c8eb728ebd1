"""NVIDIA's driver: contexts, and what it knows of addresses.

Contexts are the primary ones of their devices, current only for the length of a call; none is ever made.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_uint, c_uint64, c_void_p
from functools import cached_property
from typing import Any

from tilewright.errors import DeviceError, UnavailableError
from tilewright.gpu.cuda_api import NAMES, SIGNATURES, format_uuid
from tilewright.gpu.driver import (
    HANDLE_BYTES,
    INVALID_CONTEXT,
    LEGACY_STREAM,
    POSIX_DESCRIPTOR,
    GpuDriver,
    Handle,
    Pointer,
    error_text,
)

__all__ = ["HANDLE_BYTES", "INVALID_CONTEXT", "LEGACY_STREAM", "Driver", "Pointer", "driver", "format_uuid"]

LIBRARY = "libcuda.so.1"

# <cuda.h>
_CONTEXT, _BUFFER_ID, _IS_MANAGED, _ORDINAL, _LEGACY_IPC = 1, 7, 8, 9, 10
_RANGE_START, _RANGE_SIZE, _HANDLE_TYPES, _MEMPOOL = 11, 12, 14, 17
_MAPPING_SIZE, _MAPPING_BASE, _BLOCK_ID = 18, 19, 20
_MEMORY_TYPE, _DEVICE_MEMORY = 2, 2


class _Current(threading.local):
    """Where a thread is told its current context."""

    def __init__(self) -> None:
        self.place = c_void_p()
        self.reference = byref(self.place)


class Driver(GpuDriver):
    """See ``GpuDriver``."""

    kind = "cuda"
    title = "CUDA"
    ipc_source, pool_source = "cuda_ipc", "cuda_pool"
    names = NAMES
    signatures = SIGNATURES
    newer = "install a driver of CUDA 12.0 or later"

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self._contexts: dict[int, int] = {}
        self._uuids: dict[int, bytes] = {}
        self._current = _Current()
        self.call("cuInit", 0)

    def _text(self, name: str, code: int) -> str:
        return error_text(self._functions.get(name) or self._function(name), code)

    def uuid(self, ordinal: int) -> bytes:
        """The 16 bytes that name a device on every process."""
        known = self._uuids.get(ordinal)
        if known is None:
            device, data = c_int(), ctypes.create_string_buffer(16)
            self.call("cuDeviceGet", byref(device), ordinal)
            self.call("cuDeviceGetUuid_v2", data, device)
            known = self._uuids[ordinal] = data.raw
        return known

    def _describe(self, ordinal: int) -> str:
        return format_uuid(self.uuid(ordinal))

    @contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        """With the device's primary context current. Raises ``UnavailableError`` if there is none."""
        if self.is_current(ordinal):
            yield
            return
        self.call("cuCtxPushCurrent_v2", self._contexts[ordinal])
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def is_current(self, ordinal: int) -> bool:
        context = self._contexts.get(ordinal) or self._context(ordinal)
        current = self._current
        code = self._get_current(current.reference)
        if code:
            raise self._error("cuCtxGetCurrent", code)
        return bool(current.place.value == context)

    @cached_property
    def _get_current(self) -> Any:
        return self._function("cuCtxGetCurrent")

    def _context(self, ordinal: int) -> int:
        device, flags, active, context = c_int(), c_uint(), c_int(), c_void_p()
        self.call("cuDeviceGet", byref(device), ordinal)
        self.call("cuDevicePrimaryCtxGetState", device, byref(flags), byref(active))
        if not active.value:
            raise UnavailableError(
                f"this process does not use CUDA device {ordinal} yet",
                field="device",
                value=ordinal,
                rule="cuda_context",
                fix="let what makes your arrays start it, for example torch.cuda.init()",
            )
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        found = self._contexts[ordinal] = context.value or 0
        return found

    def pointer(self, address: int, field: str = "array") -> Pointer:
        values = self._attributes(address, _POINTER_ATTRIBUTES)
        kind, base, size, ordinal, identity, managed, legacy, pool, handles = values
        block = 0
        if not (managed or legacy or pool) and kind == _DEVICE_MEMORY:
            # A mapping of several handles in one range: what one handle covers is what can be exported.
            mapped, length, block = self._mapping(address)
            base, size = (mapped, length) if length else (base, size)
        if managed or kind != _DEVICE_MEMORY or not base:
            fix = "use memory of cudaMalloc, of a shareable pool, or of cuMemCreate with descriptors"
            raise self._no_memory(address, field, managed=bool(managed), fix=fix)
        return Pointer(ordinal, base, size, (identity, block), bool(legacy), pool, bool(handles & POSIX_DESCRIPTOR))

    def identity(self, address: int) -> int:
        value = c_uint64()
        function = self._functions.get("cuPointerGetAttribute") or self._function("cuPointerGetAttribute")
        return 0 if function(byref(value), _BUFFER_ID, address) else value.value

    def _mapping(self, address: int) -> tuple[int, int, int]:
        try:
            base, size = self._attributes(address, (_MAPPING_BASE, _MAPPING_SIZE))
        except DeviceError:  # a driver that does not know them
            return 0, 0, 0
        try:
            (block,) = self._attributes(address, (_BLOCK_ID,))
        except DeviceError:
            block = 0
        return base, size, block

    def _attributes(self, address: int, wanted: tuple[int, ...]) -> list[int]:
        count = len(wanted)
        # Each attribute has a type of its own, of 8 bytes at the most; what is shorter leaves the rest zero.
        values = (c_uint64 * count)()
        start = ctypes.addressof(values)
        places = (c_void_p * count)(*range(start, start + 8 * count, 8))
        self.call("cuPointerGetAttributes", count, (c_int * count)(*wanted), places, address)
        return list(values)

    def export_pool(self, ordinal: int, pool: int, base: int) -> tuple[int, bytes]:
        fd, data = c_int(-1), Handle()
        with self.current(ordinal):
            self.call("cuMemPoolExportPointer", byref(data), base)
            self.call("cuMemPoolExportToShareableHandle", byref(fd), pool, POSIX_DESCRIPTOR, 0)
        return fd.value, bytes(data)


_POINTER_ATTRIBUTES = (
    _MEMORY_TYPE,
    _RANGE_START,
    _RANGE_SIZE,
    _ORDINAL,
    _BUFFER_ID,
    _IS_MANAGED,
    _LEGACY_IPC,
    _MEMPOOL,
    _HANDLE_TYPES,
)

_lock = threading.Lock()
_loaded: Driver | None = None


def driver() -> Driver:
    """The driver of this process. Raises ``UnavailableError`` where there is none."""
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                try:
                    library = ctypes.CDLL(LIBRARY)
                except OSError as error:
                    raise UnavailableError(
                        f"there is no CUDA driver here: {error}",
                        field="driver",
                        value=LIBRARY,
                        rule="cuda_driver",
                        fix="pass arrays of the host, or install the NVIDIA driver",
                    ) from None
                _loaded = Driver(library)
    return _loaded


def _after_fork_in_child() -> None:
    """The parent's contexts, events and handles mean nothing here."""
    global _lock, _loaded
    _lock, _loaded = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork_in_child)
