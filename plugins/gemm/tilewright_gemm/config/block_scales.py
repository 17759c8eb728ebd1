"""The contract of block scales: which blocks of A and B have a scale, of which type, and how sums use them.

    out = sum over blocks of k of scale_a[i, block] * scale_b[j, block] * (sum of A[i, k] B[k, j] over k in the block)

Blocks are 128 long along k, the last one shorter. A has a scale for each row (1x128): ``scale_a`` is
[.., M, ceil(K / 128)]. B has one for each column (1x128): ``scale_b`` is [.., N, ceil(K / 128)]; or one for 128 columns
(128x128): ``scale_b`` is [.., ceil(N / 128), ceil(K / 128)]. B's scales are indexed by columns of B first, as a weight
matrix [N, K] is. Strides are free. Sums within a block and the sum over blocks are fp32; alpha, bias, D and the
activation follow.

Scales are fp32. Exponents of 8 bits (E8M0: byte ``e`` is 2**(e - 127), 255 is NaN) belong to the same contract, one in
the place of each fp32; no kernel reads them yet, so they are converted by the caller, exactly: ``ldexp(1, e - 127)``.
"""

from __future__ import annotations

from tilewright_gemm.vocabulary import ScaleA, ScaleB, ScaleBlock
from tilewright_kit.types.arithmetic import ceil_div
from tilewright_kit.types.dtypes import DType

__all__ = ["BLOCK_K", "DTYPES", "SCALES", "block_word", "columns_of_block", "is_block_scaled", "scale_shapes"]

BLOCK_K = 128
"""Elements along k of every block."""
DTYPES = (DType.FP8, DType.BF8)
"""Element types of A and B that have block scales."""

SCALES: dict[ScaleBlock, tuple[ScaleA, ScaleB]] = {
    ScaleBlock.ROWS_AND_COLUMNS: (ScaleA.BLOCK_1X128, ScaleB.BLOCK_1X128),
    ScaleBlock.ROWS_AND_SQUARES: (ScaleA.BLOCK_1X128, ScaleB.BLOCK_128X128),
}
"""Kinds of scales by the words of requests."""

_COLUMNS = {ScaleB.BLOCK_1X128: 1, ScaleB.BLOCK_128X128: 128}


def is_block_scaled(scale_a: ScaleA, scale_b: ScaleB) -> bool:
    """True if either side has scales of blocks."""
    return scale_a is ScaleA.BLOCK_1X128 or scale_b in _COLUMNS


def columns_of_block(scale_b: ScaleB) -> int:
    """Columns of a block of B; 0 if its scales are not those of blocks."""
    return _COLUMNS.get(scale_b, 0)


def block_word(scale_a: ScaleA, scale_b: ScaleB) -> ScaleBlock:
    """The word of requests for kinds of scales."""
    return next((word for word, pair in SCALES.items() if pair == (scale_a, scale_b)), ScaleBlock.NONE)


def scale_shapes(scale_b: ScaleB, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of ``scale_a`` and ``scale_b``, batch dimensions aside."""
    blocks = ceil_div(k, BLOCK_K)
    return (m, blocks), (ceil_div(n, _COLUMNS[scale_b]), blocks)
