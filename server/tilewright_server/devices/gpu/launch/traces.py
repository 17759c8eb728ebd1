"""Packets that are measured for a trace: events around their launches, looked at now and then, never waited for."""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright_kit.types.errors import TilewrightError
from tilewright_server.devices.tracing import MAX_TRACES, PacketTimes, Told

if TYPE_CHECKING:
    from tilewright_server.devices.gpu.driver import GpuDriver
    from tilewright_server.devices.gpu.launch.packets import PacketLane

__all__ = ["NativeTrace", "Traces"]


class NativeTrace(ctypes.Structure):
    """``tw_trace``."""

    _fields_ = (
        ("begin", c_void_p),
        ("end", c_void_p),
        ("started_ns", c_uint64),
        ("queued_ns", c_uint64),
        ("launches", c_uint32),
        ("over", c_uint32),
    )


@dataclass(slots=True, eq=False)
class _Trace:
    native: NativeTrace
    events: tuple[Any, Any]
    told: Told


class Traces:
    """Those of one lane. Thread-safe."""

    def __init__(self, driver: GpuDriver, packets: PacketLane) -> None:
        self._driver = driver
        self._packets = packets
        self._open: list[_Trace] = []
        self._free: list[tuple[Any, Any]] = []
        self._lock = threading.Lock()

    def begin(self, told: Told) -> None:
        """See ``TracingStream.trace``."""
        self.poll()
        with self._lock:
            if self._open and not self._open[-1].native.started_ns:  # nothing came since
                self._open[-1].told = told
                return
            if len(self._open) >= MAX_TRACES:
                return
            try:
                begin, end = events = self._free.pop() if self._free else self._events()
            except TilewrightError:  # a trace that cannot be made is none
                return
            native = NativeTrace(int(begin), int(end))
            self._open.append(_Trace(native, events, told))
        self._packets.trace(native)

    def _events(self) -> tuple[Any, Any]:
        driver = self._driver
        begin = driver.check(driver.api.new_event(timing=True))
        try:
            return begin, driver.check(driver.api.new_event(timing=True))
        except TilewrightError:
            driver.quietly(driver.api.end_event(begin))
            raise

    def poll(self) -> None:
        """See ``TracingStream.poll_traces``. The context must be current."""
        if not self._open:
            return
        with self._lock:
            over = [trace for trace in self._open if trace.native.over and not self._is_under_way(trace)]
            self._open = [trace for trace in self._open if trace not in over]
            measured = [(trace.told, self._times(trace)) for trace in over]
            self._free += [trace.events for trace in over]
        for told, times in measured:
            if times.started_ns:
                told(times)

    def _is_under_way(self, trace: _Trace) -> bool:
        return bool(trace.native.launches) and self._driver.is_busy(self._driver.api.query_event(trace.events[1]))

    def _times(self, trace: _Trace) -> PacketTimes:
        native = trace.native
        nanoseconds = 0
        if native.launches:
            code, *found = self._driver.api.elapsed_ms(*trace.events)
            nanoseconds = 0 if code else round(float(found[0]) * 1e6)
        queued = native.queued_ns or native.started_ns
        return PacketTimes(native.started_ns, queued, nanoseconds, native.launches)

    def stop(self) -> None:
        """Measure no more: the lane serves nothing any more."""
        self._packets.trace(None)
        with self._lock:
            for trace in self._open:
                trace.native.over = 1

    def close(self) -> None:
        """Tell of the rest, and give the events back: the lane is idle."""
        self.poll()
        with self._lock:
            events = [*self._free, *(trace.events for trace in self._open)]
            self._free, self._open = [], []
        for pair in events:
            for event in pair:
                self._driver.quietly(self._driver.api.end_event(event))
