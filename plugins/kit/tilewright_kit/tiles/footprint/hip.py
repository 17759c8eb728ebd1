"""LDS and registers that a kernel of an AMD GPU's matrix units needs.

Mirrors ``AmdLoop`` of ``tilewright/gpu/amd/mainloop.hpp``, its loaders and ``Gemm`` of ``gemm.hpp``; a test compares.
Tiles lie in the LDS without padding, k-major whatever the layout in memory. Kernels of vector units are counted as
those of other GPUs.
"""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_kit.tiles.tiled import Tiled
from tilewright_kit.types.vocabulary import Epilogue, size_of

__all__ = [
    "hip_copied_registers",
    "hip_crowding",
    "hip_operand_registers",
    "hip_prefetched",
    "hip_shared_bytes",
    "uses_matrix_unit",
]

_BYTE = 8
_REGISTER_BYTES = 4
_VECTOR_BYTES = 16
_BANK_BYTES = 4
_BLOCKS = ((16, 16), (8, 16), (16, 8), (8, 8), (4, 16), (4, 8))
"""Bytes along k, and across, of what a thread transposes at a time, the preferred first."""
_LINES_TOGETHER = 16
_PREFETCH_REGISTERS = 64
_BLOCK_REGISTERS, _TURNED_COPIES, _ADDRESSES = 16, 32, 64
"""Clang's count: a thread's part of both tiles from which on transposing crowds those whose lanes hold operands
twice; what it takes then; and what threads of a vector unit take for addresses and steps of the epilogue.
"""
_STRIP_COLUMNS = 64


def uses_matrix_unit(config: Tiled, arch: ArchSpec) -> bool:
    """True if an AMD GPU multiplies the warp tile with matrix instructions."""
    instruction = arch.instruction(config.table_key, config.warp_tile)
    return arch.kind == "hip" and (instruction is None or instruction.name != "simt")


def hip_shared_bytes(config: Tiled, arch: ArchSpec) -> int:
    """Dynamic LDS of a workgroup."""
    tiles = 2 if arch.pipeline(config.pipeline).double_buffer else 1
    staged = _stored_bytes(config, arch, 0) + (0 if config.preshuffle else _stored_bytes(config, arch, 1))
    shuffled = 0
    if config.epilogue is Epilogue.CSHUFFLE:
        columns = config.tile[1] // max(config.wave[1], 1)
        columns = _STRIP_COLUMNS if columns % _STRIP_COLUMNS == 0 else columns
        shuffled = config.waves * config.warp_tile[0] * (columns + 8) * _REGISTER_BYTES
    return max(tiles * staged + config.bytes_beside_tiles, shuffled)


def _stored_bytes(config: Tiled, arch: ArchSpec, axis: int) -> int:
    """LDS bytes of one tile of A (axis 0) or B: threads without a part of its last lines write beyond it."""
    size, extent, depth = size_of(config.a), config.tile[axis], config.tile[2]
    line = _line_bytes(config, size)
    threads = max(config.waves * arch.wave_size, 1)
    if config.letters[axis : axis + 1] == "rc"[axis]:
        along, across, near, lines = line // _VECTOR_BYTES, extent, 1, 1
    else:
        rows, width = _block(size, extent * depth * size, threads)
        along, across, lines = depth // rows, extent * size // width, width // size
        units = (arch.lds_banks or 1) * _BANK_BYTES // _VECTOR_BYTES
        near = next((count for count in (units, 8) if count and across % count == 0), 1)
    total = max(along * across, 1)
    stored = extent
    if total % threads:
        stored = -(-(-(-total // threads) * threads) // max(near * along, 1)) * near * lines
    return -(-stored // _LINES_TOGETHER) * _LINES_TOGETHER * line


def _line_bytes(config: Tiled, size: int) -> int:
    """A tile's line along k, of elements of ``size`` bytes, or of fewer bits."""
    return config.tile[2] * (config.packed_bits or size * _BYTE) // _BYTE


def _block(size: int, tile_bytes: int, threads: int) -> tuple[int, int]:
    """Lines of global memory and bytes of each that a thread takes at a time, where k runs across the lines."""
    for rows, width in _BLOCKS:
        if rows * width // size * threads <= tile_bytes:
            return rows // size, width
    return 4 // size, 16 if size == _REGISTER_BYTES else 8


def hip_operand_registers(config: Tiled, arch: ArchSpec, stages: int) -> int:
    """Registers of a thread for A and B: the fragments of two steps (of a pre-shuffled B, of a whole tile), and what
    waits for its place in the LDS, or to be transposed on the way there.
    """
    _, n, k = config.tile
    # Every step, a lane reads a vector of each row and column of warp tiles.
    fragments = 2 * _warp_tiles(config) * _VECTOR_BYTES // _REGISTER_BYTES
    if config.preshuffle:
        groups = max(arch.wave_size // max(*config.warp_tile[:2], 1), 1)  # of lanes that hold different k
        columns = n // max(config.wave[1] * config.warp_tile[1], 1)
        fragments += columns * (k * size_of(config.b) // groups // _REGISTER_BYTES)
    steps = 0 if config.pipeline == "comp_async" else stages if config.pipeline == "mem" else 1
    transposed = _across(config) * (32 if size_of(config.a) == 1 else 16)
    return fragments + transposed + steps * _staged_registers(config, arch)


def hip_copied_registers(config: Tiled, arch: ArchSpec) -> int:
    """Registers that a thread takes beyond that, if there is room, where lanes hold operands more than once, or an
    instruction takes more than a vector of each line.
    """
    groups = max(arch.wave_size // max(*config.warp_tile[:2], 1), 1)
    held = config.warp_tile[2] // groups * (config.packed_bits or _BYTE) // _BYTE
    deeper = max(held - _VECTOR_BYTES, 0) if size_of(config.a) == 1 else 0
    return _operand_copies(config, arch) + 2 * _warp_tiles(config) * deeper // _REGISTER_BYTES


def _operand_copies(config: Tiled, arch: ArchSpec) -> int:
    """Registers for the copies that lanes hold of each other's operands."""
    instruction = arch.instruction(config.table_key, config.warp_tile)
    copies = (instruction.operand_copies if instruction else 1) - 1
    return copies * 2 * _warp_tiles(config) * _VECTOR_BYTES // _REGISTER_BYTES


def _warp_tiles(config: Tiled) -> int:
    """Blocks of A and of B that a wave multiplies with each other."""
    sides = zip(config.tile[:2], config.wave[:2], config.warp_tile[:2], strict=True)
    return sum(extent // max(waves * size, 1) for extent, waves, size in sides)


def hip_crowding(config: Tiled, arch: ArchSpec) -> int:
    """Registers that clang takes beyond those counted one by one; none on other devices."""
    if arch.kind != "hip":
        return 0
    if not uses_matrix_unit(config, arch):
        return _staged_registers(config, arch) + _ADDRESSES
    copied, several = _operand_copies(config, arch), _staged_registers(config, arch) > _BLOCK_REGISTERS
    return copied + _TURNED_COPIES if copied and several and _across(config) else 0


def _across(config: Tiled) -> int:
    """Operands that are transposed on their way to the LDS."""
    return (config.letters[:1] == "c") + (config.letters[1:2] == "r" and not config.preshuffle)


def hip_prefetched(config: Tiled, arch: ArchSpec) -> int:
    """Steps along k that may be under way in registers without crowding them."""
    return _PREFETCH_REGISTERS // max(_staged_registers(config, arch), 1)


def _staged_registers(config: Tiled, arch: ArchSpec) -> int:
    """Registers of a thread for its part of the tiles of one step."""
    m, n, _ = config.tile
    line_a, line_b = (_line_bytes(config, size_of(dtype)) for dtype in (config.a, config.b))
    staged = m * line_a + (0 if config.preshuffle else n * line_b)
    return staged // max(config.waves * arch.wave_size, 1) // _REGISTER_BYTES
