"""The CUDA driver of this process, as far as memory and events are shared through it.

Nothing is loaded before the first use, and no context is ever made: memory that is to be shared was allocated by
someone, who made one. Contexts are the primary ones of their devices, current only for the length of a call.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_uint, c_uint64, c_void_p
from functools import cached_property
from typing import Any, NamedTuple

from tilewright.cudaapi import HANDLE_BYTES, SIGNATURES, Handle, format_uuid
from tilewright.errors import (
    DeviceError,
    InvalidArgumentError,
    ResourceExhaustedError,
    TilewrightError,
    UnavailableError,
    UnsupportedError,
)

__all__ = ["HANDLE_BYTES", "LEGACY_STREAM", "Driver", "Pointer", "driver", "format_uuid"]

LIBRARY = "libcuda.so.1"
LEGACY_STREAM = 1
"""``CU_STREAM_LEGACY``: the default stream that waits for, and is waited for by, all blocking streams."""
_LAST_DEFAULT_STREAM = 2
"""Handles up to this one mean a stream of the context that is current; others belong to one context."""

# <cuda.h>
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE, INVALID_CONTEXT = 1, 2, 3, 100, 201
NOT_READY, NOT_SUPPORTED, NOT_PERMITTED = 600, 801, 800
_CAPTURED_IMPLICITLY = 906
"""A blocking stream is being captured, so that the legacy default stream cannot be used."""
_CONTEXT_FAULTS = frozenset({700, 702, 709, 714, 715, 716, 717, 718, 719})
"""Errors of kernels that ran before, which every later call of the context reports."""
_CONTEXT, _BUFFER_ID, _IS_MANAGED, _ORDINAL, _LEGACY_IPC = 1, 7, 8, 9, 10
_RANGE_START, _RANGE_SIZE, _HANDLE_TYPES, _MEMPOOL = 11, 12, 14, 17
_MAPPING_SIZE, _MAPPING_BASE, _BLOCK_ID = 18, 19, 20
_MEMORY_TYPE, _DEVICE_MEMORY = 2, 2
_POSIX_DESCRIPTOR = 1
_DISABLE_TIMING, _INTERPROCESS = 2, 4
_PEER_ACCESS = 1


class Pointer(NamedTuple):
    """What the driver knows about an address."""

    ordinal: int
    base: int
    """Where the allocation begins (of mapped memory: the part of the mapping that one handle stands for)."""
    size: int
    identity: tuple[int, int]
    """Differs between allocations that were at the same address one after the other."""
    legacy: bool
    """Whether it has a legacy handle."""
    pool: int
    """The memory pool that it is from, or 0."""
    descriptors: bool
    """Whether it can be exported as a POSIX descriptor."""


class _Current(threading.local):
    """Where a thread is told its current context, and whether a stream is being captured."""

    def __init__(self) -> None:
        self.place = c_void_p()
        self.reference = byref(self.place)
        self.capture = c_int()
        self.capture_reference = byref(self.capture)


class Driver:
    """The driver's functions, checked. Thread-safe. Ordinals are those of this process."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._functions: dict[str, Any] = {}
        self._contexts: dict[int, int] = {}
        self._uuids: dict[int, bytes] = {}
        self._current = _Current()
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises ``DeviceError`` and its relatives."""
        code = (self._functions.get(name) or self._function(name))(*arguments)
        if code:
            raise self._error(name, code)

    def _function(self, name: str) -> Any:
        found = getattr(self._library, name, None)
        if found is None:
            raise UnsupportedError(
                f"the CUDA driver has no {name}",
                field="driver",
                value=name,
                rule="cuda_driver_version",
                fix="install a driver of CUDA 12.0 or later",
            )
        found.argtypes, found.restype = SIGNATURES[name], c_int
        self._functions[name] = found
        return found

    def _error(self, name: str, code: int) -> TilewrightError:
        text = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            found = c_char_p()
            (self._functions.get(function) or self._function(function))(code, byref(found))
            text.append((found.value or b"unknown").decode())
        message = f"{name} failed: {text[1]} ({text[0]}, {code})"
        facts: dict[str, Any] = {"field": "cuda", "value": text[0], "rule": "cuda_driver"}
        if code == OUT_OF_MEMORY:
            return ResourceExhaustedError(message, **facts, fix="free device memory of this process")
        if code in (NOT_SUPPORTED, NOT_PERMITTED):
            return UnsupportedError(message, **facts, fix="this machine or container does not allow it; use copies")
        if code in (NOT_INITIALIZED, NO_DEVICE):
            fix = "in a forked child CUDA works only if the parent never used it: start the child by spawn"
            return UnavailableError(message, **facts, fix=fix)
        if code in _CONTEXT_FAULTS:
            return DeviceError(message, **facts, fix="an earlier kernel of this process failed: start it again")
        return DeviceError(message, **facts)

    # ---- devices and contexts ----

    def device_count(self) -> int:
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return count.value

    def uuid(self, ordinal: int) -> bytes:
        """The 16 bytes that name a device on every process."""
        known = self._uuids.get(ordinal)
        if known is None:
            device, data = c_int(), ctypes.create_string_buffer(16)
            self.call("cuDeviceGet", byref(device), ordinal)
            self.call("cuDeviceGetUuid_v2", data, device)
            known = self._uuids[ordinal] = data.raw
        return known

    @contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        """With the device's primary context current. Raises ``UnavailableError`` if there is none."""
        if self._is_current(ordinal):
            yield
            return
        self.call("cuCtxPushCurrent_v2", self._contexts[ordinal])
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _is_current(self, ordinal: int) -> bool:
        context = self._contexts.get(ordinal) or self._context(ordinal)
        current = self._current
        code = self._get_current(current.reference)
        if code:
            raise self._error("cuCtxGetCurrent", code)
        return bool(current.place.value == context)

    # What launches call, looked up once.

    @cached_property
    def _get_current(self) -> Any:
        return self._function("cuCtxGetCurrent")

    @cached_property
    def _query_stream(self) -> Any:
        return self._function("cuStreamQuery")

    @cached_property
    def _query_capture(self) -> Any:
        return self._function("cuStreamIsCapturing")

    @cached_property
    def _query_event(self) -> Any:
        return self._function("cuEventQuery")

    @cached_property
    def _finish_event(self) -> Any:
        return self._function("cuEventSynchronize")

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

    # ---- memory ----

    def pointer(self, address: int, field: str = "array") -> Pointer:
        """What an address points to. Raises ``InvalidArgumentError`` unless it is plain memory of a device."""
        values = self._attributes(address, _POINTER_ATTRIBUTES)
        kind, base, size, ordinal, identity, managed, legacy, pool, handles = values
        block = 0
        if not (managed or legacy or pool) and kind == _DEVICE_MEMORY:
            # A mapping of several handles in one range: what one handle covers is what can be exported.
            mapped, length, block = self._mapping(address)
            base, size = (mapped, length) if length else (base, size)
        if managed or kind != _DEVICE_MEMORY or not base:
            what = "managed memory" if managed else "no memory of a device of this process"
            raise InvalidArgumentError(
                f"{field} is {what}",
                field=field,
                value=hex(address),
                rule="device_memory_kind",
                fix="use memory of cudaMalloc, of a shareable pool, or of cuMemCreate with descriptors",
            )
        return Pointer(ordinal, base, size, (identity, block), bool(legacy), pool, bool(handles & _POSIX_DESCRIPTOR))

    def identity(self, address: int) -> int:
        """What tells the allocation at an address from others that were there before; 0 if there is none now."""
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

    def export_legacy(self, ordinal: int, base: int) -> bytes:
        """The legacy handle of an allocation, 64 bytes."""
        handle = Handle()
        with self.current(ordinal):
            self.call("cuIpcGetMemHandle", byref(handle), base)
        return bytes(handle)

    def export_pool(self, ordinal: int, pool: int, base: int) -> tuple[int, bytes]:
        """A descriptor of the pool, which the caller closes, and the exported pointer."""
        fd, data = c_int(-1), Handle()
        with self.current(ordinal):
            self.call("cuMemPoolExportPointer", byref(data), base)
            self.call("cuMemPoolExportToShareableHandle", byref(fd), pool, _POSIX_DESCRIPTOR, 0)
        return fd.value, bytes(data)

    def export_mapped(self, ordinal: int, address: int) -> int:
        """A descriptor of the allocation that is mapped at ``address``; the caller closes it."""
        handle, fd = c_uint64(), c_int(-1)
        with self.current(ordinal):
            self.call("cuMemRetainAllocationHandle", byref(handle), address)
            try:
                self.call("cuMemExportToShareableHandle", byref(fd), handle, _POSIX_DESCRIPTOR, 0)
            finally:
                self.call("cuMemRelease", handle)
        return fd.value

    def open_legacy(self, ordinal: int, data: bytes) -> int:
        """Map an allocation of another process; returns its base. Undone by ``close_legacy``."""
        address = c_uint64()
        with self.current(ordinal):
            self.call("cuIpcOpenMemHandle_v2", byref(address), Handle.from_buffer_copy(data), _PEER_ACCESS)
        return address.value

    def close_legacy(self, ordinal: int, base: int) -> None:
        """Unmap it, when nothing of this process uses it any more."""
        with self.current(ordinal):
            self.call("cuCtxSynchronize")
            self.call("cuIpcCloseMemHandle", base)

    def read(self, ordinal: int, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from the device to the host behind what is on the stream, and wait for it."""
        with self.current(ordinal):
            self._refuse_capture(stream)
            self.call("cuMemcpyDtoHAsync_v2", target, source, nbytes, stream)
            self.call("cuStreamSynchronize", stream)

    def write(self, ordinal: int, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from the host to the device behind what is on the stream, and wait for it."""
        with self.current(ordinal):
            self._refuse_capture(stream)
            self.call("cuMemcpyHtoDAsync_v2", target, source, nbytes, stream)
            self.call("cuStreamSynchronize", stream)

    # ---- streams and events ----

    def synchronize(self, ordinal: int, stream: int) -> None:
        with self.current(ordinal):
            self._refuse_capture(stream)
            self.call("cuStreamSynchronize", stream)

    def idle(self, ordinal: int, stream: int) -> bool:
        """Whether all work of a stream is over. Raises ``UnsupportedError`` for one that is being captured, and leaves
        the capture as it is."""
        if stream > _LAST_DEFAULT_STREAM or self._is_current(ordinal):
            code = self._refuse_capture(stream) or self._query_stream(stream)
            if code != INVALID_CONTEXT:
                return bool(code == 0)
        with self.current(ordinal):
            return bool((self._refuse_capture(stream) or self._query_stream(stream)) == 0)

    def _refuse_capture(self, stream: int) -> int:
        """What asking for the stream gave, 0 if nothing is wrong with it. (To query a stream that is being captured, or
        to wait for it, spoils the capture; to ask for this does not.)"""
        current = self._current
        code = int(self._query_capture(stream, current.capture_reference))
        if code == _CAPTURED_IMPLICITLY or (not code and current.capture.value):
            raise UnsupportedError(
                "the stream is being captured into a CUDA graph, which cannot hold launches of another process",
                field="stream",
                value=stream,
                rule="stream_capture",
                fix="launch before or after the capture",
            )
        return code

    def new_event(self, ordinal: int, *, shared: bool = True) -> int:
        """An event without timing; ``shared``: one that another process can open."""
        event = c_void_p()
        with self.current(ordinal):
            self.call("cuEventCreate", byref(event), _DISABLE_TIMING | (_INTERPROCESS if shared else 0))
        return event.value or 0

    def export_event(self, ordinal: int, event: int) -> bytes:
        handle = Handle()
        with self.current(ordinal):
            self.call("cuIpcGetEventHandle", byref(handle), event)
        return bytes(handle)

    def open_event(self, ordinal: int, data: bytes) -> int:
        event = c_void_p()
        with self.current(ordinal):
            self.call("cuIpcOpenEventHandle", byref(event), Handle.from_buffer_copy(data))
        return event.value or 0

    def destroy_event(self, ordinal: int, event: int) -> None:
        with self.current(ordinal):
            self.call("cuEventDestroy_v2", event)

    def record(self, ordinal: int, event: int, stream: int) -> None:
        with self.current(ordinal):
            self.call("cuEventRecord", event, stream)

    def wait(self, ordinal: int, stream: int, event: int) -> None:
        """Make a stream wait for what the event was recorded after last. Does not wait itself."""
        with self.current(ordinal):
            self.call("cuStreamWaitEvent", stream, event, 0)

    def finished(self, ordinal: int, event: int) -> bool:
        # An event knows its context; some drivers want any to be current.
        code = self._query_event(event)
        if code == INVALID_CONTEXT:
            with self.current(ordinal):
                code = self._query_event(event)
        if code not in (0, NOT_READY):
            raise self._error("cuEventQuery", code)
        return bool(code == 0)

    def finish(self, ordinal: int, event: int) -> None:
        """Wait, on the host, for what the event was recorded after."""
        code = self._finish_event(event)
        if code == INVALID_CONTEXT:
            with self.current(ordinal):
                code = self._finish_event(event)
        if code:
            raise self._error("cuEventSynchronize", code)

    def order(self, ordinal: int, first: int, second: int) -> None:
        """Make stream ``second`` wait for what is on stream ``first`` now."""
        if first == second:
            return
        with self.current(ordinal):
            self._refuse_capture(first)
            self._refuse_capture(second)
        event = self.new_event(ordinal, shared=False)
        try:
            self.record(ordinal, event, first)
            self.wait(ordinal, second, event)
        finally:
            self.destroy_event(ordinal, event)


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
