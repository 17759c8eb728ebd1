"""The registers of waves that run in lock-step.

All waves of a ``Waves`` are at the same instruction. Lanes are the last axis of every array, waves the first:
vector registers are rows of shape ``(waves, lanes)``, scalar registers columns of shape ``(waves, 1)``, so that the two
broadcast against each other and the same function serves the vector and the scalar unit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Scalar registers beyond the numbered ones, by the index that the emulator keeps them at.
FLAT_SCRATCH, VCC, TTMP, M0, EXEC, NULL, SCALARS = 102, 106, 108, 124, 126, 128, 136
ACCUMULATORS = 256  # the first accumulation register's index among vector registers
POISON = 0x7FC0DEAD  # what registers hold before anything is written: a NaN, as a float


class Waves:
    """Registers and position of one or more waves in lock-step.

    ``u32``, ``i32``, ``f32``: lists of rows ``(waves, lanes)``, one for each vector register (a0 is 256); the three
    name the same memory. ``s_u32``, ``s_i32``, ``s_f32``, ``s_u64``: the same for scalar registers, ``(waves, 1)``;
    ``s_u64`` counts pairs. ``scc``: bool ``(waves, 1)``. ``exec``: bool ``(waves, lanes)``; change it with
    ``set_exec`` only. ``full``: every lane of every wave is active.
    """

    def __init__(self, vectors: Array, scalars: Array, lanes: int) -> None:
        """``vectors``: uint32 ``(registers, waves, lanes)``; ``scalars``: uint32 ``(waves, SCALARS)``. Both kept."""
        self.vectors, self.scalars, self.lanes = vectors, scalars, lanes
        self.count = int(scalars.shape[0])
        self.pc = 0
        self.u32: list[Array] = list(vectors)
        self.i32: list[Array] = list(vectors.view(np.int32))
        self.f32: list[Array] = list(vectors.view(np.float32))
        columns = [slice(i, i + 1) for i in range(SCALARS)]
        signed, floats, pairs = (scalars.view(t) for t in (np.int32, np.float32, np.uint64))
        self.s_u32: list[Array] = [scalars[:, c] for c in columns]
        self.s_i32: list[Array] = [signed[:, c] for c in columns]
        self.s_f32: list[Array] = [floats[:, c] for c in columns]
        self.s_u64: list[Array] = [pairs[:, c] for c in columns[: SCALARS // 2]]
        self.scc: Array = np.zeros((self.count, 1), bool)
        self.exec: Array = np.ones((self.count, lanes), bool)
        self.full = True
        self.sync_exec()

    def read_mask(self, register: int) -> Array:
        """A lane mask in scalar registers as bool ``(waves, lanes)``."""
        octets = np.ascontiguousarray(self.scalars[:, register : register + self.lanes // 32]).view(np.uint8)
        return np.unpackbits(octets, axis=1, bitorder="little").view(bool)

    def write_mask(self, register: int, mask: Array) -> None:
        """Stores bool ``(waves, lanes)`` to scalar registers (exec too)."""
        words = self.lanes // 32
        packed = np.packbits(np.broadcast_to(mask, (self.count, self.lanes)), axis=1, bitorder="little")
        if register != NULL:
            self.scalars[:, register : register + words] = packed.view(np.uint32)
        if register == EXEC:
            self.exec = np.array(np.broadcast_to(mask, (self.count, self.lanes)))
            self.full = bool(self.exec.all())

    def set_exec(self, mask: Array) -> None:
        """Makes the lanes of ``mask``, bool ``(waves, lanes)``, the active ones."""
        self.write_mask(EXEC, mask)

    def sync_exec(self) -> None:
        """After a scalar instruction wrote the register: the active lanes are those of its bits."""
        self.exec = self.read_mask(EXEC)
        self.full = bool(self.exec.all())
