"""Random bytes of dropout: Philox4x32-10 with the element's place as its counter.

The byte of (batch item, query head, query, key) follows from the seed and the offset alone: no tile, split, page or
device changes it, and backward finds those of forward again. One call of the generator serves the sixteen elements that
one thread of a matrix instruction owns in 64 columns.

John K. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["drop_below", "philox4x32", "random_bytes"]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF

Words = npt.NDArray[np.uint32]


def philox4x32(counter: npt.NDArray[Any], key: tuple[int, int]) -> Words:
    """Four random words for each counter: ``counter`` is [..., 4], and so is the result."""
    c0, c1, c2, c3 = (counter[..., index].astype(np.uint64) for index in range(4))
    low, shift = np.uint64(_WORD), np.uint64(32)
    for step in range(_ROUNDS):
        k0, k1 = (np.uint64((part + step * weyl) & _WORD) for part, weyl in zip(key, _WEYL, strict=True))
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> shift) ^ c1 ^ k0, second & low, (first >> shift) ^ c3 ^ k1, first & low
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def random_bytes(seed: int, offset: int, batch_head: int, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """The bytes of the first ``rows`` queries and ``columns`` keys; ``batch_head`` is ``item * query heads + head``."""
    blocks = -(-columns // 64)
    counter = np.zeros((rows, blocks, 4, 4), np.uint32)
    counter[..., 0] = np.arange(blocks)[:, None] * 4 + np.arange(4)
    counter[..., 1] = np.arange(rows)[:, None, None]
    counter[..., 2] = batch_head & _WORD
    counter[..., 3] = offset & _WORD
    words = philox4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))
    # Byte 2 * octet + odd of call ``pair`` belongs to column 64 * block + 8 * octet + 2 * pair + odd.
    octets = words.astype("<u4").view(np.uint8).reshape(rows, blocks, 4, 8, 2)
    drawn: npt.NDArray[np.uint8] = octets.transpose(0, 1, 3, 2, 4).reshape(rows, blocks * 64)[:, :columns]
    return drawn


def drop_below(probability: float) -> int:
    """The threshold for a dropout probability: elements whose byte is below it are dropped."""
    return min(max(round(256 * probability), 1), 255) if probability > 0 else 0
