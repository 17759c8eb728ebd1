"""The time of kernels with producers: warpgroup instructions that read A and B from shared memory."""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.cost.cuda import ALONE, SHARED_BYTES_PER_CYCLE, STEP_CYCLES, MainLoop, predict_cuda
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.tiles.footprint.workgroup import consumers
from tilewright_kit.tiles.tables import SIDE

__all__ = ["predict_warp_specialised", "step_cycles", "storing_threads"]

_OVERHEAD = 1.06
"""Factor of a step: instructions wait for each other."""
_PROMOTED = 0.6
"""Longer by this part, over the instructions between promotions."""


def predict_warp_specialised(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> Prediction:
    """Seconds of the one launch, and their parts."""
    return predict_cuda(problem, config, device, _LOOP)


def step_cycles(config: GemmConfig, arch: ArchSpec) -> float:
    """Cycles of one stage of one tile."""
    m, n, k = config.tile
    multiply = 2.0 * m * n * k / arch.throughput.flops_per_cycle_per_unit.get(config.a, 1024)
    width = config.warp_tile[0] if config.transpose_c else config.warp_tile[1]
    instructions = m * n * k / (float(SIDE) * width * config.warp_tile[2])
    read = instructions * (SIDE + width) * 32 / SHARED_BYTES_PER_CYCLE
    alone = ALONE if consumers(config) == 1 else 1.0
    promoted = 1.0 + (_PROMOTED / config.promote if config.promote else 0.0)
    return max(multiply * promoted, read) * alone * _OVERHEAD + STEP_CYCLES


def storing_threads(config: GemmConfig, arch: ArchSpec) -> float:
    """Threads of a workgroup that store results."""
    instruction = arch.instruction(config.table_key, config.warp_tile)
    return float(instruction.wave_threads if instruction else arch.wave_size) * max(consumers(config), 2)


_LOOP = MainLoop(step_cycles, storing_threads, unaligned=1.0)
