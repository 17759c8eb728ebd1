"""Launches of one client on one stream, and the packets that ask for them, served by libtilewright."""

from __future__ import annotations

import ctypes
import os
import weakref
from ctypes import byref, c_uint64, c_void_p
from types import TracebackType
from typing import Any

from tilewright_server.devices.contract import ServedPacket
from tilewright_server.devices.gpu.driver import GpuDriver
from tilewright_server.devices.gpu.launch.library import ENDED, FAILED, KINDS, OTHER, Packet, library
from tilewright_server.devices.gpu.launch.stages import BoundLaunch
from tilewright_server.protocol.frames import HEADER_BYTES

__all__ = ["PacketLane"]

SPIN_NS = 100_000 if len(os.sched_getaffinity(0)) >= 4 else 0
"""How long the next packet is looked for, before the thread sleeps, where packets follow each other so closely: being
woken costs more than a launch."""
_DATA = Packet.data.offset


class PacketLane:
    """``tw_lane`` of ``worker.h``. As a context manager its lock, which keeps launches out; a thread may take it twice.

    The context must be current in every thread that launches.
    """

    def __init__(self, driver: GpuDriver, stream: Any) -> None:
        """Raises ``UnavailableError``, ``ResourceExhaustedError``."""
        self._driver = driver
        self._library = library()
        self._native = self._library.native
        handle = c_void_p()
        if self._native.tw_lane_open(KINDS[driver.kind], int(stream), byref(handle)):
            raise self._library.error(driver)
        self._handle = handle.value or 0
        self._packet = Packet()
        self._data = memoryview(self._packet).cast("B")
        self._note: Any = None
        weakref.finalize(self, self._native.tw_lane_close, self._handle).atexit = False

    def __enter__(self) -> None:
        self._native.tw_lane_lock(self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._native.tw_lane_unlock(self._handle)

    @property
    def waits(self) -> int:
        """How often a thread has waited for the device here."""
        return int(self._native.tw_lane_waits(self._handle))

    def note_in(self, words: memoryview) -> None:
        """Let each launch write its number and the time into these two words of 64 bits."""
        self._note = (c_uint64 * 2).from_buffer(words)
        self._native.tw_lane_note(self._handle, ctypes.addressof(self._note))

    def put(self, number: int, bound: BoundLaunch, noted: int) -> None:
        """Let packets launch ``bound`` as ``number``."""
        if self._native.tw_lane_put(self._handle, number, bound.handle, noted):
            raise self._library.error(self._driver)

    def forget(self, number: int) -> None:
        self._native.tw_lane_forget(self._handle, number)

    def forget_all(self) -> None:
        """Bindings that were put may be closed now."""
        self._native.tw_lane_forget_all(self._handle)

    def disturb(self) -> None:
        """From any thread: the next packet comes back from ``serve`` as one that is not prepared. Never waits."""
        self._native.tw_lane_disturb(self._handle)

    def set_events(self, slot: int, producer: Any, completion: Any) -> None:
        """Events of the client, or None, and the lane's own."""
        if self._native.tw_lane_slot(self._handle, slot, int(producer) if producer is not None else 0, int(completion)):
            raise self._library.error(self._driver)

    def set_signals(self, producer: int, completion: int) -> None:
        """Addresses of the client's number, which its packets wait for, and of the lane's own."""
        if self._native.tw_lane_signals(self._handle, producer, completion):
            raise self._library.error(self._driver)

    @property
    def awaited(self) -> int:
        """The largest number that a launch of a packet waits, or has waited, for."""
        return int(self._native.tw_lane_awaited(self._handle))

    def set_timers(self, begin: Any, end: Any) -> None:
        """Events with timing, between which timed launches run."""
        self._native.tw_lane_timers(self._handle, int(begin), int(end))

    def trace(self, trace: ctypes.Structure | None) -> None:
        """Let the next packet fill this ``tw_trace``, which stays where it is."""
        self._native.tw_lane_trace(self._handle, None if trace is None else ctypes.addressof(trace))

    def launch(self, bound: BoundLaunch, flags: int, slot: int) -> None:
        """Launch what was prepared. Raises ``DeviceError``, ``DeviceLostError``."""
        if self._native.tw_lane_launch(self._handle, bound.handle, flags, slot):
            raise self._library.error(self._driver)

    def tie(self, flags: int, slot: int, sequence: int) -> None:
        """See ``ServingStream``. Raises ``InvalidArgumentError``, ``DeviceError``, ``DeviceLostError``."""
        if self._native.tw_lane_tie(self._handle, flags, slot, sequence):
            raise self._library.error(self._driver)

    def finish(self) -> int:
        """Wait for the last launch that was timed; its device time in nanoseconds."""
        found = c_uint64()
        if self._native.tw_lane_finish(self._handle, byref(found)):
            raise self._library.error(self._driver)
        return found.value

    def serve(self, connection: int, skip: bool) -> ServedPacket | None:
        """See ``ServingStream``."""
        packet = self._packet
        if skip:
            packet.at += HEADER_BYTES
        answer = self._native.tw_lane_serve(self._handle, connection, SPIN_NS, byref(packet))
        if answer == ENDED:
            return None
        if answer == OTHER:
            packet.at = packet.count
            return ServedPacket(bytes(self._data[_DATA : _DATA + packet.count]))
        begin = _DATA + packet.at
        error = self._library.error(self._driver) if answer == FAILED else None
        return ServedPacket(bytes(self._data[begin : begin + HEADER_BYTES]), is_launch=True, error=error)
