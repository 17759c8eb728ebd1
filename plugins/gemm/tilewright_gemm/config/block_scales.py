"""The contract of block scales: which blocks of A and B have a scale, of which type, and how sums use them.

    out = sum over blocks of k of scale_a[i, block] * scale_b[j, block] * (sum of A[i, k] B[k, j] over k in the block)

| A and B | blocks of A | blocks of B | type |
|---|---|---|---|
| 1x128_1x128 | one row, 128 of k | one column, 128 of k | fp32 |
| 1x128_128x128 | one row, 128 of k | 128 columns, 128 of k | fp32 |
| 1x32_1x32 | one row, 32 of k | one column, 32 of k | E8M0 |

The last block along k is shorter. ``scale_a`` is [.., M, blocks of k], ``scale_b`` [.., N, blocks of k], or
[.., ceil(N / 128), blocks of k]: B's scales are indexed by columns of B first, as a weight matrix [N, K] is. Strides
are free. Sums within a block and the sum over blocks are fp32; alpha, bias, D and the activation follow.

E8M0 is an exponent of 8 bits: byte ``e`` is 2**(e - 127), 255 is NaN; such scales are described as int8, bit by bit.
Blocks of 32 with them are the MX formats of the Open Compute Project, which matrix instructions of gfx950 take as they
are; elements of fewer than 8 bits (``narrow``) differ in how they are stored. Kernels may multiply an element by its
scale, or both scales of a block by each other, before they multiply the rest: what comes of either is to lie within
fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_arch import ArchSpec
from tilewright_gemm.config.narrow import NARROW, widths
from tilewright_gemm.vocabulary import Epilogue, ScaleA, ScaleB, ScaleBlock
from tilewright_kit.types.arithmetic import ceil_div, padded
from tilewright_kit.types.dtypes import DType

__all__ = [
    "DTYPES",
    "SCALES",
    "block_of",
    "block_word",
    "bytes_of_rounds",
    "bytes_of_slot",
    "columns_of_block",
    "exponents",
    "factors",
    "has_exponents",
    "is_block_scaled",
    "packed_bits",
    "plain_scales",
    "scale_shapes",
    "spread_factors",
    "takes_exponents",
    "takes_packed",
    "waves_of_rounds",
]

Array = npt.NDArray[Any]

DTYPES = (DType.FP8, DType.BF8)
"""Element types of A and B that have block scales; narrow formats count as fp8."""

SCALES: dict[ScaleBlock, tuple[ScaleA, ScaleB]] = {
    ScaleBlock.ROWS_AND_COLUMNS: (ScaleA.BLOCK_1X128, ScaleB.BLOCK_1X128),
    ScaleBlock.ROWS_AND_SQUARES: (ScaleA.BLOCK_1X128, ScaleB.BLOCK_128X128),
    ScaleBlock.EXPONENTS: (ScaleA.BLOCK_1X32, ScaleB.BLOCK_1X32),
}
"""Kinds of scales by the words of requests."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of B, and the type of the scales of both operands."""

    columns: int
    k: int
    """Elements along k, of A's blocks too."""
    dtype: DType = DType.FP32
    """``INT8`` stands for E8M0."""


_BLOCKS = {
    ScaleB.BLOCK_1X128: Block(1, 128),
    ScaleB.BLOCK_128X128: Block(128, 128),
    ScaleB.BLOCK_1X32: Block(1, 32, DType.INT8),
    **{item.scale_b: Block(1, 32, DType.INT8) for item in NARROW.values()},
}
_NARROW_A = tuple(item.scale_a for item in NARROW.values())
_NARROW_B = tuple(item.scale_b for item in NARROW.values())
_OF_A = (ScaleA.BLOCK_1X128, ScaleA.BLOCK_1X32, *_NARROW_A)
_NAN = 255
_SLOT_COLUMNS, _SLOT_BARRIER = 32, 16
"""Columns whose factors lie in one piece of shared memory, and bytes behind them."""
_EXPONENT_TILES = ((16, 16, 128), (32, 32, 64))
"""Warp tiles of the matrix instructions that take factors of blocks of 32."""
_ROUND_BLOCKS, _ROUND_TILES, _LANES, _BYTE = 16, (128, 256), 64, 8
"""Blocks along k whose exponents are fetched together, depths of tiles of which they are two or four, and lanes of a
wave.
"""
_FOUR_BITS, _EIGHT_WAVES = 4, ((2, 4, 1),)
_ORDERED_PIPELINES = ("compv3", "compv4", "comp_async")
"""Main loops that multiply each step of k once, in order: such kernels fetch factors on the way."""


def is_block_scaled(scale_a: ScaleA, scale_b: ScaleB) -> bool:
    """True if either side has scales of blocks."""
    return scale_a in _OF_A or scale_b in _BLOCKS


def block_of(scale_b: ScaleB) -> Block:
    """The blocks that belong to a kind of scales of B."""
    return _BLOCKS[scale_b]


def has_exponents(scale_b: ScaleB) -> bool:
    """True if B's scales are exponents of blocks of 32, whatever its format."""
    return scale_b in _BLOCKS and _BLOCKS[scale_b].dtype is DType.INT8


def plain_scales(scale_a: ScaleA, scale_b: ScaleB) -> tuple[ScaleA, ScaleB]:
    """The kinds of scales of the same blocks of 8-bit floats."""
    return (
        ScaleA.BLOCK_1X32 if scale_a in _NARROW_A else scale_a,
        ScaleB.BLOCK_1X32 if scale_b in _NARROW_B else scale_b,
    )


def takes_exponents(config: Any, arch: ArchSpec) -> bool:
    """True if the instructions of a kernel with blocks of 32 take their factors. ``config``: a ``GemmConfig``."""
    ordered = config.pipeline in _ORDERED_PIPELINES and config.pipeline in arch.pipelines
    return ordered and arch.kind == "hip" and config.warp_tile in _EXPONENT_TILES


def takes_packed(config: Any, arch: ArchSpec) -> bool:
    """True if they take both operands as they are stored, too."""
    return packed_bits(config) > 0 and takes_exponents(config, arch)


def packed_bits(config: Any) -> int:
    """Bits of a value of A and of B that the matrix instructions of gfx950 take as they are stored; 0 if they are not
    equal, or others do. Tiles whose lines are no power of two of chunks do not go straight to LDS.
    """
    a, b = widths(config.scale_a, config.scale_b)
    straight = config.pipeline == "comp_async" and a & (a - 1) != 0
    inside = config.pipeline in _ORDERED_PIPELINES and config.warp_tile in _EXPONENT_TILES
    return a if a == b < 8 and inside and not straight else 0


def bytes_of_slot(config: Any) -> int:
    """Bytes of shared memory in which pipeline ``ws`` has the factors of a stage (``FactorSlots`` of
    ``sm90/gemm/factors.hpp``), where each column of its instruction has one; else 0.
    """
    each = config.scale_b is ScaleB.BLOCK_1X128
    columns, rows = config.tile[:2] if config.transpose_c else config.tile[1::-1]
    waves = config.wave[0 if config.transpose_c else 1]
    whole = waves <= 1 or columns // waves % _SLOT_COLUMNS == 0
    if not whole or not (
        each or (config.scale_b is ScaleB.BLOCK_128X128 and config.transpose_c and (rows % 128 == 0 or rows == 64))
    ):
        return 0
    blocks = 1 if each else ceil_div(rows, 128)
    return 4 * (blocks * padded(columns, _SLOT_COLUMNS) + (rows if each else 0)) + _SLOT_BARRIER


def bytes_of_rounds(config: Any) -> int:
    """Bytes of LDS for exponents that go there in rounds of 16 blocks, two rounds (``exponent_loop.hpp``); else 0."""
    a, b = widths(config.scale_a, config.scale_b)
    taken = has_exponents(config.scale_b) and config.warp_tile in _EXPONENT_TILES and a == b
    if (
        not taken
        or config.pipeline != "comp_async"
        or config.layout[:2] != "rc"
        or (a < _BYTE and not packed_bits(config))
    ):
        return 0
    rows = config.tile[0] // max(config.wave[0] * config.warp_tile[0], 1)
    if config.tile[2] not in _ROUND_TILES or rows < 2:
        return 0
    threads: int = config.waves * _LANES
    return 2 * ceil_div(config.tile[0] + config.tile[1], threads) * threads * _ROUND_BLOCKS


def waves_of_rounds(config: Any) -> tuple[tuple[int, int, int], ...]:
    """Arrangements of waves that such kernels have beyond those of gfx950: eight, two on each SIMD, whose tiles of
    256 x 256 load half of what smaller ones do. Of 8-bit floats, with steps half as deep, grouped or with a staged
    epilogue they spill (clang 22).
    """
    deep = config.tile[2] == _ROUND_TILES[-1] and packed_bits(config) == _FOUR_BITS
    deep = deep and config.epilogue is Epilogue.DEFAULT and not config.grouped
    return _EIGHT_WAVES if deep and bytes_of_rounds(config) else ()


def columns_of_block(scale_b: ScaleB) -> int:
    """Columns of a block of B; 0 if its scales are not those of blocks."""
    return _BLOCKS[scale_b].columns if scale_b in _BLOCKS else 0


def block_word(scale_a: ScaleA, scale_b: ScaleB) -> ScaleBlock:
    """The word of requests for kinds of scales."""
    plain = plain_scales(scale_a, scale_b)
    return next((word for word, pair in SCALES.items() if pair == plain), ScaleBlock.NONE)


def scale_shapes(scale_b: ScaleB, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of ``scale_a`` and ``scale_b``, batch dimensions aside."""
    block = _BLOCKS[scale_b]
    blocks = ceil_div(k, block.k)
    return (m, blocks), (ceil_div(n, block.columns), blocks)


def factors(scales: Array, scale_b: ScaleB) -> Array:
    """The float64 numbers that scales of either operand stand for."""
    if block_of(scale_b).dtype is DType.FP32:
        return np.asarray(scales).astype(np.float64)
    exponents = np.asarray(scales).astype(np.int64) & _NAN
    found: Array = np.where(exponents == _NAN, np.nan, np.ldexp(1.0, exponents - 127))
    return found


def spread_factors(scale_a: Array, scale_b: Array, kind: ScaleB, n: int, k: int) -> tuple[Array, Array]:
    """Factors of each element: of A [.., M, K], and of B's columns [.., N, K]."""
    block = block_of(kind)
    along_k = [np.repeat(factors(scales, kind), block.k, axis=-1)[..., :k] for scales in (scale_a, scale_b)]
    return along_k[0], np.repeat(along_k[1], block.columns, axis=-2)[..., :n, :]


def exponents(values: Array) -> Array:
    """E8M0 of powers of two, as int8: the inverse of ``factors``."""
    found: Array = (np.frexp(np.asarray(values))[1] + 126).astype(np.uint8).view(np.int8)
    return found
