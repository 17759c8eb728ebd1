"""An estimate of the time of a GEMM kernel on a CUDA device, good enough to rank kernels.

Everything is counted for one unit (SM): what its matrix unit, its shared memory and its loads take for a step along k,
how many tiles it gets, and what begins and ends a tile. Rates are the arch's; what no data sheet states is assumed
here, once, and shifts all kernels of a kind alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.cost.tiles import busiest_of, is_unaligned, shapes_of, slices_of
from tilewright_gemm.launch.geometry import grid_of
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Epilogue, Reduction, ScaleA
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.tiles.cost.units import clock_of, units_of
from tilewright_kit.tiles.footprint.workgroup import shared_bytes, size_of, stages_of, threads_of
from tilewright_kit.types.arithmetic import ceil_div

__all__ = [
    "ALONE",
    "FILL_SECONDS",
    "L2_BYTES_PER_CYCLE",
    "L2_SHARE",
    "LAUNCH_SECONDS",
    "LOAD_SECONDS",
    "MEMORY_BYTES_PER_CYCLE",
    "MEMORY_SHARE",
    "SHARED_BYTES_PER_CYCLE",
    "STEP_CYCLES",
    "MainLoop",
    "epilogue_cycles",
    "join_seconds",
    "predict_cuda",
    "predict_portable",
    "resident_of",
]

LAUNCH_SECONDS = 3.0e-6
FILL_SECONDS = 1.3e-6
"""Seconds from a workgroup's start until its first operands have arrived."""
LOAD_SECONDS = 0.9e-6
"""Seconds from asking for operands to having them: what is under way meanwhile bounds a unit's bandwidth."""
SHARED_BYTES_PER_CYCLE = 128.0
L2_BYTES_PER_CYCLE = 64.0
"""Bytes per cycle of one unit."""
MEMORY_BYTES_PER_CYCLE = 26.0
"""Bytes per cycle of one unit, however much it has asked for: memory is fast only if most units read."""
MEMORY_SHARE, L2_SHARE = 0.9, 0.7
"""Parts of the stated rates that kernels reach."""
_STORE_CYCLES = 0.045
"""Cycles of an epilogue, per element of the tile."""
_UNSTAGED = 1.6
"""Factor of the time of threads that store C by themselves."""
ALONE = 1.25
"""Factor of the time of a single consumer, which nobody stands in for while it waits."""
STEP_CYCLES = 24.0
"""Waiting for, and giving back, one stage."""
_JOIN_SECONDS = 1.5e-6
"""Until the last part of a tile knows that it is the last."""
_CLUSTER_JOIN_SECONDS = 0.7e-6
"""The same within a cluster."""
_TURNED_SECONDS = 0.28e-6
"""For an element that a thread brings in from an operand D, one after the other, where C is computed transposed."""
_TURNED_CHUNK = 16
"""Elements that such a kernel reads at a time where D and C are of 16 bits."""
_PORTABLE_SHARE = 0.6
"""Part of the peak that mma.sync reaches where wgmma reaches nearly all; elsewhere it is the peak."""
_SIMT_SHARE = 0.7
_UNALIGNED = 2.0


@dataclass(frozen=True)
class MainLoop:
    """The parts of the estimate in which templates differ."""

    step_cycles: Callable[[GemmConfig, ArchSpec], float]
    """One stage of one tile, on one unit: the longer of multiplying and of reading shared memory."""
    storing_threads: Callable[[GemmConfig, ArchSpec], float]
    """Threads of a workgroup that store results."""
    unaligned: float
    """Factor of a step whose operands do not lie at multiples of 16 bytes."""


def predict_portable(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> Prediction:
    """Seconds of a kernel without producers, and their parts."""
    return predict_cuda(problem, config, device, _PORTABLE)


def predict_cuda(problem: GemmProblem, config: GemmConfig, device: DeviceInfo, loop: MainLoop) -> Prediction:
    """Seconds of the one launch, and their parts."""
    arch = device.arch
    clock, units, shapes = clock_of(arch), units_of(device), shapes_of(problem)
    slices, steps = slices_of(config, shapes)
    step = loop.step_cycles(config, arch) * (loop.unaligned if is_unaligned(problem) else 1.0)
    resident = 1 if config.persistent else resident_of(config, arch)
    epilogue = epilogue_cycles(config, loop.storing_threads(config, arch))
    busiest = busiest_of(config, slices, units * resident)
    if config.reduction is not Reduction.NONE:
        # Every workgroup has the same share of all steps, and about one tile more to finish.
        main, ends = slices * steps * step / grid_of(config, device, 0), 2.0
        busiest = max(slices / units, 1.0)
    else:
        main, ends = busiest * resident * steps * step, busiest
    if config.scheduler == "pingpong":
        ends = 1.0  # the others end while the other consumer multiplies
        main *= ALONE if busiest == 1 else 1.0
    compute = main / clock
    ending = ends * epilogue / clock
    l2, memory = _loads(problem, config, device, shapes, min(slices, units))
    join = join_seconds(config, clock)
    seconds = LAUNCH_SECONDS + FILL_SECONDS + max(compute + ending, l2, memory) + join
    seconds += 0.15 * min(compute, max(l2, memory))  # what overlaps in theory competes in practice
    parts = {"launch": LAUNCH_SECONDS, "fill": FILL_SECONDS, "compute": compute, "epilogue": ending}
    return Prediction(seconds, parts | {"l2": l2, "memory": memory, "join": join})


def resident_of(config: GemmConfig, arch: ArchSpec) -> int:
    """Workgroups that one unit holds at a time."""
    shared = arch.lds_bytes // max(shared_bytes(config, arch), 1)
    registers = arch.register_file // (threads_of(config, arch) * 128)
    return max(min(shared, registers, 2), 1)


def epilogue_cycles(config: GemmConfig, threads: float) -> float:
    """Cycles of the end of a tile, whose results so many threads store."""
    elements = config.tile[0] * config.tile[1]
    operands = 1.0 + 0.3 * config.num_d_tensors + (0.1 if config.bias else 0.0)
    slow = 1.0 if config.epilogue is Epilogue.CSHUFFLE else _UNSTAGED
    return 400.0 + elements * _STORE_CYCLES * operands * slow * 256.0 / threads * size_of(config.c) / 2


def _loads(
    problem: GemmProblem,
    config: GemmConfig,
    device: DeviceInfo,
    shapes: tuple[tuple[int, int, int, float], ...],
    active: float,
) -> tuple[float, float]:
    """Seconds that operands take from L2 to the units, and from memory."""
    arch = device.arch
    rates, size = arch.throughput, problem.dtype_a.bytes
    size_b = 0.5 if problem.int4 else size
    clock = clock_of(arch)
    near = far = 0.0
    for m, n, k, count in shapes:
        tiles_m, tiles_n = ceil_div(m, config.tile[0]), ceil_div(n, config.tile[1])
        # A cluster fetches once what its workgroups share.
        a = m * k * ceil_div(tiles_n, config.cluster[1])
        b = n * k * ceil_div(tiles_m, config.cluster[0])
        near += (a * size + b * size_b) * count
        far += ((m * size + n * size_b) * k + m * n * problem.dtype_c.bytes) * count
    flight = stages_of(config, arch) * (config.tile[0] + config.tile[1]) * config.tile[2] * size
    per_unit = min(L2_BYTES_PER_CYCLE * clock, flight / LOAD_SECONDS)
    l2 = near / max(min(per_unit * active, (rates.l2_bytes_per_second or 1e13) * L2_SHARE), 1.0)
    reach = min(
        min(per_unit, MEMORY_BYTES_PER_CYCLE * clock) * active, (rates.memory_bytes_per_second or 1e12) * MEMORY_SHARE
    )
    return l2, far / max(reach, 1.0)


def join_seconds(config: GemmConfig, clock: float) -> float:
    """Seconds behind the main loop that nothing hides: partial tiles are written, and read by whoever comes last, and
    operands D of transposed tiles are read."""
    return _parts_seconds(config, clock) + _turned_seconds(config)


def _turned_seconds(config: GemmConfig) -> float:
    """Elements of D that each thread reads one after the other; by chunks where a kernel reads them so."""
    if not config.transpose_c or config.num_d_tensors == 0:
        return 0.0
    elements = config.tile[0] * config.tile[1] * config.num_d_tensors / (config.waves * 128)
    d = config.dtype_d[0] if config.dtype_d else config.c
    whole = config.num_d_tensors == 1 and config.scale_a is ScaleA.NONE and size_of(config.c) == size_of(d) == 2
    return _TURNED_SECONDS * elements / (_TURNED_CHUNK if whole else 1)


def _parts_seconds(config: GemmConfig, clock: float) -> float:
    nbytes = config.tile[0] * config.tile[1] * 4.0
    rate = 0.6 * L2_BYTES_PER_CYCLE * clock
    if config.reduction is not Reduction.NONE:
        return _JOIN_SECONDS + 4.0 * nbytes / rate
    if config.cluster[2] > 1:
        return _CLUSTER_JOIN_SECONDS + (config.split_k - 1) * nbytes / (2.0 * rate)
    if config.split_k > 1:
        return _JOIN_SECONDS + (1.0 + config.split_k) * nbytes / rate
    return 0.0


def _portable_step(config: GemmConfig, arch: ArchSpec) -> float:
    m, n, k = config.tile
    multiply = 2.0 * m * n * k / arch.throughput.flops_per_cycle_per_unit.get(config.a, 1024)
    if config.a == "fp32":
        return multiply / _SIMT_SHARE + STEP_CYCLES
    if any(offer.register_splits for offer in arch.pipelines.values()):
        multiply /= _PORTABLE_SHARE * (0.5 if config.a in ("fp8", "bf8") else 1.0)
    part_m, part_n = m // config.wave[0], n // config.wave[1]
    read = 32.0 * k / config.warp_tile[2] * (part_m + part_n) * config.waves / SHARED_BYTES_PER_CYCLE
    return max(multiply, read) * 1.15 + 2 * STEP_CYCLES


_PORTABLE = MainLoop(_portable_step, lambda config, arch: 256.0, _UNALIGNED)  # noqa: ARG005
