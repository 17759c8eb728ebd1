"""What the server gives to a device and asks of one beyond the kit's protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tilewright_arch import ArchSpec
from tilewright_kit.device import DeviceProvider
from tilewright_kit.plan import Geometry, PackedArgs
from tilewright_kit.source import SourceUnit

__all__ = ["DeviceHost", "HostedProvider", "Program", "ProgramDevice", "ProgramStage"]


@dataclass(frozen=True, slots=True)
class DeviceHost:
    """What a provider may use of the server."""

    build: Callable[[SourceUnit, ArchSpec], Path]
    """Build a unit through the artifact cache (or find it there); the binary stays until the process ends."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings by kind of device."""


@runtime_checkable
class HostedProvider(Protocol):
    """A provider that needs the server's build cache or settings."""

    def hosted(self, host: DeviceHost) -> DeviceProvider:
        """A provider like this one that uses ``host``."""
        ...


@dataclass(frozen=True, slots=True)
class ProgramStage:
    """One stage of a plan with its entry point resolved."""

    function: int
    args: PackedArgs
    geometry: Geometry


class Program(Protocol):
    """Stages that are run again and again with other addresses. Thread-safe."""

    weight: int
    """How many of the device's lanes one run occupies: of a CPU, threads."""

    def run(self, addresses: Sequence[int], workspace: int, repeat: int = 1) -> tuple[int, ...]:
        """Run all stages in order, ``repeat`` times, and return when they are complete.

        ``addresses`` are those of the operands, in the order given when the program was made. Returns the device time
        of each stage in nanoseconds, summed over the repeats. Raises ``DeviceError``.
        """
        ...


@runtime_checkable
class ProgramDevice(Protocol):
    """A device with a faster way to run the same stages than one ``Device.run`` after the other."""

    lanes: int
    """Sum of the weights that may run at a time."""

    def program(self, stages: Sequence[ProgramStage], operands: Sequence[str]) -> Program: ...
