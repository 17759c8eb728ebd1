"""A CUDA driver in host memory, for the parts of it that the client uses. It is called through the C interface, with
the client's own declarations, and writes down what it was asked.

Streams are numbers with a list of what was put on them; nothing runs by itself.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from dataclasses import dataclass, field
from typing import Any

from tilewright.gpu import cuda
from tilewright.gpu import cuda_api as cudaapi

UUIDS = [bytes(range(16)), bytes(range(16, 32))]


@dataclass
class Allocation:
    base: int
    size: int
    ordinal: int
    kind: str
    """legacy, pool, private (a pool that is not shareable), mapped, managed."""
    identity: int
    memory: Any = None
    foreign: bool = False


@dataclass
class FakeCuda:
    """``driver()`` is a ``cuda.Driver`` over it."""

    devices: int = 1
    active: bool = True
    allocations: dict[int, Allocation] = field(default_factory=dict)
    log: list[tuple[Any, ...]] = field(default_factory=list)
    fail: dict[str, int] = field(default_factory=dict)
    """Functions that fail next, with what."""
    events: dict[int, str] = field(default_factory=dict)
    current: list[int] = field(default_factory=lambda: [0])
    unfinished: set[int] = field(default_factory=set)
    """Events that are not over. Those of another process never are while ``busy``."""
    busy: bool = True
    """Whether streams have work that is not over."""
    captured: set[int] = field(default_factory=set)
    """Streams that are being captured. What spoils a capture is noted."""
    descriptors: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ids = itertools.count(100)
        self._kept: list[Any] = []

    def allocate(self, size: int, kind: str = "legacy", ordinal: int = 0) -> int:
        memory = ctypes.create_string_buffer(size + 256)
        base = -(-ctypes.addressof(memory) // 256) * 256
        self.allocations[base] = Allocation(base, size, ordinal, kind, next(self._ids), memory)
        return base

    def allocate_parts(self, size: int, count: int) -> int:
        """Allocations that are mapped one behind the other."""
        base = self.allocate(size * count, "mapped")
        memory = self.allocations.pop(base).memory
        for at in range(base, base + size * count, size):
            self.allocations[at] = Allocation(at, size, 0, "mapped", next(self._ids), memory)
        return base

    def replace(self, base: int) -> None:
        """Another allocation at the same address."""
        self.allocations[base].identity = next(self._ids)

    def find(self, address: int) -> Allocation | None:
        for item in self.allocations.values():
            if item.base <= address < item.base + item.size:
                return item
        return None

    def calls(self, name: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.log if entry[0] == name]

    # ---- the library ----

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        work = getattr(type(self), "_" + name)

        def called(*arguments: Any) -> int:
            if self.fail.get(name):
                return self.fail.pop(name)
            found = work(self, *arguments)
            return 0 if found is None else found

        function = ctypes.CFUNCTYPE(ctypes.c_int, *cudaapi.SIGNATURES[name])(called)
        self._kept.append(function)
        return function

    def driver(self) -> cuda.Driver:
        return cuda.Driver(self)

    def _cuInit(self, flags: int) -> None:
        self.log.append(("init",))

    def _cuGetErrorName(self, code: int, text: Any) -> None:
        text[0] = b"CUDA_ERROR_FAKE"

    def _cuGetErrorString(self, code: int, text: Any) -> None:
        text[0] = b"it was asked to fail"

    def _cuDeviceGet(self, device: Any, ordinal: int) -> None:
        device[0] = ordinal

    def _cuDeviceGetCount(self, count: Any) -> None:
        count[0] = self.devices

    def _cuDeviceGetUuid_v2(self, place: int, device: int) -> None:
        ctypes.memmove(place, UUIDS[device], 16)

    def _cuDevicePrimaryCtxGetState(self, device: int, flags: Any, active: Any) -> None:
        active[0] = int(self.active)

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        self.log.append(("retain", device))
        context[0] = 0x1000 + device

    def _cuCtxGetCurrent(self, context: Any) -> None:
        context[0] = self.current[-1] or None

    def _cuCtxPushCurrent_v2(self, context: int) -> None:
        self.current.append(context)

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:
        context[0] = self.current.pop()

    def _cuCtxSynchronize(self) -> None:
        assert self.current[-1], "no context is current"

    def _cuPointerGetAttribute(self, value: Any, wanted: int, address: int) -> int:
        found = self.find(address)
        assert wanted == 7
        value[0] = found.identity if found is not None else 0
        return 0 if found is not None else 1

    def _cuPointerGetAttributes(self, count: int, wanted: Any, places: Any, address: int) -> None:
        found = self.find(address)
        self.log.append(("attributes", address))
        for index in range(count):
            value = 0
            if found is not None:
                legacy = found.kind == "legacy" and not found.foreign
                pool = 77 if found.kind in ("pool", "private") else 0
                part = found.kind == "mapped"
                value = {
                    2: 2, 7: found.identity, 8: int(found.kind == "managed"), 9: found.ordinal, 10: int(legacy),
                    11: found.base, 12: found.size, 14: int(found.kind in ("pool", "mapped")), 17: pool,
                    18: found.size if part else 0, 19: found.base if part else 0, 20: found.identity,
                }[wanted[index]]  # fmt: skip
            # As the driver does: 4 bytes of those that are an int, 1 of those that are a bool.
            width = {2: 4, 8: 1, 9: 4, 10: 1}.get(wanted[index], 8)
            ctypes.memmove(places[index], value.to_bytes(8, "little"), width)

    def _cuIpcGetMemHandle(self, handle: Any, base: int) -> None:
        self.log.append(("export", base))
        assert self.current[-1], "no context is current"
        ctypes.memmove(handle, b"M" * 56 + base.to_bytes(8, "little"), 64)

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> None:
        address[0] = self.allocate(4096)
        self.allocations[address[0]].foreign = True
        self.log.append(("open", bytes(handle)[:1], flags))

    def _cuIpcCloseMemHandle(self, base: int) -> None:
        self.log.append(("close", base))
        del self.allocations[base]

    def _descriptor(self, place: Any) -> None:
        fd = os.memfd_create("fake-cuda")
        self.descriptors.append(fd)
        place[0] = fd

    def _cuMemPoolExportToShareableHandle(self, fd: Any, pool: int, kind: int, flags: int) -> None:
        self.log.append(("export pool", pool, kind))
        self._descriptor(fd)

    def _cuMemPoolExportPointer(self, data: Any, base: int) -> None:
        ctypes.memmove(data, b"P" * 64, 64)

    def _cuMemRetainAllocationHandle(self, handle: Any, address: int) -> None:
        handle[0] = 55
        self.log.append(("retain allocation", address))

    def _cuMemExportToShareableHandle(self, fd: Any, handle: int, kind: int, flags: int) -> None:
        self.log.append(("export mapped", handle, kind))
        self._descriptor(fd)

    def _cuMemRelease(self, handle: int) -> None:
        self.log.append(("release allocation", handle))

    def _cuEventCreate(self, event: Any, flags: int) -> None:
        event[0] = next(self._ids)
        self.events[event[0]] = "own" if flags & 4 else "private"

    def _cuEventDestroy_v2(self, event: int) -> None:
        del self.events[event]

    def _cuEventRecord(self, event: int, stream: int) -> None:
        assert event in self.events, "no such event"
        self.log.append(("record", event, stream))

    def _cuEventQuery(self, event: int) -> int:
        theirs = self.events.get(event, "").startswith("theirs")
        return 600 if event in self.unfinished or (self.busy and theirs) else 0

    def _cuStreamIsCapturing(self, stream: int, status: Any) -> int:
        status[0] = stream in self.captured
        return 906 if self.captured and stream == 1 else 0

    def _cuStreamQuery(self, stream: int) -> int:
        if stream in self.captured:
            self.log.append(("spoiled", stream))
            return 900
        return 600 if self.busy else 0

    def _cuEventSynchronize(self, event: int) -> None:
        self.log.append(("event synchronize", event))

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        assert event in self.events, "no such event"
        self.log.append(("wait", stream, event))

    def _cuStreamSynchronize(self, stream: int) -> None:
        self.log.append(("synchronize", stream))

    def _cuIpcGetEventHandle(self, handle: Any, event: int) -> None:
        assert self.events[event] == "own"
        ctypes.memmove(handle, b"E" * 56 + event.to_bytes(8, "little"), 64)

    def _cuIpcOpenEventHandle(self, event: Any, handle: Any) -> None:
        event[0] = next(self._ids)
        self.events[event[0]] = "theirs " + bytes(handle)[:2].decode()

    def _cuMemcpyDtoHAsync_v2(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def _cuMemcpyHtoDAsync_v2(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)
