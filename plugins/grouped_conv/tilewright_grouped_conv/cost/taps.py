"""An estimate of the time of a kernel whose steps along k keep within a tap, on AMD GPUs, to rank kernels.

A guess from the static bound (docs/analysis.md): nothing here was measured on hardware. Cycles are those of one unit.
"""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.cost.gpu import (
    L2_BYTES_PER_CYCLE,
    L2_SHARE,
    MEMORY_SHARE,
    epilogue_cycles,
    resident_of,
)
from tilewright_grouped_conv.footprint.taps import tap_join_cycles, tap_step_bound
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.cost.units import clock_of, units_of
from tilewright_kit.tiles.footprint.workgroup import size_of
from tilewright_kit.types.arithmetic import ceil_div
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["tap_parts", "tap_step_cycles"]

_LOOP_SHARE = 0.96
"""Part of an iteration's bound that the loop is taken to reach."""
_BARRIER_CYCLES = 24.0
"""A step of a workgroup that has its unit to itself waits for all of its waves."""
_FILL_CYCLES = 2000.0


def tap_step_cycles(config: ConvConfig, arch: ArchSpec, together: int) -> float:
    """One step along k of one of the workgroups that share a unit."""
    return tap_step_bound(config, arch) / _LOOP_SHARE + _BARRIER_CYCLES / max(together, 1)


def tap_parts(problem: ConvProblem, config: ConvConfig, device: DeviceInfo, phases: list[Phase]) -> dict[str, float]:
    """Seconds of what a unit computes, of what begins and ends its tiles, and of memory."""
    arch, (m, n, k) = device.arch, config.tile
    clock, units, resident = clock_of(arch), units_of(device), resident_of(config, arch)
    split = max(config.split_k, 1)
    memory = (arch.throughput.memory_bytes_per_second or 1e12) * MEMORY_SHARE
    ending = epilogue_cycles(
        (m, n), staged=config.epilogue is Epilogue.CSHUFFLE, mapped=config.mapped_rows,
        operands=config.num_d_tensors + config.accumulate, bias=bool(config.bias), size=size_of(config.c),
    )  # fmt: skip
    tiles = work = 0
    for phase in phases:
        own = ceil_div(phase.m, m) * ceil_div(phase.n, n) * phase.batch * split
        tiles, work = tiles + own, work + own * ceil_div(ceil_div(phase.k, k), split)
    busiest = ceil_div(tiles, units)
    together = min(resident, max(busiest, 1))
    steps = busiest * work / max(tiles, 1)
    # With several workgroups on a unit, all but the first begin and end beside another's loop.
    exposed = busiest if resident == 1 else ceil_div(busiest, resident)
    parts = {
        "compute": steps * tap_step_cycles(config, arch, together) / clock,
        "ends": exposed * (_FILL_CYCLES + ending) / clock,
        "memory": sum(item.desc.size * item.desc.dtype.bytes for item in problem.operands) / memory,
    }
    if split > 1:
        l2 = arch.throughput.l2_bytes_per_second or L2_BYTES_PER_CYCLE * clock * units
        parts["join"] = tap_join_cycles(config) / clock + 2.0 * tiles * m * n * 4.0 / (l2 * L2_SHARE)
    return parts
