"""Launches of one client, in order, without a host thread ever waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tilewright_kit.types.errors import DeviceError, InvalidArgumentError, TilewrightError
from tilewright_server.devices.contract import RECORD, TIME, WAIT, DeviceLostError, Program, ServedPacket
from tilewright_server.devices.gpu.launch.packets import PacketLane
from tilewright_server.devices.gpu.launch.stream_state import Lane
from tilewright_server.devices.gpu.launch.traces import Traces
from tilewright_server.devices.gpu.memory.deferred_free import Graveyard
from tilewright_server.devices.tracing import Told

if TYPE_CHECKING:
    from tilewright_server.devices.gpu.launch.program import GpuProgram

__all__ = ["GpuStream"]

_HANDLE_BYTES = 64
_EVENTS = WAIT | RECORD


@dataclass(slots=True)
class _Slot:
    """The client's event, or None, and ours."""

    producer: Any
    completion: Any


class GpuStream:
    """See ``LaunchStream``. A lane of its own, and events that other processes know."""

    gives_back_later = True

    def __init__(self, lane: Lane, graveyard: Graveyard) -> None:
        self._lane = lane
        self._driver = lane.driver
        self._graveyard = graveyard
        self._slots: dict[int, _Slot] = {}
        self.lock = lane.packets = PacketLane(lane.driver, lane.stream)
        """Launches of packets, and the lock that keeps them out."""
        self._traces = Traces(lane.driver, self.lock)
        self._timed = False
        self._closed = False

    @property
    def host_synchronisations(self) -> int:
        """How often a host thread has waited for this stream: only launches with ``TIME``, and ``synchronize``, do."""
        return self._lane.host_synchronisations

    @property
    def lane(self) -> Lane:
        """Lane that the launches run on."""
        return self._lane

    @property
    def is_busy(self) -> bool:
        """See ``LastingStream``."""
        return self._graveyard.is_busy(self._lane.stream)

    @property
    def waits(self) -> bool:
        """See ``WaitingStream``."""
        slots = tuple(self._slots.values())
        events = [slot.producer for slot in slots if slot.producer is not None]
        return not self._graveyard.has_come(self._lane.stream, events)

    def open_event(self, slot: int, handle: bytes) -> bytes:
        driver = self._driver
        driver.enter()
        if handle and len(handle) != _HANDLE_BYTES:
            raise InvalidArgumentError(
                f"a handle of an event has {_HANDLE_BYTES} bytes",
                field="handle",
                value=len(handle),
                rule="event_handle",
                fix="send it as the driver gave it, or nothing",
            )
        producer = self._open_producer(handle) if handle else None
        try:
            completion, name = driver.check(driver.api.new_shared_event(), "an event for other processes")
        except TilewrightError:
            if producer is not None:
                driver.quietly(driver.api.end_event(producer))
            raise
        self.lock.set_events(slot, producer, completion)
        before, self._slots[slot] = self._slots.get(slot), _Slot(producer, completion)
        if before is not None:
            self._destroy(before)
        return bytes(name)

    def launch(self, program: Program, addresses: Sequence[int], flags: int, slot: int, workspace: int = 0) -> int:
        self._driver.enter()
        with self.lock:
            self._prepare(flags, slot)
            bound = self._lane.bound(cast("GpuProgram", program), tuple(addresses), workspace)
            self.lock.launch(bound, flags, slot)
        return self.lock.finish() if flags & TIME else 0

    def prepare(
        self,
        binding: int,
        program: Program,
        addresses: Sequence[int],
        workspace: int,
        flags: int,
        slot: int,
        noted: int,
    ) -> None:
        self._driver.enter()
        self._prepare(flags, slot)
        bound = self._lane.bound(cast("GpuProgram", program), tuple(addresses), workspace)
        self.lock.put(binding, bound, noted)

    def tie(self, flags: int, slot: int, sequence: int) -> None:
        self._driver.enter()
        self.lock.tie(flags, slot, sequence)

    def note_in(self, words: memoryview) -> None:
        self.lock.note_in(words)

    def forget(self, binding: int) -> None:
        self.lock.forget(binding)

    def forget_all(self) -> None:
        self.lock.forget_all()

    def serve(self, connection: int, skip: bool) -> ServedPacket | None:
        self._driver.enter()
        return self.lock.serve(connection, skip)

    def trace(self, told: Told) -> None:
        self._driver.enter()
        self._traces.begin(told)

    def poll_traces(self) -> None:
        self._driver.enter()
        self._traces.poll()

    def _prepare(self, flags: int, slot: int) -> None:
        """Make what a launch with these flags needs. Raises ``InvalidArgumentError`` for a slot that was not opened."""
        if flags & _EVENTS:
            self._require_events(flags, slot)
        if flags & TIME and not self._timed:
            self.lock.set_timers(self._lane.event(0), self._lane.event(1))
            self._timed = True

    def synchronize(self) -> None:
        self._driver.enter()
        self._lane.synchronize()

    def close(self) -> None:
        """Does not wait: everything is given back when the last launch has ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._traces.stop()
        if self._driver.lost is None:
            self._driver.enter()
        self._graveyard.bury(self._end)

    def _end(self) -> None:
        self._traces.close()
        self._graveyard.remove(self._lane.stream)
        for slot in self._slots.values():
            self._destroy(slot)
        self._slots.clear()
        self._lane.close()

    def _require_events(self, flags: int, slot: int) -> None:
        events = self._slots.get(slot)
        if events is None or (flags & WAIT and events.producer is None):
            raise InvalidArgumentError(
                "the slot has no event to wait for" if events is not None else "the slot has no events",
                field="slot",
                value=slot,
                rule="event_slot",
                fix="open the slot's events first",
            )

    def _open_producer(self, handle: bytes) -> Any:
        driver = self._driver
        answer = driver.api.open_event(handle)
        if not answer[0]:
            return answer[1]
        error = driver.error(answer[0], "an event of another process")
        if isinstance(error, DeviceLostError):
            raise error
        raise DeviceError(
            f"the handle names no event that can be opened here ({answer[0].name})",
            field="handle",
            rule="event_handle",
            fix="make the event on this device, for other processes and without timing, and keep it alive",
        )

    def _destroy(self, slot: _Slot) -> None:
        """Events that are waited for or recorded still are released by the driver when that is done."""
        for event in (slot.producer, slot.completion):
            if event is not None:
                self._driver.quietly(self._driver.api.end_event(event))
