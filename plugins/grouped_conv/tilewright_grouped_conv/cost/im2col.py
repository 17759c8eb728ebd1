"""An estimate of the time of a kernel whose pixels a copy engine gathers, to rank kernels.

Fitted to an H200's times of 33 dense layers (``bench/sm90/conv.py``): what it ranked first took 2 % longer than the
best of 3 to 40 kernels in the geometric mean. Cycles are those of one unit.
"""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.footprint.im2col import LINE_BYTES, im2col_product, im2col_slices
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.cost.units import clock_of, units_of
from tilewright_kit.tiles.footprint.workgroup import consumers, size_of
from tilewright_kit.types.arithmetic import ceil_div

__all__ = [
    "FILL_CYCLES",
    "LAUNCH_SECONDS",
    "LINE_BYTES",
    "MEMORY_SHARE",
    "PARTS_BYTES_PER_SECOND",
    "PART_BYTES_PER_CYCLE",
    "STORE_CYCLES",
    "im2col_parts",
    "im2col_step_cycles",
]

_ROWS = 64
"""Rows of one instruction, which reads its rows and all its columns from shared memory."""
_SHARED_BYTES_PER_CYCLE = 190.0
_LOAD_BYTES_PER_CYCLE = 53.0
"""Rate of a unit's operands, from the second-level cache."""
_PRODUCT_SHARE = 0.91
"""Part of the stated rate that products reach."""
FILL_CYCLES = 3000.0
"""From a workgroup's start until the tensor cores are busy."""
STORE_CYCLES = 0.096
"""Time of an epilogue, per element of the tile."""
LAUNCH_SECONDS = 2.1e-6
PART_BYTES_PER_CYCLE = 33.0
"""At which a wave that comes last reads the parts of its tile."""
PARTS_BYTES_PER_SECOND = 2.8e12
"""Rate of all parts, which are written and read once."""
MEMORY_SHARE = 0.67


def im2col_step_cycles(config: ConvConfig, arch: ArchSpec) -> float:
    """One step along k of a workgroup."""
    (m, n, k), size = config.tile, size_of(config.a)
    rate = float(arch.throughput.flops_per_cycle_per_unit.get(config.a, 1024)) * _PRODUCT_SHARE
    return max(
        2.0 * m * n * k / rate,
        (m + n) * k * size / _LOAD_BYTES_PER_CYCLE,
        (m + m // _ROWS * n) * k * size / _SHARED_BYTES_PER_CYCLE,
    )


def im2col_parts(problem: ConvProblem, config: ConvConfig, device: DeviceInfo, phases: list[Phase]) -> dict[str, float]:
    """Seconds of the launch, of what a unit computes, of parts that are joined, and of memory."""
    arch, (m, n, _) = device.arch, config.tile
    clock, units = clock_of(arch), units_of(device)
    moved = sum(item.desc.size * item.desc.dtype.bytes for item in problem.operands)
    parts = {
        "launch": LAUNCH_SECONDS + FILL_CYCLES / clock,
        "memory": moved / ((arch.throughput.memory_bytes_per_second or 1e12) * MEMORY_SHARE),
    }
    cycles = join = 0.0
    for phase in phases:
        product = im2col_product(problem, phase, config)
        split = im2col_slices(product, config)
        work, steps = product.tiles(config) * split, ceil_div(product.steps, split)
        step = im2col_step_cycles(config, arch)
        each, store = ceil_div(work, units), m * n * STORE_CYCLES
        # In the pingpong schedule one tile is stored while the next is computed.
        cycles += each * steps * step + (store if config.scheduler == "pingpong" else each * store)
        if split > 1:
            own = 1 if config.scheduler == "pingpong" else consumers(config)
            join += (1 + split) * m * n * 4.0 / (PART_BYTES_PER_CYCLE * clock * own)
            join += work * m * n * 8.0 / PARTS_BYTES_PER_SECOND
    return parts | {"compute": cycles / clock} | ({"join": join} if join else {})
