"""Resources of a workgroup that a configuration needs: for rules, plans, templates and cost models."""

from __future__ import annotations

import math

from tilewright_arch import ArchSpec
from tilewright_kit.tiles.footprint.hip import (
    hip_copied_registers,
    hip_crowding,
    hip_operand_registers,
    hip_prefetched,
    hip_shared_bytes,
    uses_matrix_unit,
)
from tilewright_kit.tiles.tiled import GROUP_BYTES, Tiled, Triple
from tilewright_kit.types.vocabulary import Epilogue, Reduction, size_of

__all__ = [
    "accumulator_limit",
    "accumulators_per_thread",
    "consumers",
    "fits_registers",
    "fragment_registers",
    "is_specialised",
    "lanes",
    "least_tile",
    "registers_of",
    "shared_bytes",
    "size_of",
    "stages_of",
    "staging_bytes",
    "staging_limit",
    "step",
    "threads_of",
    "vectors_needed",
]


GEMM_MINIMUM: Triple = (16, 16, 8)
"""Smallest GPU tile, of which every one is a multiple."""
PRESHUFFLE_MINIMUM: Triple = (64, 64, 32)
PRESHUFFLE_ALIGNMENT: Triple = (32, 32, 16)


def step(config: Tiled) -> Triple:
    """Waves times warp tile in each dimension, of which the tile is a multiple."""
    wave, warp = config.wave, config.warp_tile
    return wave[0] * warp[0], wave[1] * warp[1], wave[2] * warp[2]


def staging_bytes(config: Tiled, arch: ArchSpec, tile: Triple | None = None) -> int:
    """Bytes that one stage of A and B fills.

    GPU: the tiles of A and B in LDS. CPU: a slab of the side with the smaller tile and one panel of the other, which
    stay in L2 while the shared panels pass by, in groups of 32 bits (``tilewright/cpu/blocks/blocking.hpp``).
    """
    m, n, k = tile or config.tile
    if arch.kind == "cpu":
        groups = -(-k // max(config.warp_tile[2], 1))
        panel = config.warp_tile[1] if n >= m else config.warp_tile[0]
        return (min(m, n) + panel) * groups * GROUP_BYTES
    if config.packed_bits:
        return (m + n) * k * config.packed_bits // 8
    return m * k * size_of(config.a) + n * k * size_of(config.b)


def staging_limit(config: Tiled, arch: ArchSpec) -> int:
    """The arch's budget for one stage; 0 if the pipeline is unknown."""
    return arch.lds_budget(config.pipeline) if config.pipeline in arch.pipelines else 0


def lanes(arch: ArchSpec) -> int:
    """32-bit lanes of a CPU vector register (0 on GPUs)."""
    return arch.vector_bytes // 4


def vectors_needed(config: Tiled, arch: ArchSpec) -> int:
    """Vector registers of a CPU's register tile: accumulators, one row of B and one broadcast of A."""
    columns = -(-config.warp_tile[1] // lanes(arch))
    return config.warp_tile[0] * columns + columns + 1


# ---- GPUs ----


def least_tile(config: Tiled, arch: ArchSpec) -> Triple:
    """The least tile: a multiple of waves times warp tile and of the operator's alignment."""
    unit = step(config)
    if arch.kind == "cpu":
        return unit
    if is_specialised(config, arch) and arch.bulk_copy:
        return unit[0], unit[1], math.lcm(unit[2], arch.bulk_copy.swizzle_bytes // size_of(config.a))
    low, align = (PRESHUFFLE_MINIMUM, PRESHUFFLE_ALIGNMENT) if config.preshuffle else (GEMM_MINIMUM, GEMM_MINIMUM)
    whole = [math.lcm(part, other) for part, other in zip(unit, align, strict=True)]
    m, n, k = (-(-least // part) * part for least, part in zip(low, whole, strict=True))
    return m, n, k


def is_specialised(config: Tiled, arch: ArchSpec) -> bool:
    """True if producer waves of their own fetch A and B (Hopper's ``ws``)."""
    return config.pipeline in arch.pipelines and bool(arch.pipeline(config.pipeline).register_splits)


def consumers(config: Tiled) -> int:
    """Waves of a workgroup that compute: in the pingpong schedule every wave group has its own."""
    return config.waves * (config.num_wave_groups if config.scheduler == "pingpong" else 1)


def threads_of(config: Tiled, arch: ArchSpec) -> int:
    """Threads of a workgroup, producers included."""
    groups = consumers(config) // max(config.waves, 1)
    own = arch.threads_per_workgroup(config.pipeline, config.wave, config.table_key, config.warp_tile)
    extra = arch.pipeline(config.pipeline).extra_threads
    return (own - extra) * groups + extra


def accumulators_per_thread(config: Tiled, arch: ArchSpec) -> int:
    """Registers that a GPU thread needs for its part of the output tile; twice that if it is promoted."""
    instruction = arch.instruction(config.table_key, config.warp_tile)
    threads = config.wave[0] * config.wave[1] * (instruction.wave_threads if instruction else arch.wave_size)
    return config.tile[0] * config.tile[1] // max(threads, 1) * (2 if config.promote > 0 else 1)


def accumulator_limit(config: Tiled, arch: ArchSpec) -> int:
    """Registers of a GPU thread that accumulators may fill, all of them together."""
    offer = arch.pipeline(config.pipeline)
    split = offer.register_split(consumers(config))
    registers = split.consumer if split else arch.registers_per_thread(threads_of(config, arch))
    return registers - max(offer.reserved_registers, 1) - fragment_registers(config, arch) - _state_registers(config)


def instruction_limit(config: Tiled, arch: ArchSpec) -> int:
    """Registers that the result of a single instruction may fill: those that a thread of a warp-specialised workgroup
    has before they are divided, less the operands and addresses that ptxas wants beside it.
    """
    return arch.registers_per_thread(threads_of(config, arch)) - _BESIDE_INSTRUCTION


_BESIDE_INSTRUCTION = 28
_STEP_REGISTERS, _STREAM_REGISTERS, _JOIN_ACCUMULATORS = 8, 8, 128
"""Registers that fused steps and Stream-K's state take, as ptxas counts; and the sums of a tile that a thread can still
add up from the workspace.
"""


def _state_registers(config: Tiled) -> int:
    """Registers for fused steps, results as wide as their sums, Stream-K, and promoted sums that are joined."""
    steps = config.fused or size_of(config.c) == GROUP_BYTES
    stream, promoted = config.reduction is not Reduction.NONE, config.promote > 0 and config.split_k > 1
    extra = (_STEP_REGISTERS if steps else 0) + (_STREAM_REGISTERS if stream or promoted else 0)
    return extra + config.gather_registers


def join_limit(config: Tiled) -> int:
    """Sums of a thread, promotion aside, where tiles are joined from parts. Clusters, fused steps and consumers that
    alternate take registers from them.
    """
    clustered, pingpong = config.cluster[:2] != (1, 1), config.scheduler == "pingpong"
    if config.reduction is not Reduction.NONE:
        return _JOIN_ACCUMULATORS - (_STEP_REGISTERS if clustered or config.fused else 0)
    if config.split_k > 1:
        return _JOIN_ACCUMULATORS - (_STEP_REGISTERS if clustered and pingpong else 0)
    return 1 << 16


def fits_registers(config: Tiled, arch: ArchSpec) -> bool:
    """True if the accumulators of a GPU thread fit its registers, with all else that it holds."""
    needed = accumulators_per_thread(config, arch)
    if needed + hip_crowding(config, arch) > accumulator_limit(config, arch):
        return False
    if not is_specialised(config, arch):
        return True
    columns = config.warp_tile[0] if config.transpose_c else config.warp_tile[1]
    own = needed // 2 if config.promote > 0 else needed
    return columns // 2 <= instruction_limit(config, arch) and own <= join_limit(config)


def registers_of(config: Tiled, arch: ArchSpec) -> int:
    """Registers of a thread of a kernel whose waves all compute, by this count."""
    reserved = max(arch.pipeline(config.pipeline).reserved_registers, 1) + hip_copied_registers(config, arch)
    return accumulators_per_thread(config, arch) + fragment_registers(config, arch) + reserved


def fragment_registers(config: Tiled, arch: ArchSpec) -> int:
    """Registers of a thread for A and B, where instructions read them from registers: of fp32 as many steps of k as a
    read gives (``atom_simt.hpp``), else two steps (``atom_mma.hpp``).
    """
    if uses_matrix_unit(config, arch):
        return hip_operand_registers(config, arch, stages_of(config, arch))
    if arch.kind == "cpu" or is_specialised(config, arch):
        return 0
    rows, columns = (size // max(waves, 1) for size, waves in zip(config.tile[:2], config.wave, strict=False))
    if config.a == "fp32":
        values = rows // 8 + columns // 4
        depth = 1 if config.letters[:2] == "cr" else 2 if values > 16 else 4
        return depth * values
    registers = 2 * (4 * (rows // 16) + 2 * (columns // 8))
    # Where the matrix unit has no 8-bit floats they are widened on the way; bytes across k are put in order.
    if config.a == "int8" and config.letters != "rcr" and config.fused:
        registers += _STEP_REGISTERS
    return registers * 3 // 2 if config.a in ("fp8", "bf8") else registers


def stages_of(config: Tiled, arch: ArchSpec) -> int:
    """Stages of A and B in shared memory, or under way in registers: what the configuration says, else as many as fit,
    within the pipeline's bounds.
    """
    if config.stages > 0:
        return config.stages
    offer = arch.pipeline(config.pipeline)
    if uses_matrix_unit(config, arch) and not offer.double_buffer:
        return min(max(hip_prefetched(config, arch), offer.min_stages), offer.max_stages)
    if is_specialised(config, arch):
        room = arch.lds_bytes - _staged_c(config) - _gathered(config) - _BARRIER_BYTES
        stage = staging_bytes(config, arch) + config.bytes_beside_stage
        return min(max(room // max(stage, 1), offer.min_stages), offer.max_stages)
    fitting = offer.min_stages
    while fitting < offer.max_stages and _shared_bytes(config, arch, fitting + 1) <= arch.lds_bytes:
        fitting += 1
    return fitting


def shared_bytes(config: Tiled, arch: ArchSpec) -> int:
    """Dynamic shared memory of a workgroup on a GPU.

    ``GemmPlan`` of ``tilewright/sm90/gemm/plan.hpp`` and ``Gemm`` of ``tilewright/gpu/gemm/gemm.hpp``; tests compare.
    """
    return _shared_bytes(config, arch, stages_of(config, arch))


def _shared_bytes(config: Tiled, arch: ArchSpec, stages: int) -> int:
    if is_specialised(config, arch):
        stage = staging_bytes(config, arch) + config.bytes_beside_stage
        return stages * stage + _staged_c(config) + _gathered(config) + _BARRIER_BYTES
    if uses_matrix_unit(config, arch):
        return hip_shared_bytes(config, arch)
    shuffled = consumers(config) * _strip_bytes(config) if config.epilogue is Epilogue.CSHUFFLE else 0
    return max(_ring_bytes(config, arch, stages), shuffled) + _FLAG_BYTES


_BARRIER_BYTES = 512
_FLAG_BYTES = 16
_CHUNK = 16
_PIECE_ROWS, _LINE_BYTES, _PIECES_STAGED = 64, 128, 2


def _gathered(config: Tiled) -> int:
    """Bytes in which the first workgroup of a cluster along k receives the sums of the others."""
    return (max(config.cluster[2], 1) - 1) * config.tile[0] * config.tile[1] * 4


def _staged_c(config: Tiled) -> int:
    """Pieces of C that consumers of the warp-specialised pipeline hand to the copy engine: 64 rows of 128 bytes, or,
    when transposed, 64 columns of all the tile's rows; two for each consumer if it has so many.
    """
    if config.epilogue is not Epilogue.CSHUFFLE:
        return 0
    rows, columns = (1, 0) if config.transpose_c else (0, 1)
    repeats = config.tile[rows] // max(config.wave[rows] * _PIECE_ROWS, 1)
    own = config.tile[columns] // max(config.wave[columns], 1)
    size = size_of(config.c)
    across = 1 if config.transpose_c else own * size // _LINE_BYTES
    piece = own * _PIECE_ROWS * size if config.transpose_c else _PIECE_ROWS * _LINE_BYTES
    return consumers(config) * min(repeats * across, _PIECES_STAGED) * piece


def _ring_bytes(config: Tiled, arch: ArchSpec, stages: int) -> int:
    """The stages of a pipeline without producers. Lines of operands of less than 4 bytes that are not 16-byte aligned
    arrive with a chunk more and are moved into a tile of their own first.
    """
    tile = staging_bytes(config, arch)
    if not arch.pipeline(config.pipeline).double_buffer:
        return tile
    if size_of(config.a) >= GROUP_BYTES or not config.any_alignment:
        return stages * tile
    raw = tile + sum(_lines(config)) * _CHUNK
    return max(stages * tile, tile + max(2, stages - 1) * raw)


def _lines(config: Tiled) -> tuple[int, int]:
    """Contiguous lines of the tiles of A and B."""
    m, n, k = config.tile
    return (m if config.letters[:1] == "r" else k), (n if config.letters[1:2] == "c" else k)


def _strip_bytes(config: Tiled) -> int:
    """Bytes that a wave's strip of results fills on its way to memory: fp32, rows 8 words further apart than long."""
    rows, columns = (size // max(waves, 1) for size, waves in zip(config.tile[:2], config.wave, strict=False))
    strip = 16
    if config.a == "fp32":
        own = rows // 8
        strip = 8 * (4 if own % 4 == 0 else 2 if own % 2 == 0 else 1)
    return strip * (columns + 8) * 4
