"""AMD's runtime: devices, and what it knows of addresses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cached_property
from typing import Any

from tilewright.errors import DeviceError, UnavailableError, UnsupportedError
from tilewright.gpu.driver import GpuDriver, Pointer
from tilewright.gpu.hip_api import NAMES, SIGNATURES, PointerInfo, format_uuid

__all__ = ["HipDriver", "driver"]

LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "/opt/rocm/lib/libamdhip64.so")
"""Libraries that the process has loaded come first: frameworks bring a runtime of their own."""

_BUFFER_ID = 7
_DEVICE_MEMORY = 2
_NON_BLOCKING = 1
_AT_LEAST, _ALL_BITS = 0, (1 << 64) - 1
_TEXTS = frozenset({NAMES.error_name, NAMES.error_string})


class HipDriver(GpuDriver):
    """See ``GpuDriver``. Whoever has memory of a device has made the runtime use it; nothing else is needed."""

    kind = "hip"
    title = "HIP"
    ipc_source, pool_source = "hip_ipc", "hip_pool"
    names = NAMES
    signatures = SIGNATURES
    legacy_stream = 0  # runtimes before 6.3 do not know it by another number
    trusts_shared_events = False  # ROCm reports success for events whose streams are busy
    newer = "install ROCm 6.3 or later"

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self._current = threading.local()
        self.signals = self
        self.call("hipInit", 0)

    def _text(self, name: str, code: int) -> str:
        function = self._function(name)
        function.restype = c_char_p
        return bytes(function(code) or b"unknown").decode()

    def _describe(self, ordinal: int) -> str:
        data, bus = ctypes.create_string_buffer(16), ctypes.create_string_buffer(64)
        self.call("hipDeviceGetUuid", data, ordinal)
        self.call("hipDeviceGetPCIBusId", bus, len(bus), ordinal)
        return format_uuid(data.raw, bus.value.decode())

    @contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        """With a device current in this thread."""
        before = self._device()
        if before == ordinal:
            yield
            return
        self.call("hipSetDevice", ordinal)
        try:
            yield
        finally:
            self.call("hipSetDevice", before)

    def is_current(self, ordinal: int) -> bool:
        return self._device() == ordinal

    @cached_property
    def _get_device(self) -> Any:
        return self._function("hipGetDevice")

    def _device(self) -> int:
        own = self._current.__dict__
        place = own.get("place")
        if place is None:
            place = own["place"] = c_int()
        code = self._get_device(byref(place))
        if code:
            raise self._error("hipGetDevice", code)
        return int(place.value)

    def pointer(self, address: int, field: str = "array") -> Pointer:
        info, base, size = PointerInfo(), c_uint64(), c_size_t()
        self.call("hipPointerGetAttributes", byref(info), address)
        if info.managed or info.type != _DEVICE_MEMORY:
            fix = "use memory of hipMalloc, or of hipMemCreate with descriptors"
            raise self._no_memory(address, field, managed=bool(info.managed), fix=fix)
        with self.current(info.device):
            # The attribute that gives the size has 32 bits.
            self.call("hipMemGetAddressRange", byref(base), byref(size), address)
            mapped = self._is_mapped(address)
        # There is no way to ask for the pool: handles of memory from pools are refused when they are made.
        identity = (self.identity(address), 0)
        return Pointer(info.device, base.value, size.value, identity, not mapped, 0, mapped)

    def _is_mapped(self, address: int) -> bool:
        """True if it is memory that was mapped to addresses: that alone has allocation handles."""
        try:
            retain = self._functions.get(NAMES.retain) or self._function(NAMES.retain)
        except UnsupportedError:
            return False
        handle = c_uint64()
        if retain(byref(handle), address):
            return False
        self.call(NAMES.release, handle)
        return True

    # ---- see SignalCalls ----

    def lock_page(self, ordinal: int, address: int, nbytes: int) -> int:
        found = c_uint64()
        with self.current(ordinal):
            self.call("hipHostRegister", address, nbytes, 0)
            self.call("hipHostGetDevicePointer", byref(found), address, 0)
        return found.value

    def unlock_page(self, ordinal: int, address: int) -> None:
        with self.current(ordinal):
            self.call("hipHostUnregister", address)

    def write_value(self, ordinal: int, stream: int, address: int, value: int) -> None:
        with self.current(ordinal):
            self.call("hipStreamWriteValue64", self.handle(stream), address, value, 0)

    def wait_value(self, ordinal: int, stream: int, address: int, value: int) -> None:
        with self.current(ordinal):
            self.call("hipStreamWaitValue64", self.handle(stream), address, value, _AT_LEAST, _ALL_BITS)

    @contextmanager
    def own_stream(self, ordinal: int) -> Iterator[int]:
        stream = c_void_p()
        with self.current(ordinal):
            self.call("hipStreamCreateWithFlags", byref(stream), _NON_BLOCKING)
        try:
            yield stream.value or 0
        finally:
            self.call("hipStreamDestroy", stream)

    def identity(self, address: int) -> int:
        value = c_uint()
        function = self._functions.get("hipPointerGetAttribute") or self._function("hipPointerGetAttribute")
        return 0 if function(byref(value), _BUFFER_ID, address) else value.value

    def export_legacy(self, ordinal: int, base: int) -> bytes:
        try:
            return super().export_legacy(ordinal, base)
        except DeviceError as error:
            raise UnsupportedError(
                f"the memory was not made to be shared with other processes ({error.message})",
                field="array",
                value=hex(base),
                rule="device_memory_shareable",
                fix="allocate it with hipMalloc, as PyTorch does by default",
            ) from None

    def export_pool(self, ordinal: int, pool: int, base: int) -> tuple[int, bytes]:  # noqa: ARG002 - see pointer()
        raise UnsupportedError(
            "memory of HIP's pools is not shared",
            field="array",
            value=hex(base),
            rule="device_memory_shareable",
            fix="allocate it with hipMalloc",
        )


_lock = threading.Lock()
_loaded: HipDriver | None = None


def driver() -> HipDriver:
    """The runtime of this process. Raises ``UnavailableError`` where there is none."""
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = HipDriver(_library())
    return _loaded


def _library() -> Any:
    for mode in (os.RTLD_NOW | os.RTLD_NOLOAD, os.RTLD_NOW):
        for name in LIBRARIES:
            with contextlib.suppress(OSError):
                return ctypes.CDLL(name, mode)
    raise UnavailableError(
        f"there is no HIP runtime here: none of {', '.join(LIBRARIES)} can be loaded",
        field="driver",
        value=LIBRARIES[0],
        rule="hip_driver",
        fix="pass arrays of the host, or install ROCm",
    )


def _after_fork_in_child() -> None:
    """The parent's devices, events and handles mean nothing here."""
    global _lock, _loaded
    _lock, _loaded = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork_in_child)
