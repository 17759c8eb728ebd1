"""Places of registers in the arrays that hold them."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]

# Scalar registers beyond the numbered ones, by the index that the emulator keeps them at.
FLAT_SCRATCH, VCC, TTMP, M0, EXEC, NULL, SCALARS = 102, 106, 108, 124, 126, 128, 136
ACCUMULATORS = 256  # the first accumulation register's index among vector registers
POISON = 0x7FC0DEAD  # what registers hold before anything is written: a NaN, as a float
