"""The driver of one vendor's GPUs in this process, as far as memory and events are shared through it.

``cuda.py`` and ``hip.py`` say what is their own. Nothing is loaded before the first use, and nothing is made current
for longer than a call: memory that is to be shared was allocated by someone, who uses the device already.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from ctypes import byref, c_char, c_char_p, c_int, c_uint64, c_void_p
from functools import cached_property
from threading import local
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewright.errors import (
    DeviceError,
    InvalidArgumentError,
    ResourceExhaustedError,
    TilewrightError,
    UnavailableError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from tilewright.gpu.signals import SignalCalls

__all__ = ["HANDLE_BYTES", "LEGACY_STREAM", "GpuDriver", "Handle", "Names", "Pointer"]

HANDLE_BYTES = 64
LEGACY_STREAM = 1
"""The default stream that waits for, and is waited for by, all blocking streams; drivers may number it otherwise."""
_LAST_DEFAULT_STREAM = 2
"""Handles up to this one mean a stream of the device that is current; others belong to one device."""

# Results that CUDA and HIP number alike.
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE, INVALID_CONTEXT = 1, 2, 3, 100, 201
NOT_READY, NOT_SUPPORTED, NOT_PERMITTED = 600, 801, 800
_CAPTURED_IMPLICITLY = 906
"""A blocking stream is being captured, so that the legacy default stream cannot be used."""
_DEVICE_FAULTS = frozenset({700, 702, 709, 714, 715, 716, 717, 718, 719})
"""Errors of kernels that ran before, which every later call reports."""
POSIX_DESCRIPTOR = 1
_DISABLE_TIMING, _INTERPROCESS = 2, 4
_PEER_ACCESS = 1


class Handle(ctypes.Structure):
    """An interprocess handle, which drivers take by value."""

    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


class Names(NamedTuple):
    """Names of the functions that every driver has."""

    error_name: str
    error_string: str
    device_count: str
    finish_device: str
    new_event: str
    end_event: str
    record: str
    query_event: str
    finish_event: str
    wait: str
    query_stream: str
    finish_stream: str
    capturing: str
    copy_in: str
    copy_out: str
    export_memory: str
    open_memory: str
    close_memory: str
    export_event: str
    open_event: str
    retain: str
    export_allocation: str
    release: str


class Pointer(NamedTuple):
    """Facts that the driver knows about an address."""

    ordinal: int
    base: int
    """Where the allocation begins (of mapped memory: the part of the mapping that one handle stands for)."""
    size: int
    identity: tuple[int, int]
    """Differs between allocations that were at the same address one after the other."""
    legacy: bool
    """True if it has a legacy handle."""
    pool: int
    """The memory pool that it is from, or 0."""
    descriptors: bool
    """True if it can be exported as a POSIX descriptor."""


class _Capture(local):
    """Where a thread is told whether a stream is being captured."""

    def __init__(self) -> None:
        self.place = c_int()
        self.reference = byref(self.place)


class GpuDriver(ABC):
    """The driver's functions, checked. Thread-safe. Ordinals are those of this process."""

    kind = ""
    """As the server names the kind of its devices."""
    title = ""
    """The vendor's name for all of it."""
    names: Names
    signatures: Mapping[str, tuple[Any, ...]]
    ipc_source = ""
    """The field of a region's source for memory with a legacy handle."""
    pool_source = ""
    legacy_stream = LEGACY_STREAM
    """Handle that the driver takes for ``LEGACY_STREAM``."""
    trusts_shared_events = True
    """False if what a query says of another process's event is nothing to skip a wait for."""
    newer = ""
    """Fix for a driver that lacks a function."""
    signals: SignalCalls | None = None
    """Calls by which streams write and wait for numbers in memory of the host; None where nothing needs them."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._functions: dict[str, Any] = {}
        self._labels: dict[int, str] = {}
        self._capture = _Capture()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises ``DeviceError`` and its relatives."""
        code = (self._functions.get(name) or self._function(name))(*arguments)
        if code:
            raise self._error(name, code)

    def _function(self, name: str) -> Any:
        found = getattr(self._library, name, None)
        if found is None:
            raise UnsupportedError(
                f"the {self.title} driver has no {name}",
                field="driver",
                value=name,
                rule=f"{self.kind}_driver_version",
                fix=self.newer,
            )
        found.argtypes, found.restype = self.signatures[name], c_int
        self._functions[name] = found
        return found

    @abstractmethod
    def _text(self, name: str, code: int) -> str:
        """The driver's text of a result."""

    def _error(self, name: str, code: int) -> TilewrightError:
        known = self._text(self.names.error_name, code)
        message = f"{name} failed: {self._text(self.names.error_string, code)} ({known}, {code})"
        facts: dict[str, Any] = {"field": self.kind, "value": known, "rule": f"{self.kind}_driver"}
        if code == OUT_OF_MEMORY:
            return ResourceExhaustedError(message, **facts, fix="free device memory of this process")
        if code in (NOT_SUPPORTED, NOT_PERMITTED):
            return UnsupportedError(message, **facts, fix="this machine or container does not allow it; use copies")
        if code in (NOT_INITIALIZED, NO_DEVICE):
            fix = f"in a forked child {self.title} works only if the parent never used it: start the child by spawn"
            return UnavailableError(message, **facts, fix=fix)
        if code in _DEVICE_FAULTS:
            return DeviceError(message, **facts, fix="an earlier kernel of this process failed: start it again")
        return DeviceError(message, **facts)

    # ---- what each vendor's is another ----

    @abstractmethod
    def current(self, ordinal: int) -> AbstractContextManager[None]:
        """With a device current."""

    @abstractmethod
    def is_current(self, ordinal: int) -> bool:
        """True if the device is current in this thread."""

    @abstractmethod
    def _describe(self, ordinal: int) -> str:
        """Name of the device in every process."""

    @abstractmethod
    def pointer(self, address: int, field: str = "array") -> Pointer:
        """Allocation that an address points to. Raises ``InvalidArgumentError`` unless it is plain memory of a
        device."""

    @abstractmethod
    def identity(self, address: int) -> int:
        """Identity of the allocation at an address, apart from others that were there before; 0 if there is none
        now."""

    @abstractmethod
    def export_pool(self, ordinal: int, pool: int, base: int) -> tuple[int, bytes]:
        """A descriptor of the pool, which the caller closes, and the exported pointer."""

    # ---- devices ----

    def device_count(self) -> int:
        count = c_int()
        self.call(self.names.device_count, byref(count))
        return count.value

    def label(self, ordinal: int) -> str:
        """Name of a device in every process and the server: its UUID as people write it."""
        known = self._labels.get(ordinal)
        if known is None:
            known = self._labels[ordinal] = self._describe(ordinal)
        return known

    # What launches call, looked up once.

    @cached_property
    def _query_stream(self) -> Any:
        return self._function(self.names.query_stream)

    @cached_property
    def _query_capture(self) -> Any:
        return self._function(self.names.capturing)

    @cached_property
    def _query_event(self) -> Any:
        return self._function(self.names.query_event)

    @cached_property
    def _finish_event(self) -> Any:
        return self._function(self.names.finish_event)

    # ---- memory ----

    def export_legacy(self, ordinal: int, base: int) -> bytes:
        """The legacy handle of an allocation, 64 bytes."""
        handle = Handle()
        with self.current(ordinal):
            self.call(self.names.export_memory, byref(handle), base)
        return bytes(handle)

    def export_mapped(self, ordinal: int, address: int) -> int:
        """A descriptor of the allocation that is mapped at ``address``; the caller closes it."""
        handle, fd = c_uint64(), c_int(-1)
        with self.current(ordinal):
            self.call(self.names.retain, byref(handle), address)
            try:
                self.call(self.names.export_allocation, byref(fd), handle, POSIX_DESCRIPTOR, 0)
            finally:
                self.call(self.names.release, handle)
        return fd.value

    def open_legacy(self, ordinal: int, data: bytes) -> int:
        """Map an allocation of another process; returns its base. Undone by ``close_legacy``. Raises
        ``UnsupportedError`` for one of a process that drivers take for this one.
        """
        address = c_uint64()
        with self.current(ordinal):
            function = self._function(self.names.open_memory)
            code = function(byref(address), Handle.from_buffer_copy(data), _PEER_ACCESS)
        if code == INVALID_CONTEXT:
            raise UnsupportedError(
                f"{self.title} takes the memory for this process's own: its owner has the same number in another PID "
                "namespace",
                field="process",
                value=os.getpid(),
                rule="memory_own_process",
                fix="share the server's PID namespace (--pid=container:..., shareProcessNamespace), or let PyTorch or "
                "CuPy allocate: pass out=",
            )
        if code:
            raise self._error(self.names.open_memory, code)
        return address.value

    def close_legacy(self, ordinal: int, base: int) -> None:
        """Unmap it, when nothing of this process uses it any more."""
        with self.current(ordinal):
            self.call(self.names.finish_device)
            self.call(self.names.close_memory, base)

    def read(self, ordinal: int, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from the device to the host behind what is on the stream, and wait for it."""
        with self.current(ordinal):
            self._refuse_capture(stream)
            self.call(self.names.copy_out, target, source, nbytes, self.handle(stream))
            self.call(self.names.finish_stream, self.handle(stream))

    def write(self, ordinal: int, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from the host to the device behind what is on the stream, and wait for it."""
        with self.current(ordinal):
            self._refuse_capture(stream)
            self.call(self.names.copy_in, target, source, nbytes, self.handle(stream))
            self.call(self.names.finish_stream, self.handle(stream))

    # ---- streams and events ----

    def handle(self, stream: int) -> int:
        """Handle that the driver takes for a stream."""
        return self.legacy_stream if stream == LEGACY_STREAM else stream

    def synchronize(self, ordinal: int, stream: int) -> None:
        with self.current(ordinal):
            self._refuse_capture(stream)
            self.call(self.names.finish_stream, self.handle(stream))

    def idle(self, ordinal: int, stream: int) -> bool:
        """True if all work of a stream is over. Raises ``UnsupportedError`` for one that is being captured, and leaves
        the capture as it is."""
        if stream > _LAST_DEFAULT_STREAM or self.is_current(ordinal):
            code = self._refuse_capture(stream) or self._query_stream(self.handle(stream))
            if code != INVALID_CONTEXT:
                return bool(code == 0)
        with self.current(ordinal):
            return bool((self._refuse_capture(stream) or self._query_stream(self.handle(stream))) == 0)

    def _refuse_capture(self, stream: int) -> int:
        """Result of asking for the stream, 0 if nothing is wrong with it. (To query a stream that is being captured, or
        to wait for it, spoils the capture; to ask for this does not.)"""
        capture = self._capture
        code = int(self._query_capture(self.handle(stream), capture.reference))
        if code == _CAPTURED_IMPLICITLY or (not code and capture.place.value):
            raise UnsupportedError(
                f"the stream is being captured into a {self.title} graph, which cannot hold launches of another "
                "process",
                field="stream",
                value=stream,
                rule="stream_capture",
                fix="launch before or after the capture",
            )
        return code

    def is_capturing(self, stream: int) -> bool:
        """True if a stream is being captured into a graph, which this leaves as it is."""
        try:
            self._refuse_capture(stream)
        except UnsupportedError:
            return True
        return False

    def new_event(self, ordinal: int, *, shared: bool = True) -> int:
        """An event without timing; ``shared``: one that another process can open."""
        event = c_void_p()
        with self.current(ordinal):
            self.call(self.names.new_event, byref(event), _DISABLE_TIMING | (_INTERPROCESS if shared else 0))
        return event.value or 0

    def export_event(self, ordinal: int, event: int) -> bytes:
        handle = Handle()
        with self.current(ordinal):
            self.call(self.names.export_event, byref(handle), event)
        return bytes(handle)

    def open_event(self, ordinal: int, data: bytes) -> int:
        event = c_void_p()
        with self.current(ordinal):
            self.call(self.names.open_event, byref(event), Handle.from_buffer_copy(data))
        return event.value or 0

    def destroy_event(self, ordinal: int, event: int) -> None:
        with self.current(ordinal):
            self.call(self.names.end_event, event)

    def record(self, ordinal: int, event: int, stream: int) -> None:
        with self.current(ordinal):
            self.call(self.names.record, event, self.handle(stream))

    def wait(self, ordinal: int, stream: int, event: int) -> None:
        """Make a stream wait for what the event was recorded after last. Does not wait itself."""
        with self.current(ordinal):
            self.call(self.names.wait, self.handle(stream), event, 0)

    def finished(self, ordinal: int, event: int) -> bool:
        # An event knows its context; some drivers want any to be current.
        code = self._query_event(event)
        if code == INVALID_CONTEXT:
            with self.current(ordinal):
                code = self._query_event(event)
        if code not in (0, NOT_READY):
            raise self._error(self.names.query_event, code)
        return bool(code == 0)

    def finish(self, ordinal: int, event: int) -> None:
        """Wait, on the host, for what the event was recorded after."""
        code = self._finish_event(event)
        if code == INVALID_CONTEXT:
            with self.current(ordinal):
                code = self._finish_event(event)
        if code:
            raise self._error(self.names.finish_event, code)

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

    def _no_memory(self, address: int, field: str, *, managed: bool, fix: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{field} is {'managed memory' if managed else 'no memory of a device of this process'}",
            field=field,
            value=hex(address),
            rule="device_memory_kind",
            fix=fix,
        )


def error_text(function: Any, code: int) -> str:
    """Text for a result, by a driver's function that fills it in."""
    found = c_char_p()
    function(code, byref(found))
    return (found.value or b"unknown").decode()
