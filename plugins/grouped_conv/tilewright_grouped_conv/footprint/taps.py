"""Least cycles of kernels whose steps along k keep within a tap (``gpu/conv/taps.hpp``), as their units bound them."""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_kit.tiles.footprint.workgroup import size_of

__all__ = ["tap_join_cycles", "tap_step_bound"]

_SHARED_BYTES_PER_CYCLE = 128.0
_L2_BYTES_PER_CYCLE = 45.0
"""Rate at which a unit reads from L2, of 64 bytes that it could."""

_PART_BYTES_PER_CYCLE, _JOIN_CYCLES = 38.0, 3000.0
"""Slices: rate at which the workgroup that comes last reads the parts of its tile, and until it knows."""


def tap_step_bound(config: ConvConfig, arch: ArchSpec) -> float:
    """One step along k of a workgroup: its products, what its waves read from LDS and write there, what it loads."""
    (m, n, k), size = config.tile, size_of(config.a)
    read = config.waves * (m // config.wave[0] + n // config.wave[1])
    shared = arch.rates.lds_bytes_per_cycle if arch.rates else _SHARED_BYTES_PER_CYCLE
    return max(
        2.0 * m * n * k / float(arch.throughput.flops_per_cycle_per_unit.get(config.a, 1024)),
        (read + m + n) * k * size / shared,
        (m + n) * k * size / _L2_BYTES_PER_CYCLE,
    )


def tap_join_cycles(config: ConvConfig) -> float:
    """Until the slices of a tile are added: each writes its sums, and the last one reads them all."""
    if config.split_k <= 1:
        return 0.0
    return _JOIN_CYCLES + (1.0 + config.split_k) * config.tile[0] * config.tile[1] * 4.0 / _PART_BYTES_PER_CYCLE
