"""An estimate of the time of a convolution kernel on a GPU, good enough to rank kernels until measurements exist.

Everything is counted for one unit: what its matrix units, its shared memory and its accesses to the image take for a
step along k, how many tiles it gets, and what begins and ends a tile. Rates are the arch's; what no data sheet states
is assumed here, once, and shifts all kernels of a kind alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.candidates.applicability.gpu import padded_channels
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.footprint.amd_loads import shares_pixels
from tilewright_grouped_conv.footprint.tma_groups import bulk_tiles
from tilewright_grouped_conv.launch.direct import loop_shared_bytes, loop_workgroups
from tilewright_grouped_conv.launch.gpu import product_shared_bytes
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.strided_copy.copies import Transform
from tilewright_grouped_conv.vocabulary import Direction, Kind
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.tiles.cost.units import clock_of, units_of
from tilewright_kit.tiles.footprint.workgroup import registers_of, size_of, threads_of
from tilewright_kit.types.arithmetic import ceil_div
from tilewright_kit.types.vocabulary import Epilogue

__all__ = [
    "FILL_SECONDS",
    "JOIN_SECONDS",
    "L2_BYTES_PER_CYCLE",
    "L2_SHARE",
    "LAUNCH_SECONDS",
    "MEMORY_SHARE",
    "MOST_RESIDENT",
    "bulk_parts",
    "epilogue_cycles",
    "loop_parts",
    "predict_gpu",
    "product_parts",
    "resident_of",
    "step_cycles",
]

LAUNCH_SECONDS = {"cuda": 3.0e-6, "hip": 5.0e-6}
_COPY_RATE = 1.5e11
"""Bytes of a copy per second: strided copies move elements one by one."""
FILL_SECONDS = 1.5e-6
"""From a workgroup's start until its first operands have arrived."""
_SHARED_BYTES_PER_CYCLE, L2_BYTES_PER_CYCLE = 128.0, 64.0
"""Bytes per cycle of one unit, where the arch does not state them."""
MEMORY_SHARE, L2_SHARE = 0.85, 0.7
"""Parts of the stated rates that kernels reach."""
_PORTABLE_SHARE = 0.6
"""Share that instructions of one wave reach on archs whose peak needs several waves together."""
_SIMT_SHARE = 0.7
_STEP_CYCLES = 220.0
"""CUDA: waiting for, and giving back, one stage: shared by the workgroups of a unit, of which others work meanwhile."""
_ALONE, _FEW_WAVES = 1.4, 4
"""CUDA: how much longer a unit takes that has no more waves than these, which nobody stands in for while they wait."""
_MANY_WAVES = 1.2
"""CUDA: how much longer workgroups of more waves take, which wait for each other."""
_NOT_ASYNC = 2.5
"""How much longer accesses take that are too short to be copied past the registers (CUDA: below four bytes)."""
_WAIT_CYCLES, _USUAL_WAIT_CYCLES = {"mem": 250.0, "compv3": 110.0}, 48.0
"""AMD: the same by pipeline; those with one buffer of LDS wait for everybody twice."""
_GATHER_CYCLES, _ACCESS_CYCLES = 5.0, 2.5
"""Cycles of a unit to find one pixel (one line of a matrix) for every lane of a wave, and to read a vector there."""
_PIXEL_CYCLES, _LINE_CYCLES = 60.0, 4.0
_SHARED_PIXEL_CYCLES, _QUAD_CYCLES = 10.0, 224.0
"""AMD, gradient of the weights: vector instructions of a unit for one vector of the image, whose pixel every lane works
out, and of the other operand; where a quad of lanes shares four pixels, for one vector, and in each step (counted by
``kernels analyze`` over nine tiles of gfx942 and gfx950: within a tenth).
"""
_LANES, _GCN_LANES = 32, 64
STORE_CYCLES = 0.05
"""Cycles of an epilogue, per element of the tile."""
MAPPED = 1.3
"""How much longer it takes where every row's place is worked out."""
JOIN_SECONDS = 1.5e-6
"""Until the last part of a tile knows that it is the last."""
_LOOP_CYCLES = 2.0
"""Without a product: of one multiplication for every lane, with the reading that goes with it."""
_LOOP_MEMORY = {False: 0.4, True: 0.65}
"""Without a product: part of memory's rate that kernels reach, those of merged groups more than others."""
_GROUP_CYCLES = {Direction.FORWARD: 6.0, Direction.BACKWARD_DATA: 6.0, Direction.BACKWARD_WEIGHT: 14.0}
"""The same for groups of several channels, whose weights are read again for every pixel."""
_MERGED_BLOCK, _MERGED_SHARE = 8, 0.25
"""Channels of a block of merged groups, and what its instructions reach of the peak."""
_MOST_WAVES, _ENOUGH_WAVES, _BULK_IDLE = 48, 12, 0.7
MOST_RESIDENT = 4


Parts = Callable[[ConvProblem, ConvConfig, DeviceInfo, list[Phase]], dict[str, float]]
"""Seconds of what a kernel does in the given phases, by name; among them ``compute`` and ``memory``."""


def predict_gpu(
    problem: ConvProblem, config: ConvConfig, device: DeviceInfo, copies: tuple[Transform, ...], parts_of: Parts
) -> Prediction:
    """Seconds of all launches, and what they are made of."""
    launch = LAUNCH_SECONDS[device.arch.kind]
    parts = {"launch": launch + FILL_SECONDS, "copies": sum(launch + copy.nbytes / _COPY_RATE for copy in copies)}
    phases = [phase for phase in problem.phases(config.channels_first) if phase.m and phase.n and phase.batch]
    parts |= parts_of(problem, config, device, phases)
    shown = max(parts["compute"], parts.get("l2", 0.0), parts["memory"])
    behind = 0.15 * min(parts["compute"], max(parts.get("l2", 0.0), parts["memory"]))
    other = sum(value for name, value in parts.items() if name not in ("compute", "l2", "memory"))
    return Prediction(shown + behind + other, parts)


def product_parts(
    problem: ConvProblem, config: ConvConfig, device: DeviceInfo, phases: list[Phase]
) -> dict[str, float]:
    """Parts of an implicit or pointwise product."""
    return _products(problem, config, device, phases) | {"memory": _memory(problem, device)}


def loop_parts(problem: ConvProblem, config: ConvConfig, device: DeviceInfo, phases: list[Phase]) -> dict[str, float]:
    """Parts of a kernel without a product."""
    merged = config.num_groups_to_merge > 1
    if merged:
        arch = device.arch
        shared = loop_shared_bytes(problem.largest, config, arch)
        resident = max(min(arch.lds_bytes // max(shared, 1), _MOST_WAVES // config.waves), 1)
        groups = loop_workgroups(problem.largest, config, problem.geometry.n, arch) * max(config.split_k, 1)
        # Few waves on a unit leave memory idle; tiles that follow one another are copied ahead.
        ahead = config.pixel_tile[0] > 1 and problem.direction is not Direction.BACKWARD_WEIGHT
        idle = 1.0 if resident * config.waves >= _ENOUGH_WAVES else 1.25
        parts = _merged(problem, config, device, phases, groups, idle * (0.9 if ahead else 1.0))
    else:
        parts = _loops(problem, config, device, phases)
    return parts | {"memory": _memory(problem, device, _LOOP_MEMORY[merged])}


def bulk_parts(problem: ConvProblem, config: ConvConfig, device: DeviceInfo, phases: list[Phase]) -> dict[str, float]:
    """Parts of merged groups whose tensors a copy engine moves, which needs no waves."""
    groups = math.prod(bulk_tiles(problem.largest, config, problem.geometry.n)) * max(config.split_k, 1)
    parts = _merged(problem, config, device, phases, groups, _BULK_IDLE)
    return parts | {"memory": _memory(problem, device, _LOOP_MEMORY[True])}


def _memory(problem: ConvProblem, device: DeviceInfo, share: float = 1.0) -> float:
    """Seconds of all operands at a share of what kernels reach of memory's rate."""
    rate = (device.arch.throughput.memory_bytes_per_second or 1e12) * MEMORY_SHARE
    return sum(item.desc.size * item.desc.dtype.bytes for item in problem.operands) / (rate * share)


def _products(problem: ConvProblem, config: ConvConfig, device: DeviceInfo, phases: list[Phase]) -> dict[str, float]:
    arch, (m, n, _) = device.arch, config.tile
    clock = clock_of(arch)
    units = units_of(device)
    split = max(config.split_k, 1)
    resident = resident_of(config, arch)
    tiles = work = 0
    near = 0.0
    for phase in phases:
        own = ceil_div(phase.m, m) * ceil_div(phase.n, n) * phase.batch
        each = ceil_div(_steps(problem, phase, config), split)
        tiles += own * split
        work += own * split * each
        near += own * split * each * config.tile[2] * (m * size_of(config.a) + n * size_of(config.b))
    steps = work / max(tiles, 1)
    rounds = math.ceil(tiles / (units * resident))
    # In the last round a unit may hold fewer workgroups, each of which then goes faster.
    busiest = rounds * resident if tiles > units * resident else ceil_div(tiles, units)
    step = step_cycles(config, arch, min(resident, max(busiest, 1)))
    l2 = arch.throughput.l2_bytes_per_second or L2_BYTES_PER_CYCLE * clock * units
    ending = epilogue_cycles(
        config.tile[:2], staged=config.epilogue is Epilogue.CSHUFFLE, mapped=config.mapped_rows,
        operands=config.num_d_tensors + config.accumulate, bias=bool(config.bias), size=size_of(config.c),
    )  # fmt: skip
    parts = {
        "compute": busiest * steps * step / clock,
        "epilogue": rounds * ending / clock,
        "l2": near / (l2 * L2_SHARE),
    }
    if split > 1:
        sums = sum(phase.batch * phase.m * phase.n for phase in phases) * 4.0
        rate = (arch.throughput.memory_bytes_per_second or 1e12) * MEMORY_SHARE
        if config.two_stage:
            parts["join"] = LAUNCH_SECONDS[arch.kind] + 2.0 * sums * split / max(rate, l2 * L2_SHARE)
        else:
            parts["join"] = JOIN_SECONDS + (1.0 + split) * m * n * 4.0 / (0.6 * L2_BYTES_PER_CYCLE * clock)
    return parts


def _steps(problem: ConvProblem, phase: Phase, config: ConvConfig) -> int:
    """Steps along k of one tile: those of backward data keep within a tap."""
    if problem.direction is Direction.BACKWARD_DATA and config.kind is Kind.IMPLICIT:
        return phase.taps * ceil_div(phase.k // max(phase.taps, 1), config.tile[2])
    k = phase.k
    if wide := padded_channels(problem, config):
        k = phase.taps * wide
    return max(ceil_div(k, config.tile[2]), 1)


def step_cycles(config: ConvConfig, arch: ArchSpec, together: int) -> float:
    """One step along k of one of the workgroups that share a unit."""
    m, n, k = config.tile
    rate = float(arch.throughput.flops_per_cycle_per_unit.get(config.a, 1024))
    multiply = 2.0 * m * n * k / rate
    if arch.kind == "cuda":
        if config.a == "fp32":
            multiply /= _SIMT_SHARE
        elif any(offer.register_splits for offer in arch.pipelines.values()):
            multiply /= _PORTABLE_SHARE
    part_m, part_n = m // config.wave[0], n // config.wave[1]
    read = config.waves * k * (part_m * size_of(config.a) + part_n * size_of(config.b))
    lds = (read + k * (m * size_of(config.a) + n * size_of(config.b))) / (
        arch.rates.lds_bytes_per_cycle if arch.rates else _SHARED_BYTES_PER_CYCLE
    )
    weight = config.direction is Direction.BACKWARD_WEIGHT
    gathers = config.kind is Kind.IMPLICIT
    accesses = [
        size * k / vector / _LANES * (_NOT_ASYNC if vector * size_of(name) < 4 else 1.0)
        for size, vector, name in zip((m, n), config.vector_sizes, (config.a, config.b), strict=False)
    ]
    image = accesses[1] if weight else accesses[0]
    issue = sum(accesses) * _ACCESS_CYCLES + (image * _GATHER_CYCLES if gathers else 0.0)
    busy = max(multiply, lds) * 1.1
    if arch.kind == "hip":
        wait = _WAIT_CYCLES.get(config.pipeline, _USUAL_WAIT_CYCLES)
        if weight and gathers and arch.wave_size == _GCN_LANES:
            # One workgroup alone works out places and multiplies by turns; of several, others multiply meanwhile.
            places = accesses[1] * _PIXEL_CYCLES
            if shares_pixels(config, arch):
                places = accesses[1] * _SHARED_PIXEL_CYCLES + _QUAD_CYCLES
            places += accesses[0] * _LINE_CYCLES
            return max(max(busy, places * 1.1), (busy + places + wait) / max(together, 1))
        return busy + 0.5 * issue + wait / max(together, 1)
    if config.waves > _FEW_WAVES:
        busy *= _MANY_WAVES
    if config.waves * together <= _FEW_WAVES:
        busy *= _ALONE
    return busy + 0.5 * issue + _STEP_CYCLES / max(together, 1)


def resident_of(config: ConvConfig, arch: ArchSpec) -> int:
    """Workgroups that one unit holds at a time, as shared memory and registers allow."""
    shared = arch.lds_bytes // max(product_shared_bytes(config, arch), 1)
    registers = arch.register_file // max(threads_of(config, arch) * registers_of(config, arch), 1)
    return max(min(shared, registers, config.block_per_cu or MOST_RESIDENT, MOST_RESIDENT), 1)


def epilogue_cycles(
    tile: tuple[int, int], *, staged: bool, mapped: bool, operands: int, bias: bool, size: int
) -> float:
    """Storing a tile of results of ``size`` bytes, to which so many ``operands`` of their shape are brought in."""
    brought = 1.0 + 0.3 * operands + (0.1 if bias else 0.0)
    slow = (1.0 if staged else 1.5) * (MAPPED if mapped else 1.0)
    return 400.0 + tile[0] * tile[1] * STORE_CYCLES * brought * slow * size / 2


def _loops(problem: ConvProblem, config: ConvConfig, device: DeviceInfo, phases: list[Phase]) -> dict[str, float]:
    """Vectors of channels, a multiplication for each of them and every tap; accesses of one element cost as much."""
    arch = device.arch
    clock = clock_of(arch)
    units = units_of(device)
    products = sum(phase.batch * phase.m * phase.n * phase.k for phase in phases)
    unrolled = 1.0 if any(config.filter) else 1.8
    pixels = max(math.prod(config.pixel_tile), 1) if any(config.pixel_tile) else 4
    # Every tap's weights are read once for all pixels of a step, every pixel once for all taps where these are fixed.
    access = (1.0 / pixels + (0.4 if any(config.filter) else 1.0)) * _ACCESS_CYCLES / config.vector_sizes[0]
    cycles = products / (4.0 * _LANES) * (unrolled + access) * _LOOP_CYCLES / 2.0
    if config.kind is Kind.DIRECT:
        cycles *= _GROUP_CYCLES[problem.direction]
    waves = sum(phase.batch * phase.m * phase.n for phase in phases) / config.vector_sizes[0] / pixels / _LANES
    # A thread with several channels has as many sums under way.
    busy = min(1.0, waves * min(config.vector_sizes[0], 4) / (8.0 * units))
    if problem.direction is Direction.BACKWARD_WEIGHT:
        busy = 1.0
    return {"compute": cycles / (clock * units * max(busy, 0.05))}


def _merged(
    problem: ConvProblem, config: ConvConfig, device: DeviceInfo, phases: list[Phase], groups: int, idle: float
) -> dict[str, float]:
    """Blocks of eight channels (of weights, pairs of them): what instructions multiply besides is zero, as it is beyond
    the edges of images. Tiles read the edge that they share with their neighbours, and the fewer columns they have, the
    more of it. Of ``groups`` workgroups memory is idle for a time ``idle``, and for longer where units have none.
    """
    arch, geometry, (_, rows, run) = device.arch, problem.geometry, config.pixel_tile
    clock, units = clock_of(arch), units_of(device)
    products = sum(phase.batch * phase.m * phase.n * phase.k for phase in phases)
    block = _MERGED_BLOCK * (2 if problem.direction is Direction.BACKWARD_WEIGHT else 1)
    wasted = max(block / max(geometry.cg, 1), 1.0)
    for axis, size in ((1, rows or 8), (2, run or 8)):
        extent = max(problem.largest.axes[axis].rows, 1)
        wasted *= ceil_div(extent, size) * size / extent
    rate = float(arch.throughput.flops_per_cycle_per_unit.get(config.a, 1024)) * _MERGED_SHARE
    idle *= max(1.0, units / max(groups, 1))
    spans = [
        ((size - 1) * stride + (taps - 1) * dilation + 1) / (size * stride)
        for size, stride, taps, dilation in zip(
            (rows or 8, run or 8), geometry.stride[1:], geometry.filter[1:], geometry.dilation[1:], strict=True
        )
    ]
    image = geometry.n * geometry.c * geometry.in_pixels * size_of(config.a)
    l2 = arch.throughput.l2_bytes_per_second or L2_BYTES_PER_CYCLE * clock * units
    return {
        "compute": 2.0 * products * wasted / (rate * units * clock),
        "l2": math.prod(spans) * image / (l2 * L2_SHARE),
        "idle": (idle - 0.9) * image / (l2 * L2_SHARE),
    }
