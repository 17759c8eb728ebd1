"""An estimate of the time of a GEMM kernel on an AMD GPU, good enough to rank kernels until measurements exist.

Everything is counted for one compute unit, like the bounds of static analysis: what its matrix units, its LDS, its path
to L2 and a single wave take for a step along k, how many tiles it gets, and what begins and ends a tile. Rates are the
arch's; what no data sheet states is assumed here, once, and shifts all kernels of a kind alike.
"""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_gemm.config.block_scales import has_exponents, takes_exponents
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.fnuz import turns_codes
from tilewright_gemm.cost.tiles import busiest_of, is_unaligned, shapes_of, slices_of
from tilewright_gemm.launch.geometry import grid_of
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Epilogue
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.tiles.cost.units import clock_of, units_of
from tilewright_kit.tiles.footprint.workgroup import registers_of, shared_bytes, size_of, threads_of
from tilewright_kit.types.arithmetic import ceil_div

__all__ = ["predict_hip", "resident_of"]

_LAUNCH_SECONDS = 5.0e-6
_FILL_SECONDS = 1.5e-6
"""Seconds from a workgroup's start until its first operands have arrived."""
_LOAD_SECONDS = 0.8e-6
"""Seconds from asking for operands to having them: what is under way meanwhile bounds a unit's bandwidth."""
_LDS_BYTES_PER_CYCLE, _L2_BYTES_PER_CYCLE = 128.0, 64.0
"""Rates of one unit, where the arch does not state them."""
_MEMORY_SHARE, _L2_SHARE = 0.85, 0.7
"""Parts of the stated rates that kernels reach."""
_WAIT_CYCLES = {"mem": 250.0, "compv3": 110.0, "comp_async": 50.0}
_USUAL_WAIT_CYCLES = 12.0
"""For which a wave that is alone on its SIMD does not multiply in a step along k, by pipeline: those with one buffer of
LDS wait for everybody else twice. As the static analysis of the usual tiles finds.
"""
_ROUND_CYCLES, _FACTOR_CYCLES = 190.0, 480.0
"""The same beyond that, for 128 of k, where instructions take exponents of blocks: in rounds of 16 blocks, and where a
lane fetches each one itself.
"""
_EXPONENT_REGISTERS = 48
"""For exponents of blocks and where they lie, as clang 22 compiles kernels of four waves."""
_BUFFER_CYCLES = 12.0
"""Cycles of the vector unit, to tell two buffers of LDS apart: time lost where matrix instructions run on that unit."""
_LDS_BEHIND, _L2_BEHIND = 0.08, 0.1
"""Parts of the times of LDS, and of the path to L2, that count besides: overlap in theory competes in practice."""
_PREFETCHED = {"mem": 3.0, "compv3": 1.0}
"""Steps that are under way from memory; elsewhere one and a half."""
_SIMDS = 4
"""Rates of one unit, where the arch does not state them."""
_NARROW_SPEED = 2.0
"""Rate of instructions whose operands both have fewer than 8 bits, against those of 8-bit floats."""
_THIN, _THIN_SHARE = 4, 0.25
"""Instructions with a side of four reach a quarter of the peak."""
_STORE_CYCLES = 0.06
"""Cycles of an epilogue, per element of the tile."""
_UNSTAGED = 1.5
"""Factor of its time where neighbouring lanes do not store neighbouring elements."""
_UNALIGNED = 1.6
_JOIN_SECONDS = 2.0e-6
"""Until the last part of a tile knows that it is the last."""
_MOST_RESIDENT = 8
_CONVERSION_CYCLES = 6 * 4.0
"""For four codes: six instructions of four cycles."""


def predict_hip(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> Prediction:
    """Seconds of the one launch, and what they are made of."""
    arch = device.arch
    clock, units, shapes = clock_of(arch), units_of(device), shapes_of(problem)
    slices, steps = slices_of(config, shapes)
    resident = min(resident_of(config, arch), max(ceil_div(int(slices), units), 1))
    if config.persistent:
        busiest, resident = float(ceil_div(int(slices), max(grid_of(config, device, int(slices)), 1))), 1
    else:
        busiest = busiest_of(config, slices, units)
    compute = steps * _loop_cycles(config, arch, int(busiest), resident) / clock
    compute *= _UNALIGNED if is_unaligned(problem) else 1.0
    # With several workgroups on a unit all but the first end beside another's main loop.
    ending = (busiest if resident == 1 else 1.0) * _epilogue_cycles(config) / clock
    l2, memory = _loads(problem, config, device, shapes, min(slices, units), resident)
    join = _JOIN_SECONDS + _partial_seconds(config, clock) if config.split_k > 1 else 0.0
    seconds = _LAUNCH_SECONDS + _FILL_SECONDS + max(compute, l2, memory) + ending + join
    seconds += _L2_BEHIND * min(compute, memory)
    parts = {"launch": _LAUNCH_SECONDS, "fill": _FILL_SECONDS, "compute": compute, "epilogue": ending}
    return Prediction(seconds, parts | {"l2": l2, "memory": memory, "join": join})


def resident_of(config: GemmConfig, arch: ArchSpec) -> int:
    """Workgroups that one compute unit holds at a time, as LDS and registers allow; at least one."""
    shared = arch.lds_bytes // max(shared_bytes(config, arch), 1)
    threads = threads_of(config, arch)
    exponents = _EXPONENT_REGISTERS if has_exponents(config.scale_b) and takes_exponents(config, arch) else 0
    registers = arch.register_file // max(threads * (registers_of(config, arch) + exponents), 1)
    return max(min(shared, registers, 2 * arch.max_threads_per_workgroup // threads, _MOST_RESIDENT), 1)


def _loop_cycles(config: GemmConfig, arch: ArchSpec, tiles: int, resident: int) -> float:
    """One step along k of each of the ``tiles`` of a unit that holds ``resident`` workgroups, fewer in the end."""
    rounds, rest = divmod(tiles, resident)
    return rounds * _step_cycles(config, arch, resident) + (_step_cycles(config, arch, rest) if rest else 0.0)


def _step_cycles(config: GemmConfig, arch: ArchSpec, together: int) -> float:
    """One step along k of ``together`` workgroups on one unit: the longest of what its matrix units, its LDS and its
    path to L2 take for all of them, and of what a single wave takes to go round.
    """
    m, n, k = config.tile
    rate = float(arch.throughput.flops_per_cycle_per_unit.get(config.a, 1024))
    rate *= _NARROW_SPEED if config.packed_bits else 1.0
    if min(config.warp_tile[:2]) == _THIN:
        rate *= _THIN_SHARE
    simds = arch.rates.simds if arch.rates else _SIMDS
    # Cycles that one wave takes of its own SIMD; others have the same to do.
    own = 2.0 * m * n * k / config.waves / (rate / simds)
    if arch.rates and arch.rates.matrix_on_vector_unit and arch.pipeline(config.pipeline).double_buffer:
        own += _BUFFER_CYCLES
    multiply = own * ceil_div(config.waves * together, simds)
    rows, columns = m // config.wave[0], n // config.wave[1]
    own_b = 0 if config.preshuffle else 1
    size_a, size_b = (config.packed_bits / 8 or size_of(dtype) for dtype in (config.a, config.b))
    read = config.waves * k * (rows * size_a + own_b * columns * size_b)
    written = k * (m * size_a + own_b * n * size_b)
    lds_rate = arch.rates.lds_bytes_per_cycle if arch.rates else _LDS_BYTES_PER_CYCLE
    l2_rate = arch.rates.global_bytes_per_cycle if arch.rates else _L2_BYTES_PER_CYCLE
    moved = together * (read + written) / lds_rate
    loaded = together * k * (m * size_a + n * size_b) / l2_rate
    alone = own + _WAIT_CYCLES.get(config.pipeline, _USUAL_WAIT_CYCLES) + _conversion_cycles(config, arch)
    alone += _exponent_cycles(config, arch)
    return max(multiply, moved, loaded, alone) + _LDS_BEHIND * moved + _L2_BEHIND * loaded


def _conversion_cycles(config: GemmConfig, arch: ArchSpec) -> float:
    """Cycles in which a wave turns codes of 8-bit floats into those that the matrix unit takes (``amd/convert.hpp``),
    for one step along k; the compiler puts them between few of its products.
    """
    if not turns_codes(config, arch):
        return 0.0
    m, n, k = config.tile
    if config.pipeline == "comp_async" and config.layout.startswith("rc"):  # raw tiles, of which waves read parts
        octets = k * (m // config.wave[0] + n // config.wave[1]) / arch.wave_size
    else:
        octets = k * (m + n) / threads_of(config, arch)
    return octets / 4 * _CONVERSION_CYCLES


def _exponent_cycles(config: GemmConfig, arch: ArchSpec) -> float:
    """Cycles of a step in which a wave is busy with exponents and does not multiply."""
    if not (has_exponents(config.scale_b) and takes_exponents(config, arch)):
        return 0.0
    return (_ROUND_CYCLES if config.bytes_beside_tiles else _FACTOR_CYCLES) * config.tile[2] / 128


def _epilogue_cycles(config: GemmConfig) -> float:
    elements = config.tile[0] * config.tile[1]
    operands = 1.0 + 0.3 * config.num_d_tensors + (0.1 if config.bias else 0.0)
    slow = 1.0 if config.epilogue is Epilogue.CSHUFFLE else _UNSTAGED
    return 500.0 + elements * _STORE_CYCLES * operands * slow * size_of(config.c) / 2


def _loads(
    problem: GemmProblem,
    config: GemmConfig,
    device: DeviceInfo,
    shapes: tuple[tuple[int, int, int, float], ...],
    active: float,
    resident: int,
) -> tuple[float, float]:
    """Seconds that operands take from L2 to ``active`` units, and from memory."""
    rates = device.arch.throughput
    clock = clock_of(device.arch)
    size_a, size_b = problem.dtype_a.bytes, problem.dtype_b.bytes
    near = far = 0.0
    for m, n, k, count in shapes:
        near += k * (m * ceil_div(n, config.tile[1]) * size_a + n * ceil_div(m, config.tile[0]) * size_b) * count
        far += (k * (m * size_a + n * size_b) + m * n * problem.dtype_c.bytes) * count
    steps = _PREFETCHED.get(config.pipeline, 1.5)
    flight = resident * steps * config.tile[2] * (config.tile[0] * size_a + config.tile[1] * size_b)
    own = device.arch.rates.global_bytes_per_cycle if device.arch.rates else _L2_BYTES_PER_CYCLE
    per_unit = min(own * clock, flight / _LOAD_SECONDS)
    l2_rate = (rates.l2_bytes_per_second or own * clock * rates.units) * _L2_SHARE
    l2 = near / max(min(per_unit * active, l2_rate or 1e13), 1.0)
    memory_rate = (rates.memory_bytes_per_second or 1e12) * _MEMORY_SHARE
    return l2, far / max(min(per_unit * active, memory_rate), 1.0)


def _partial_seconds(config: GemmConfig, clock: float) -> float:
    """Partial tiles written, and read by whoever comes last."""
    sums = config.tile[0] * config.tile[1] * 4.0
    return (1.0 + config.split_k) * sums / (0.5 * _L2_BYTES_PER_CYCLE * clock)
