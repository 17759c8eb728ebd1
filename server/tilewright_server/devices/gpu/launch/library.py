"""Binding of libtilewright as a process of a GPU uses it (``tilewright.h``, ``worker.h``): plans whose functions and
memory are the device's, and connections that are served without the interpreter.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char, c_char_p, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright_kit.types.errors import (
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    TilewrightError,
    UnavailableError,
)
from tilewright_native import library_path

if TYPE_CHECKING:
    from tilewright_server.devices.gpu.driver import GpuDriver

__all__ = ["ENDED", "FAILED", "OTHER", "PACKET_BYTES", "Library", "Packet", "library"]

KINDS = {"cuda": 2, "hip": 3}
PACKET_BYTES = 1024
"""``TW_PACKET_BYTES``."""
ENDED, OTHER, FAILED = 0, 1, 3
"""Answers of ``tw_lane_serve``."""
_DRIVER, _NO_MEMORY, _MISALIGNED = 10, 11, 13


class Packet(ctypes.Structure):
    """``tw_packet``."""

    _fields_ = (
        ("count", c_uint32),
        ("at", c_uint32),
        ("status", c_int32),
        ("reserved", c_uint32),
        ("data", c_char * (PACKET_BYTES + 1)),
    )


class _Memory(ctypes.Structure):
    """``tw_memory``."""

    _fields_ = (
        ("struct_bytes", c_uint32),
        ("reserved", c_uint32),
        ("workspace", c_uint64),
        ("counters", c_uint64),
        ("tables", c_uint64),
        ("stream", c_void_p),
    )


class _Error(ctypes.Structure):
    """``tw_error``."""

    _fields_ = (
        ("status", c_int32),
        ("operand", c_int32),
        ("value", c_int64),
        ("rule", c_char * 32),
        ("message", c_char * 256),
        ("fix", c_char * 192),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "tw_plan_open": (c_char_p, c_size_t, POINTER(c_void_p)),
    "tw_plan_adopt": (c_void_p, POINTER(c_void_p), c_uint32),
    "tw_plan_memory": (c_void_p, POINTER(c_uint64), POINTER(c_uint64)),
    "tw_plan_close": (c_void_p,),
    "tw_bind_in": (c_void_p, POINTER(c_uint64), c_uint32, POINTER(_Memory), POINTER(c_void_p)),
    "tw_binding_close": (c_void_p,),
    "tw_launch": (c_void_p, c_void_p),
    "tw_launch_stage": (c_void_p, c_uint32, c_void_p),
    "tw_lane_open": (c_int32, c_void_p, POINTER(c_void_p)),
    "tw_lane_close": (c_void_p,),
    "tw_lane_note": (c_void_p, c_void_p),
    "tw_lane_lock": (c_void_p,),
    "tw_lane_unlock": (c_void_p,),
    "tw_lane_put": (c_void_p, c_uint64, c_void_p, c_uint64),
    "tw_lane_forget": (c_void_p, c_uint64),
    "tw_lane_forget_all": (c_void_p,),
    "tw_lane_disturb": (c_void_p,),
    "tw_lane_slot": (c_void_p, c_uint16, c_void_p, c_void_p),
    "tw_lane_signals": (c_void_p, c_uint64, c_uint64),
    "tw_lane_timers": (c_void_p, c_void_p, c_void_p),
    "tw_lane_trace": (c_void_p, c_void_p),
    "tw_lane_launch": (c_void_p, c_void_p, c_uint32, c_uint16),
    "tw_lane_tie": (c_void_p, c_uint32, c_uint16, c_uint32),
    "tw_lane_finish": (c_void_p, POINTER(c_uint64)),
    "tw_lane_serve": (c_void_p, c_int32, c_uint64, POINTER(Packet)),
}


class Library:
    """The library's functions by their C names; those that may fail return a status, of which ``error`` says more."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError`` and ``AttributeError`` for what is no such library."""
        native = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(native, name)
            function.argtypes, function.restype = arguments, c_int32
        for count in (native.tw_lane_waits, native.tw_lane_awaited):
            count.argtypes, count.restype = (c_void_p,), c_uint64
        native.tw_last_error.restype = POINTER(_Error)
        self.native = native

    def error(self, driver: GpuDriver, operands: Sequence[str] = ()) -> TilewrightError:
        """The error of the call that failed last in this thread. ``operands`` are the names of the plan's."""
        found = self.native.tw_last_error().contents
        rule, message, fix = (part.decode("utf-8", "replace") for part in (found.rule, found.message, found.fix))
        if found.status in (_DRIVER, _NO_MEMORY) and found.value > 0:
            return driver.error(driver.result(found.value), message.partition(" failed:")[0])
        if found.status == _NO_MEMORY:
            return ResourceExhaustedError(message, rule=rule, fix=fix, retry_after_s=1.0)
        if found.status == _MISALIGNED and 0 <= found.operand < len(operands):
            return InvalidArgumentError(
                message,
                field=operands[found.operand],
                value=f"{found.value} bytes after one",
                rule=rule,
                fix=f"{fix}, or name another kernel",
            )
        return InternalError(message, field="plan", rule=rule, fix="report it as a fault of the operation's plugin")

    def open_plan(self, driver: GpuDriver, data: bytes, functions: Sequence[int]) -> int:
        """A plan without code, with functions of the current context. Close it."""
        native, handle = self.native, c_void_p()
        if native.tw_plan_open(data, len(data), byref(handle)):
            raise self.error(driver)
        if native.tw_plan_adopt(handle, (c_void_p * max(1, len(functions)))(*functions), len(functions)):
            error = self.error(driver)
            native.tw_plan_close(handle)
            raise error
        return handle.value or 0

    def table_bytes(self, plan: int) -> int:
        """Device memory that each binding of a plan needs for tables of arguments."""
        counters, tables = c_uint64(), c_uint64()
        self.native.tw_plan_memory(plan, byref(counters), byref(tables))
        return tables.value

    def bind(
        self,
        driver: GpuDriver,
        plan: int,
        addresses: Sequence[int],
        operands: Sequence[str],
        memory: tuple[int, int, int],
        stream: int,
    ) -> int:
        """A binding with workspace, counters and tables at the addresses ``memory``, of which tables are uploaded in
        the order of ``stream``. Close it. Raises ``InvalidArgumentError`` for a tensor that a tensor map cannot
        describe, ``ResourceExhaustedError``, ``DeviceError``.
        """
        handle, count = c_void_p(), len(addresses)
        given = _Memory(ctypes.sizeof(_Memory), 0, *memory, stream)
        if self.native.tw_bind_in(plan, (c_uint64 * count)(*addresses), count, byref(given), byref(handle)):
            raise self.error(driver, operands)
        return handle.value or 0


_lock = threading.Lock()
_found: Library | None = None


def library() -> Library:
    """The library of this process. Raises ``UnavailableError`` where there is none."""
    global _found
    with _lock:
        if _found is None:
            try:
                _found = Library(library_path())
            except (OSError, AttributeError) as error:
                raise UnavailableError(
                    "libtilewright, which launches kernels on GPUs, cannot be loaded",
                    field="device",
                    value=type(error).__name__,  # its text has paths
                    rule="launch_library",
                    fix="install a wheel that has it; in a checkout, run `python -m tilewright_native.build`",
                ) from error
        return _found
