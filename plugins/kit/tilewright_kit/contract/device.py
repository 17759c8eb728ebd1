"""The device protocol: what the planner may know of a device, and what the executor may ask of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tilewright_arch import ArchSpec
from tilewright_kit.contract.plan import Geometry

__all__ = ["Buffer", "Device", "DeviceInfo", "DeviceProvider", "Launch", "Module"]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The properties of a device that is not opened. ``units`` are cores, SMs or CUs that may be used."""

    id: str
    """Kind and ordinal, for example ``cpu:0``, ``cuda:1``."""
    kind: str
    name: str
    arch: ArchSpec
    units: int
    memory_bytes: int
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(slots=True)
class Buffer:
    """Device memory. ``address`` is in the device's address space; ``owner`` keeps whatever must stay alive."""

    address: int
    nbytes: int
    owner: object = None


class Module(Protocol):
    """A loaded binary."""

    def function(self, symbol: str) -> int:
        """Handle of an entry point; ``DeviceError`` if the binary has no such symbol."""
        ...

    def unload(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Launch:
    """One stage, bound: function handle, argument block (already relocated) and geometry."""

    function: int
    args: memoryview
    geometry: Geometry


class Device(Protocol):
    """An open device. Methods are thread-safe unless they say otherwise.

    Failures raise ``DeviceError`` (``ResourceExhaustedError`` for memory).
    """

    info: DeviceInfo

    def allocate(self, nbytes: int) -> Buffer:
        """Zeroed memory, aligned to at least 256 bytes."""
        ...

    def free(self, buffer: Buffer) -> None: ...

    def write(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        """Copy host bytes into a buffer; returns when ``data`` may be reused."""
        ...

    def read(self, buffer: Buffer, offset: int, into: memoryview) -> None: ...

    def load(self, binary: Path) -> Module: ...

    def run(self, launches: Sequence[Launch], stream: int = 0) -> tuple[int, ...]:
        """Run launches in order and return when they are complete: the device time of each in nanoseconds."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...


class DeviceProvider(Protocol):
    """Finds devices of one kind. Finding must not open a driver context or start a thread."""

    kind: str

    def discover(self) -> tuple[DeviceInfo, ...]:
        """The devices of this machine; empty if there are none."""
        ...

    def open(self, info: DeviceInfo) -> Device: ...

    def diagnose(self) -> Mapping[str, str]:
        """For ``doctor``: what is there and what is missing, with how to get it behind `` Fix: ``. Topics that begin
        with ``note`` are worth knowing even where nothing can be done."""
        ...
