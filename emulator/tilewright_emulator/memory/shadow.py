"""Facts about every byte of a memory, kept as coarsely as the accesses so far allow."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright_emulator.isa.registers import Array


class Shadow:
    """One cell for every ``granule`` bytes. The granule starts at 16 and shrinks when an access asks for less."""

    def __init__(self, size: int, initial: int, dtype: Any = np.int32) -> None:
        self.granule = 16
        self.cells: Array = np.full(-(-size // 16), initial, dtype)

    def index(self, offsets: Array, size: int) -> tuple[Array, int]:
        """The cells of accesses of ``size`` bytes at ``offsets`` (int64), flat, and how many each has."""
        bits = int(np.bitwise_or.reduce(offsets, axis=None)) | size | 16
        unit = bits & -bits
        if unit < self.granule:
            self.cells = np.repeat(self.cells, self.granule // unit)
            self.granule = unit
        repeat = size // self.granule
        first = offsets >> (self.granule.bit_length() - 1)
        if repeat == 1:
            return first, 1
        return (first[:, None] + np.arange(repeat)).reshape(-1), repeat
