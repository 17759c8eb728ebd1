"""A GPU, opened in this process."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright_kit.contract.device import Buffer, DeviceInfo, Launch
from tilewright_kit.contract.plan import PackedArgs
from tilewright_kit.types.errors import ResourceExhaustedError, TilewrightError, UnsupportedError
from tilewright_server.devices.contract import MemoryHandle, ProgramStage
from tilewright_server.devices.errors import check_copy, check_size, closed, not_a_buffer, unloaded
from tilewright_server.devices.gpu.driver import GpuDriver, GpuFunction
from tilewright_server.devices.gpu.launch.program import GpuProgram
from tilewright_server.devices.gpu.launch.stream_state import Lane
from tilewright_server.devices.gpu.memory.deferred_free import Graveyard
from tilewright_server.devices.gpu.memory.pool import SHARED_GRANULE, Memory
from tilewright_server.devices.gpu.memory.sharing import Importer, Mapping
from tilewright_server.devices.gpu.module import GpuModule
from tilewright_server.devices.gpu.stream import GpuStream

__all__ = ["GpuDevice"]

log = logging.getLogger(__name__)

_LANES = 4
"""Executions that may be on the device at a time: enough to hide one's launches behind another's kernels."""
_BINDINGS = 64
_CLIENT_BINDINGS = 4096
_QUIET_S = 2.0
"""How long closing waits for what was launched; the end of the process gives back the rest."""


@dataclass(slots=True, eq=False)
class _Owned:
    """Owner of a ``Buffer``: where the memory came from, and whether it was given back."""

    source: str
    mapping: Mapping | None = None
    live: bool = True


class GpuDevice:
    """See ``Device``, ``ProgramDevice``, ``SharingDevice`` and ``StreamDevice``. Thread-safe.

    Memory comes from one stream-ordered pool; what other processes may map comes from ``allocate_shared``. After a
    sticky error every method raises ``DeviceLostError``: the process must end.
    """

    lanes = _LANES

    def __init__(self, info: DeviceInfo, driver: GpuDriver, ordinal: int, context: Any) -> None:
        """``ordinal`` is what the driver calls the device in this process. ``context`` is current, and released at the
        end."""
        self.info = info
        self.ordinal = ordinal
        self.uuid = str(info.attributes.get("uuid", ""))
        self.shared_granule = SHARED_GRANULE
        self._driver = driver
        self._context = context
        self._memory = Memory(driver, ordinal, info.memory_bytes)
        self._graveyard = Graveyard(driver)
        self._importer = Importer(driver, ordinal, self._graveyard.bury)
        self._functions: dict[int, GpuFunction] = {}
        self._modules: set[GpuModule] = set()
        self._buffers: dict[_Owned, Buffer] = {}
        self._free_lanes: deque[Lane] = deque()
        self._all_lanes: list[Lane] = []
        self._waited = {False: 0, True: 0}
        """Host synchronisations of lanes that are closed, by ``Lane.is_clients``."""
        self._locked: list[memoryview] = []
        self._lock = threading.Lock()
        self._closed = False
        # Memory that is out of use is freed here, where nothing is ever under way.
        self._idle = self._new_lane(_BINDINGS)

    # Memory

    def allocate(self, nbytes: int) -> Buffer:
        self._enter()
        size = self._size(nbytes)
        lane = self._borrow()
        try:
            address = lane.zeroed(size)
            try:
                lane.synchronize()
            except TilewrightError:
                lane.give_back(address)
                raise
        finally:
            self._give_back(lane)
        return self._own(Buffer(address, nbytes, _Owned("pool")))

    def allocate_shared(self, nbytes: int) -> Buffer:
        """Like ``allocate``, for memory that ``export_memory`` will name: it fills blocks of 2 MiB by itself."""
        self._enter()
        size = self._size(nbytes)
        self._graveyard.reap()
        address = self._memory.take_shareable(size)
        try:
            lane = self._borrow()
            try:
                self._driver.check(self._driver.api.fill(address, size, lane.stream))
                lane.synchronize()
            finally:
                self._give_back(lane)
        except TilewrightError:
            self._memory.give_back_shareable(address)
            raise
        return self._own(Buffer(address, nbytes, _Owned("shared")))

    def free(self, buffer: Buffer) -> None:
        self._enter()
        address, source = buffer.address, self._disown(buffer, "pool", "shared")
        self._graveyard.bury(lambda: self._release(address, source))

    def _release(self, address: int, source: str) -> None:
        if source == "shared":
            self._memory.give_back_shareable(address)
        else:
            self._memory.give_back(address, self._idle.stream)

    def write(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        self._copy(self._driver.api.copy_in, self._span(buffer, offset, data), data, data.nbytes)

    def read(self, buffer: Buffer, offset: int, into: memoryview) -> None:
        if into.readonly:
            raise TypeError("the target of a copy cannot be written")
        address = self._span(buffer, offset, into)
        copy = self._driver.api.copy_out
        self._copy(lambda device, host, nbytes, stream: copy(host, device, nbytes, stream), address, into, into.nbytes)

    def _copy(self, copy: Callable[..., Any], address: int, host: memoryview, nbytes: int) -> None:
        self._enter()
        if not nbytes:
            return
        lane = self._borrow()
        try:
            self._driver.check(copy(address, host, nbytes, lane.stream), "a copy")
            lane.synchronize()
        finally:
            self._give_back(lane)

    def lock_host(self, memory: memoryview) -> None:
        """Lock pages of the host, so that copies from and to them need no second copy. Stays slow where it fails."""
        self._enter()
        if self._driver.quietly(self._driver.api.lock_host(memory)):
            self._locked.append(memory)
        else:
            log.warning("memory of the host cannot be locked: copies will be slower")

    # Memory of other processes

    def import_memory(self, handle: MemoryHandle) -> Buffer:
        self._enter()
        mapping = self._importer.open(handle)
        return self._own(Buffer(mapping.base + handle.offset, handle.nbytes, _Owned("mapping", mapping)))

    def release_memory(self, buffer: Buffer) -> None:
        self._enter()
        owner = buffer.owner
        self._disown(buffer, "mapping")
        assert isinstance(owner, _Owned) and owner.mapping is not None
        self._importer.close(owner.mapping)

    def export_memory(self, buffer: Buffer) -> MemoryHandle:
        """A handle that goes over any connection. Only of ``allocate_shared``."""
        self._enter()
        owner = buffer.owner
        if not isinstance(owner, _Owned) or not owner.live or owner.source != "shared":
            raise UnsupportedError(
                "this memory cannot be shared with other processes",
                field="buffer",
                rule="memory_sharing",
                fix="export resident buffers",
            )
        api, check = self._driver.api, self._driver.check
        base, _ = check(api.address_range(buffer.address))
        name = check(api.export_handle(buffer.address), "the handle of a buffer")
        return MemoryHandle(self._driver.ipc_kind, name, buffer.nbytes, offset=buffer.address - base)

    # Code

    def load(self, binary: Path) -> GpuModule:
        self._enter()
        self._graveyard.reap()
        module = GpuModule(self._driver, binary, self._functions, self._unloading)
        with self._lock:
            self._modules.add(module)
        return module

    def _unloading(self, module: GpuModule, finish: Callable[[], None]) -> None:
        with self._lock:
            self._modules.discard(module)
        if self._driver.lost is None:
            self._driver.enter()
            self._graveyard.bury(finish)

    def run(self, launches: Sequence[Launch], stream: int = 0) -> tuple[int, ...]:  # noqa: ARG002
        """Launches that nothing is prepared for. Their arguments have no tables: those would lie on the host."""
        self._enter()
        if not launches:
            return ()
        stages = [
            ProgramStage(launch.function, PackedArgs(_whole_words(launch.args.cast("B")), (), ()), launch.geometry)
            for launch in launches
        ]
        program = self.program(stages, ())
        lane = self._borrow()
        try:
            bound = program.bind(lane, (), 0, 0)
            try:
                return lane.timed(bound, 1)
            finally:
                bound.close()
        finally:
            self._give_back(lane)

    def program(self, stages: Sequence[ProgramStage], operands: Sequence[str], *, counter_bytes: int = 0) -> GpuProgram:
        self._enter()
        return GpuProgram(
            self._driver,
            stages,
            operands,
            functions=self._function,
            borrow=self._borrow,
            give_back=self._give_back,
            closed=self._program_closed,
            counter_bytes=counter_bytes,
        )

    def open_stream(self) -> GpuStream:
        self._enter()
        self._graveyard.reap()
        lane = self._new_lane(_CLIENT_BINDINGS)
        lane.is_clients = True
        self._graveyard.add(lane.stream)
        return self._client_stream(lane)

    def _client_stream(self, lane: Lane) -> GpuStream:
        return GpuStream(lane, self._graveyard)

    def memory_use(self) -> dict[str, int]:
        """Bytes of the pool in use and held, and how many allocations of other processes are mapped."""
        self._enter()
        used, held = self._memory.pooled_bytes()
        return {"pool_used": used, "pool_held": held, "mappings": len(self._importer)}

    def counters(self) -> dict[str, int]:
        """See ``CountingDevice``."""
        use = self.memory_use()
        with self._lock:
            waited = dict(self._waited)
            for lane in self._all_lanes:
                waited[lane.is_clients] += lane.host_synchronisations
            modules = len(self._modules)
        return {
            "host_synchronisations": waited[False],
            "launch_synchronisations": waited[True],
            "pool_used_bytes": use["pool_used"],
            "pool_held_bytes": use["pool_held"],
            "mappings": use["mappings"],
            "modules": modules,
        }

    def check(self) -> None:
        """See ``MonitoredDevice``: a fault of any launch shows in whatever the driver is asked next."""
        self._enter()
        answer = self._driver.api.query_stream(self._idle.stream)
        if answer[0] and not self._driver.is_busy(answer):
            raise self._driver.error(answer[0], "a look at the device")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            buffers, self._buffers = self._buffers, {}
            lanes, self._all_lanes = self._all_lanes, []
            modules, self._modules = self._modules, set()
        driver, api = self._driver, self._driver.api
        if driver.lost is not None or not self._quiet(lanes):
            return  # only the end of the process gives the rest back
        self._graveyard.finish_all()
        for module in modules:
            module.unload()
        for owner, buffer in buffers.items():
            owner.live = False
            if owner.source != "mapping":
                self._release(buffer.address, owner.source)
        self._importer.close_all()
        for memory in self._locked:
            driver.quietly(api.unlock_host(memory))
        self._idle.synchronize()
        for lane in lanes:
            lane.close()
        self._memory.close()
        driver.release(self._context)

    def _quiet(self, lanes: Sequence[Lane]) -> bool:
        """True if everything ends soon."""
        deadline = time.monotonic() + _QUIET_S
        try:
            self._driver.enter()
        except TilewrightError:
            return False
        for lane in lanes:
            while not lane.is_idle:
                if time.monotonic() > deadline or self._driver.lost is not None:
                    return False
                time.sleep(0.001)
        return True

    # Lanes

    def _new_lane(self, bindings: int) -> Lane:
        lane = Lane(self._driver, self._memory, bindings, self._lane_closed)
        with self._lock:
            self._all_lanes.append(lane)
        return lane

    def _lane_closed(self, lane: Lane) -> None:
        with self._lock:
            if lane in self._all_lanes:
                self._all_lanes.remove(lane)
                self._waited[lane.is_clients] += lane.host_synchronisations

    def _borrow(self) -> Lane:
        try:
            return self._free_lanes.pop()
        except IndexError:
            return self._new_lane(_BINDINGS)

    def _give_back(self, lane: Lane) -> None:
        self._free_lanes.append(lane)

    def _program_closed(self, program: GpuProgram) -> None:
        with self._lock:
            for lane in self._all_lanes:
                lane.drop(program)

    # Checks

    def _enter(self) -> None:
        if self._closed:
            raise closed()
        self._driver.enter()

    def _function(self, number: int) -> GpuFunction:
        function = self._functions.get(number)
        if function is None:
            raise unloaded()
        return function

    def _size(self, nbytes: int) -> int:
        check_size(nbytes)
        if nbytes > self.info.memory_bytes:
            raise ResourceExhaustedError(
                f"the device has {self.info.memory_bytes} bytes of memory",
                field="bytes",
                value=nbytes,
                rule="device_memory",
                fix="ask for less",
            )
        return max(nbytes, 1)

    def _own(self, buffer: Buffer) -> Buffer:
        assert isinstance(buffer.owner, _Owned)
        with self._lock:
            self._buffers[buffer.owner] = buffer
        return buffer

    def _disown(self, buffer: Buffer, *sources: str) -> str:
        owner = buffer.owner
        with self._lock:
            if not isinstance(owner, _Owned) or not owner.live or owner.source not in sources:
                raise not_a_buffer()
            owner.live = False
            self._buffers.pop(owner, None)
            return owner.source

    def _span(self, buffer: Buffer, offset: int, data: memoryview) -> int:
        check_copy(offset, data.nbytes, buffer.nbytes)
        return buffer.address + offset


def _whole_words(args: memoryview) -> bytes:
    return bytes(args) + bytes(-args.nbytes % 8)
