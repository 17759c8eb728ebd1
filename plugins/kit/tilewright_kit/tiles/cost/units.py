"""Pieces of analytic cost models, for operations to put together.

Rates are per second.
"""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.arithmetic import ceil_div

__all__ = ["clock_of", "unit_efficiency", "units_of"]

_CLOCK_MHZ = 1500


def clock_of(arch: ArchSpec) -> float:
    """Cycles of a GPU's unit in a second; a usual figure where the arch states none."""
    return (arch.throughput.clock_mhz or _CLOCK_MHZ) * 1e6


def units_of(device: DeviceInfo) -> int:
    """Units of a GPU, at least one: of the device itself where it told, else of its arch."""
    return max(device.units or device.arch.throughput.units, 1)


def unit_efficiency(blocks: int, units: int, per_unit: int = 1) -> float:
    """Part of the device that is busy on average: ``blocks / (rounds * units * per_unit)``, in (0, 1].

    "Wave quantisation" of NVIDIA's Matrix Multiplication Background User's Guide: one block more than fits makes a
    whole round more. A device that holds several blocks per unit is less than full but not slower when they are fewer
    than its units, so a last round that leaves no unit without a block counts by blocks per unit.
    """
    if blocks <= 0:
        return 1.0
    units, per_unit = max(1, units), max(1, per_unit)
    full, rest = divmod(blocks, units * per_unit)
    # Blocks on the busiest unit, over all rounds: what the slowest unit has to do.
    busiest = full * per_unit + ceil_div(rest, units)
    return blocks / (busiest * units)
