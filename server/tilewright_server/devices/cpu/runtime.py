"""Binding of the native runtime: a pool of pinned threads that runs stages, and memory that is ready to use."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import DeviceError, ResourceExhaustedError
from tilewright_server.devices.cpu.library import resident_library

__all__ = ["STAGE_BYTES", "Pool", "Runtime", "StageRecord", "runtime_unit"]

_SYMBOLS = ("tw_pool_open", "tw_pool_run", "tw_pool_close", "tw_memory_reserve", "tw_memory_release")


class StageRecord(ctypes.Structure):
    """``tw_stage`` of the runtime."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("team", ctypes.c_int32),
        ("nanoseconds", ctypes.c_int64),
    )


STAGE_BYTES = ctypes.sizeof(StageRecord)


def runtime_unit(version: str) -> SourceUnit:
    """The runtime's source; it is built like any kernel, through the artifact cache."""
    return SourceUnit(
        name="cpu_runtime",
        language="c++",
        text='#include "tilewright/cpu/runtime.cpp"\n',
        entries={name: name for name in _SYMBOLS},
        plugin_version=version,
    )


class Runtime:
    """The loaded library."""

    def __init__(self, binary: Path) -> None:
        try:
            library = resident_library(binary).handle
            self._open, self.run, self._close, self._reserve, self._release = (
                getattr(library, name) for name in _SYMBOLS
            )
        except (OSError, AttributeError) as error:
            raise DeviceError(
                "the CPU runtime cannot be loaded",
                rule="cpu_runtime",
                fix="clear the cache of compiled kernels, and check the compiler with `tilewright doctor`",
            ) from error
        self._open.argtypes = (ctypes.c_int32, ctypes.POINTER(ctypes.c_int32))
        self._open.restype = ctypes.c_void_p
        self.run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
        self.run.restype = ctypes.c_int32
        self._close.argtypes = (ctypes.c_void_p,)
        self._close.restype = None
        self._reserve.argtypes = (ctypes.c_int64,)
        self._reserve.restype = ctypes.c_void_p
        self._release.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._release.restype = None

    def open(self, cpus: Sequence[int]) -> Pool:
        """Start a pool with one thread for each of ``cpus``. Raises ``DeviceError``."""
        handle = self._open(len(cpus), (ctypes.c_int32 * len(cpus))(*cpus))
        if not handle:
            raise DeviceError(
                "the threads of the CPU device cannot be started",
                field="cpu_threads",
                value=len(cpus),
                rule="cpu_runtime",
                fix="raise the limit of processes (ulimit -u), or lower the server's cpu_threads",
            )
        return Pool(self, handle)

    def reserve(self, nbytes: int) -> int:
        """Address of zeroed memory, on huge pages where the system grants them, whose pages are present already: the
        first touch of fresh memory costs more than most kernels. Raises ``ResourceExhaustedError``.
        """
        address = self._reserve(nbytes)
        if not address:
            raise ResourceExhaustedError(
                f"the machine has no {nbytes} bytes of memory left",
                field="bytes",
                value=nbytes,
                rule="device_memory",
                fix="free buffers, or use a machine with more memory",
            )
        return int(address)

    def release(self, address: int, nbytes: int) -> None:
        self._release(address, nbytes)


class Pool:
    """A pool of threads; ``handle`` is what ``Runtime.run`` takes."""

    def __init__(self, runtime: Runtime, handle: int) -> None:
        self.handle = handle
        self.runtime = runtime

    def close(self) -> None:
        handle, self.handle = self.handle, 0
        if handle:
            self.runtime._close(handle)
