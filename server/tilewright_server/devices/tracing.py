"""Contract of traced packets: what a device that serves connections tells of those that a client wants to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["MAX_TRACES", "PacketTimes", "Told", "TracedSink", "TracingStream"]

MAX_TRACES = 32
"""Packets of a connection that are measured at a time; more go unseen."""


@dataclass(frozen=True, slots=True)
class PacketTimes:
    """Times of one packet of launches: two of the clock, in nanoseconds since 1970, and one of the device."""

    started_ns: int
    queued_ns: int
    """When its last launch was handed to the device, or had ended on a device that waits."""
    device_ns: int
    """Between events around its launches; 0 where nobody knows."""
    launches: int
    """How many went well."""
    waits: bool = False
    """Nothing was under way any more at ``queued_ns``."""


Told = Callable[[PacketTimes], None]
TracedSink = Callable[[bytes, PacketTimes], None]
"""Takes the context that a client gave with a packet, and its times."""


@runtime_checkable
class TracingStream(Protocol):
    """A ``ServingStream`` that can measure a packet without waiting for it."""

    def trace(self, told: Told) -> None:
        """Measure the packet that comes next, and call ``told`` some time after it has ended, in any thread. To be
        called by the thread that serves. Raises nothing: what cannot be measured is not."""
        ...

    def poll_traces(self) -> None:
        """Tell of what has ended. Never waits."""
        ...
