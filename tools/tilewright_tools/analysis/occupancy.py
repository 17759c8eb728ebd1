"""How many workgroups of a kernel a compute unit holds at a time, and what keeps it from holding more."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright_arch import ArchSpec, Rates

__all__ = ["Occupancy", "occupancy_of"]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Residency on one compute unit."""

    workgroups: int
    """At a time; 0 if not even one fits."""
    waves_per_simd: int
    """Waves of all resident workgroups, on the SIMD that has the most."""
    limit: str
    """Resource that one more would exceed: registers, LDS or waves."""


def occupancy_of(arch: ArchSpec, rates: Rates, *, waves: int, vgprs: int, lds_bytes: int) -> Occupancy:
    """Residency of workgroups of ``waves`` waves with ``vgprs`` vector registers (accumulation registers included) and
    ``lds_bytes`` of LDS, static and dynamic."""
    per_lane = arch.register_file // (rates.simds * arch.wave_size)
    allocated = -(-max(vgprs, 1) // rates.register_granule) * rates.register_granule
    by_registers = min(per_lane // allocated, rates.waves_per_simd) * rates.simds // waves
    by_waves = rates.waves_per_simd * rates.simds // waves
    by_lds = arch.lds_bytes // lds_bytes if lds_bytes else by_waves
    workgroups, limit = min((by_registers, "registers"), (by_lds, "LDS"), (by_waves, "waves"), key=lambda item: item[0])
    return Occupancy(workgroups, -(-workgroups * waves // rates.simds), limit)
