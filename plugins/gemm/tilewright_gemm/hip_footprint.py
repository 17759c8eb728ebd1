"""What a kernel of an AMD GPU needs of the LDS and of a thread's registers: ``Gemm`` of ``tilewright/gpu/gemm.hpp``.

Tiles lie in the LDS without padding, k-major whatever the layout in memory (``tilewright/gpu/layout_amd.hpp``).
"""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_gemm.config import GemmConfig
from tilewright_gemm.words import Epilogue, size_of

__all__ = ["hip_operand_registers", "hip_shared_bytes"]

_REGISTER_BYTES = 4
_VECTOR_BYTES = 16
_FLAG_BYTES = 16
"""For what one thread tells the others about slices of K."""
_SIMT_ROWS = 8
"""Lanes along m of the fp32 atom of vector units (``atom_simt.hpp``)."""


def hip_shared_bytes(config: GemmConfig, arch: ArchSpec, stages: int) -> int:
    """Dynamic LDS of a workgroup that keeps ``stages`` tiles of A and B."""
    m, n, k = config.tile
    staged = m * k * size_of(config.a) + (0 if config.preshuffle else n * k * size_of(config.b))
    shuffled = config.waves * _strip_bytes(config, arch) if config.epilogue is Epilogue.CSHUFFLE else 0
    return max(stages * staged, shuffled) + _FLAG_BYTES


def _strip_bytes(config: GemmConfig, arch: ArchSpec) -> int:
    """What a wave's strip of results fills on its way to memory: fp32, rows 8 words further apart than long."""
    rows, columns = (size // max(waves, 1) for size, waves in zip(config.tile[:2], config.wave, strict=False))
    strip = config.warp_tile[0]
    if _is_simt(config, arch):
        own = rows // _SIMT_ROWS
        strip = _SIMT_ROWS * (4 if own % 4 == 0 else 2 if own % 2 == 0 else 1)
    return strip * (columns + 8) * _REGISTER_BYTES


def _is_simt(config: GemmConfig, arch: ArchSpec) -> bool:
    instruction = arch.instruction(config.table_key, config.warp_tile)
    return instruction is not None and instruction.name == "simt"


def hip_operand_registers(config: GemmConfig, arch: ArchSpec) -> int:
    """Registers of a thread for A and B: the fragments of two steps, and what waits for its place in the LDS."""
    m, n, k = config.tile
    threads = max(config.waves * arch.wave_size, 1)
    rows, columns = m // max(config.wave[0], 1), n // max(config.wave[1], 1)
    if _is_simt(config, arch):
        fragments = 2 * (rows // 8 + columns // 4)
    else:
        # Every step, a lane reads a vector of each row and column of warp tiles.
        tiles = rows // max(config.warp_tile[0], 1) + columns // max(config.warp_tile[1], 1)
        fragments = 2 * tiles * _VECTOR_BYTES // _REGISTER_BYTES
    staged = m * k * size_of(config.a) + n * k * size_of(config.b)
    held = 0 if config.pipeline == "comp_async" else staged // threads // _REGISTER_BYTES
    return fragments + held
