"""The CPU device."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tilewright_kit.contract.device import Buffer, DeviceInfo, Launch
from tilewright_kit.types.errors import DeviceError, ResourceExhaustedError
from tilewright_server.devices.contract import ProgramStage
from tilewright_server.devices.cpu.library import Library
from tilewright_server.devices.cpu.program import CpuProgram, launch_refused
from tilewright_server.devices.cpu.runtime import Pool, StageRecord
from tilewright_server.devices.errors import check_copy, check_size, closed, not_a_buffer

__all__ = ["CpuDevice", "CpuModule"]

_SHORT_COPY = 64 * 1024
"""Bytes from which on the interpreter's lock is left to others meanwhile, as ``memmove`` of ctypes does."""
_NO_ROOM = ("Cannot allocate memory", "cannot allocate memory", "failed to map segment", "Too many open files")
"""Words of the loader, and of the system, for what says nothing about the binary."""


class CpuModule:
    """A loaded shared object. ``unloaded`` is told of its end."""

    def __init__(self, binary: Path, unloaded: Callable[[CpuModule], None]) -> None:
        try:
            self._library = Library(binary)
        except OSError as error:
            if any(words in str(error) for words in _NO_ROOM):
                raise ResourceExhaustedError(
                    "the server has no memory, mappings or descriptors left to load a kernel",
                    rule="module_memory",
                    fix="run `tilewright doctor` on the server; release plans that are no longer used",
                    retry_after_s=1.0,
                ) from error
            raise DeviceError(
                "the kernel's binary cannot be loaded",
                rule="module_load",
                fix="check the server's compiler with `tilewright doctor`",
            ) from error
        self._unloaded = unloaded
        self._lock = threading.Lock()
        self._loaded = True

    def function(self, symbol: str) -> int:
        with self._lock:
            try:
                if not self._loaded:
                    raise AttributeError
                address = ctypes.cast(getattr(self._library.handle, symbol), ctypes.c_void_p).value
            except AttributeError:
                address = None
        if not address:
            raise DeviceError(
                f"the kernel's binary has no entry {symbol}",
                field="entry",
                value=symbol,
                rule="module_entry",
                fix="report it as a fault of the operation's plugin",
            )
        return address

    def unload(self) -> None:
        with self._lock:
            if not self._loaded:
                return
            self._loaded = False
            self._library.unload()
        self._unloaded(self)


class CpuDevice:
    """The cores that this process may use, behind one pool of threads. Addresses are those of the process itself."""

    def __init__(self, info: DeviceInfo, pool: Pool) -> None:
        self.info = info
        self.lanes = info.units
        self._pool = pool
        self._allocated = 0
        self._buffers: dict[int, int] = {}  # address to size
        self._modules: set[CpuModule] = set()
        self._lock = threading.Lock()
        self._closed = False

    def allocate(self, nbytes: int) -> Buffer:
        check_size(nbytes)
        self._require_open()
        size = max(nbytes, 1)
        with self._lock:
            # The system would promise more than it has and kill the process when the pages are touched.
            if self._allocated + size > self.info.memory_bytes:
                raise ResourceExhaustedError(
                    "the buffers of the CPU device would be larger than the machine's memory",
                    field="bytes",
                    value=nbytes,
                    rule="device_memory",
                    fix="free buffers, or ask for less",
                )
            self._allocated += size
        try:
            buffer = Buffer(self._pool.runtime.reserve(size), nbytes)
        except ResourceExhaustedError:
            self._allocated_changed(-size)
            raise
        with self._lock:
            self._buffers[buffer.address] = size
        return buffer

    def free(self, buffer: Buffer) -> None:
        with self._lock:
            size = self._buffers.pop(buffer.address, None)
        if size is None:
            raise not_a_buffer()
        self._pool.runtime.release(buffer.address, size)
        self._allocated_changed(-size)

    def _allocated_changed(self, nbytes: int) -> None:
        with self._lock:
            self._allocated += nbytes

    def write(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        nbytes = self._span(buffer, offset, data)
        source = data.cast("B") if data.ndim != 1 or data.format != "B" else data
        whole = source.obj
        if nbytes > _SHORT_COPY and isinstance(whole, bytes) and len(whole) == nbytes:
            ctypes.memmove(buffer.address + offset, whole, nbytes)
            return
        target = (ctypes.c_char * nbytes).from_address(buffer.address + offset)
        memoryview(target).cast("B")[:] = source

    def read(self, buffer: Buffer, offset: int, into: memoryview) -> None:
        nbytes = self._span(buffer, offset, into)
        target = into.cast("B") if into.ndim != 1 or into.format != "B" else into
        if nbytes > _SHORT_COPY:
            ctypes.memmove((ctypes.c_char * nbytes).from_buffer(target), buffer.address + offset, nbytes)
            return
        source = (ctypes.c_char * nbytes).from_address(buffer.address + offset)
        target[:] = memoryview(source).cast("B")

    def load(self, binary: Path) -> CpuModule:
        self._require_open()
        module = CpuModule(binary, self._unloaded)
        with self._lock:
            self._modules.add(module)
        return module

    def _unloaded(self, module: CpuModule) -> None:
        with self._lock:
            self._modules.discard(module)

    def run(self, launches: Sequence[Launch], stream: int = 0) -> tuple[int, ...]:  # noqa: ARG002
        """The CPU has one stream: the caller's own thread."""
        self._require_open()
        records = (StageRecord * len(launches))()
        kept = []
        for record, launch in zip(records, launches, strict=True):
            self._require_team(launch.geometry.team)
            args = launch.args.cast("B")
            data = args if args.nbytes and not args.readonly else memoryview(bytearray(args) or bytearray(8))
            block = (ctypes.c_char * data.nbytes).from_buffer(data)
            kept.append(block)
            record.function, record.team = launch.function, launch.geometry.team
            record.args = ctypes.addressof(block)
        status = self._pool.runtime.run(self._pool.handle, ctypes.addressof(records), len(launches))
        if status:
            raise launch_refused(status)
        return tuple(record.nanoseconds for record in records)

    def program(self, stages: Sequence[ProgramStage], operands: Sequence[str], *, counter_bytes: int = 0) -> CpuProgram:
        self._require_open()
        for stage in stages:
            self._require_team(stage.geometry.team)
        return CpuProgram(self._pool, stages, operands, counter_bytes)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            modules, self._modules = self._modules, set()
            buffers, self._buffers = self._buffers, {}
        self._pool.close()
        for module in modules:
            module.unload()
        for address, size in buffers.items():
            self._pool.runtime.release(address, size)

    def _require_open(self) -> None:
        if self._closed:
            raise closed()

    def _require_team(self, team: int) -> None:
        if not 1 <= team <= self.info.units:
            raise DeviceError(
                f"a team of {team} threads on a device with {self.info.units}",
                field="team",
                value=team,
                rule="cpu_team",
                fix=f"use a kernel with a team of at most {self.info.units}, or raise the server's cpu_threads",
            )

    def _span(self, buffer: Buffer, offset: int, data: memoryview) -> int:
        check_copy(offset, data.nbytes, buffer.nbytes)
        return data.nbytes
