"""Pieces of analytic cost models, for operations to put together.

All sizes are elements or bytes as named, all rates are per second, all times are seconds. A rate of zero means unknown
and costs nothing: what is not known must not decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright_arch import ArchSpec
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.types.arithmetic import ceil_div, padded

__all__ = [
    "Traffic",
    "Work",
    "clock_of",
    "estimate",
    "rounds",
    "tile_efficiency",
    "unit_efficiency",
    "units_of",
]

_CLOCK_MHZ = 1500


def clock_of(arch: ArchSpec) -> float:
    """Cycles of a GPU's unit in a second; a usual figure where the arch states none."""
    return (arch.throughput.clock_mhz or _CLOCK_MHZ) * 1e6


def units_of(device: DeviceInfo) -> int:
    """Units of a GPU, at least one: of the device itself where it told, else of its arch."""
    return max(device.units or device.arch.throughput.units, 1)


def tile_efficiency(sizes: Sequence[int], tiles: Sequence[int]) -> float:
    """Useful part of the work of whole tiles: the product of ``size / (ceil(size / tile) * tile)``, in (0, 1].

    "Tile quantisation" of NVIDIA's Matrix Multiplication Background User's Guide. 1.0 if there is no work.
    """
    return math.prod(size / padded(size, tile) for size, tile in zip(sizes, tiles, strict=True) if size > 0)


def rounds(blocks: int, units: int, per_unit: int = 1) -> int:
    """Times that the device fills up: ``ceil(blocks / (units * per_unit))``, with ``per_unit`` blocks resident each."""
    return ceil_div(blocks, max(1, units) * max(1, per_unit))


def unit_efficiency(blocks: int, units: int, per_unit: int = 1) -> float:
    """Part of the device that is busy on average: ``blocks / (rounds * units * per_unit)``, in (0, 1].

    "Wave quantisation" of the same guide: one block more than fits makes a whole round more. A device that holds
    several blocks per unit is less than full but not slower when they are fewer than its units, so a last round that
    leaves no unit without a block counts by blocks per unit.
    """
    if blocks <= 0:
        return 1.0
    units, per_unit = max(1, units), max(1, per_unit)
    full, rest = divmod(blocks, units * per_unit)
    # Blocks on the busiest unit, over all rounds: what the slowest unit has to do.
    busiest = full * per_unit + ceil_div(rest, units)
    return blocks / (busiest * units)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that cross one level of the memory hierarchy, and its rate in bytes per second (0: unknown)."""

    level: str
    nbytes: float
    bytes_per_second: float

    @property
    def seconds(self) -> float:
        return self.nbytes / self.bytes_per_second if self.bytes_per_second > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one kernel, for ``estimate``."""

    flops: float
    peak_flops: float
    """Rate of the units at full use (0: unknown)."""
    efficiency: float = 1.0
    """Useful part of that: tile efficiency, times unit efficiency, times whatever the pipeline reaches."""
    traffic: tuple[Traffic, ...] = ()
    launches: int = 1
    launch_seconds: float = 0.0
    """Fixed cost of a launch: a team's barrier on a CPU, a grid's start and end on a GPU."""
    overlap: float = 1.0
    """Degree to which the pipeline hides memory behind arithmetic: 1 takes the longer of the two, 0 their sum."""
    extra: Mapping[str, float] | None = None
    """Further times by name that overlap with nothing: packing, a reduction, a prologue."""


def estimate(work: Work) -> Prediction:
    """The time of a kernel, in the manner of the roofline model.

    ``max(compute, memory) + (1 - overlap) * min(compute, memory) + launches * launch + extra``; memory is the slowest
    level of the hierarchy: Williams, Waterman and Patterson, Roofline (2009), with a ceiling per cache level as in
    Ilic, Pratas and Sousa, Cache-aware Roofline Model (2014). Always positive and finite for finite input.
    """
    efficiency = min(1.0, max(work.efficiency, 1e-6))
    compute = work.flops / (work.peak_flops * efficiency) if work.peak_flops > 0 else 0.0
    levels = {traffic.level: traffic.seconds for traffic in work.traffic}
    memory = max(levels.values(), default=0.0)
    exposed = (1.0 - min(1.0, max(work.overlap, 0.0))) * min(compute, memory)
    launch = work.launches * work.launch_seconds
    extra = dict(work.extra or {})
    seconds = max(compute, memory) + exposed + launch + sum(extra.values())
    parts = {"compute": compute, **levels, "exposed": exposed, "launch": launch, **extra}
    # An empty problem on an unknown device still takes its turn: models take logarithms of this.
    return Prediction(max(seconds, 1e-9), parts)
