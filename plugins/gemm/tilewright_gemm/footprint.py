"""What a configuration needs of a workgroup's resources. Used by rules, cost models and features alike."""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_gemm.config import GemmConfig, Triple
from tilewright_gemm.packing import GROUP_BYTES
from tilewright_kit.dtypes import DType

__all__ = ["accumulators_per_thread", "lanes", "staging_bytes", "staging_limit", "step", "vectors_needed"]


def size_of(name: str) -> int:
    """Bytes of an element type by name; unknown ones count as four."""
    return DType(name).bytes if name in DType._value2member_map_ else 4


def step(config: GemmConfig) -> Triple:
    """What the tile must be a multiple of: waves times warp tile, in each dimension."""
    wave, warp = config.wave, config.warp_tile
    return wave[0] * warp[0], wave[1] * warp[1], wave[2] * warp[2]


def staging_bytes(config: GemmConfig, arch: ArchSpec, tile: Triple | None = None) -> int:
    """Bytes that one stage of A and B fills.

    GPU: the tiles of A and B in LDS. CPU: a slab of the side with the smaller tile and one panel of the other, which
    stay in L2 while the shared panels pass by, in groups of 32 bits (``tilewright/cpu/blocking.hpp``).
    """
    m, n, k = tile or config.tile
    if arch.kind == "cpu":
        groups = -(-k // max(config.warp_tile[2], 1))
        panel = config.warp_tile[1] if n >= m else config.warp_tile[0]
        return (min(m, n) + panel) * groups * GROUP_BYTES
    return m * k * size_of(config.a) + n * k * size_of(config.b)


def staging_limit(config: GemmConfig, arch: ArchSpec) -> int:
    """The arch's budget for one stage; 0 if the pipeline is unknown."""
    return arch.lds_budget(config.pipeline) if config.pipeline in arch.pipelines else 0


def lanes(arch: ArchSpec) -> int:
    """32-bit lanes of a CPU vector register (0 on GPUs)."""
    return arch.vector_bytes // 4


def vectors_needed(config: GemmConfig, arch: ArchSpec) -> int:
    """Vector registers of a CPU's register tile: accumulators, one row of B and one broadcast of A."""
    columns = -(-config.warp_tile[1] // lanes(arch))
    return config.warp_tile[0] * columns + columns + 1


def accumulators_per_thread(config: GemmConfig, arch: ArchSpec) -> int:
    """Registers that a GPU thread needs for its part of the output tile."""
    instruction = arch.instruction(config.table_key, config.warp_tile)
    threads = config.wave[0] * config.wave[1] * (instruction.wave_threads if instruction else arch.wave_size)
    return config.tile[0] * config.tile[1] // max(threads, 1)
