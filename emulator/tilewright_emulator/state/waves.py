"""The registers of waves that run in lock-step.

All waves of a ``Waves`` are at the same instruction. Lanes are the last axis of every array, waves the first:
vector registers are rows of shape ``(waves, lanes)``, scalar registers columns of shape ``(waves, 1)``, so that the two
broadcast against each other and the same function serves the vector and the scalar unit.
"""

from __future__ import annotations

import numpy as np

from tilewright_emulator.isa.registers import EXEC, NULL, Array
from tilewright_emulator.state.run import Run
from tilewright_emulator.state.waits import Pending, Queues, merge


def widened(values: Array, shape: tuple[int, ...]) -> Array:
    """``np.broadcast_to``, which takes longer than an instruction, only where it changes something."""
    return values if values.shape == shape else np.broadcast_to(values, shape)


class Waves:
    """Registers and position of one or more waves in lock-step.

    ``u32``, ``i32``, ``f32``: lists of rows ``(waves, lanes)``, one for each vector register (a0 is 256); the three
    name the same memory. ``s_u32``, ``s_i32``, ``s_f32``, ``s_u64``: the same for scalar registers, ``(waves, 1)``;
    ``s_u64`` counts pairs. ``scc``: bool ``(waves, 1)``. ``exec``: bool ``(waves, lanes)``; change it with
    ``set_exec`` only. ``full``: every lane of every wave is active.

    ``run``: the launch that they belong to (``None`` when instructions are tried alone). ``ids``: int64 ``(waves,)``,
    their numbers among the waves of the run. ``marks``: int32 ``(waves, lanes)``, see lds.py. ``bases``: int64
    ``(waves, lanes)``, where their workgroup's LDS begins. ``queues``: what they have under way. ``unwritten``:
    registers that hold nothing yet, as bits (see program.py). ``hazard``: registers that may not simply be touched.
    """

    def __init__(self, vectors: Array, scalars: Array, lanes: int, run: Run | None = None) -> None:
        """``vectors``: uint32 ``(registers, waves, lanes)``; ``scalars``: uint32 ``(waves, SCALARS)``. Both kept."""
        self.vectors, self.scalars, self.lanes = vectors, scalars, lanes
        self.count = int(scalars.shape[0])
        self.pc = 0
        self._run = run
        self.ids: Array = np.arange(self.count)
        self.marks: Array = np.zeros((self.count, lanes), np.int32)
        self.bases: Array = np.zeros((self.count, lanes), np.int64)
        self.private: Array = np.zeros((0, self.count, lanes), np.uint32)
        self.queues = Queues()
        self.unwritten = self.hazard = 0
        self.lost: frozenset[tuple[int, int]] = (
            frozenset()
        )  # lanes (register as a bit, lane) that took what is undefined
        self.turns = self.steps = 0  # see scheduler.py
        self.signalled = False  # between the halves of a split barrier
        self.since_signal: list[Pending] = []
        self.u32: list[Array] = list(vectors)
        self.i32: list[Array] = list(vectors.view(np.int32))
        self.f32: list[Array] = list(vectors.view(np.float32))
        self.s_u32, self.s_i32, self.s_f32, self.s_u64 = (
            list(scalars.view(t).T[:, :, np.newaxis]) for t in (np.uint32, np.int32, np.float32, np.uint64)
        )
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
        mask = widened(mask, (self.count, self.lanes))
        packed = np.packbits(mask, axis=1, bitorder="little")
        if register != NULL:
            self.scalars[:, register : register + words] = packed.view(np.uint32)
        if register == EXEC:
            self.exec = np.array(mask)
            self.full = bool(self.exec.all())

    def set_exec(self, mask: Array) -> None:
        """Makes the lanes of ``mask``, bool ``(waves, lanes)``, the active ones."""
        self.write_mask(EXEC, mask)

    def sync_exec(self) -> None:
        """After a scalar instruction wrote the register: the active lanes are those of its bits."""
        self.exec = self.read_mask(EXEC)
        self.full = bool(self.exec.all())

    @property
    def run(self) -> Run:
        assert self._run is not None, "waves outside a launch have no memory"
        return self._run

    def refresh_marks(self) -> None:
        """After a barrier: the waves leave other marks."""
        self.marks = np.repeat(self.run.marks_of(self.ids)[:, None], self.lanes, axis=1)

    # ---- accesses under way ----

    def issue(self, counters: tuple[str, ...], pending: Pending) -> None:
        """An access is under way: its registers are not ready until a wait."""
        self.queues.issue(counters, pending)
        if self.run.checks.waits:
            self.hazard |= pending.registers

    def lost_registers(self) -> int:
        """Vector registers with a lane that holds a copy of an undefined register, as bits."""
        found = 0
        for register, _ in self.lost:
            found |= register
        return found

    def wait(self, counter: str, most: int) -> None:
        """The waves wait until at most ``most`` accesses of a counter are under way."""
        self.queues.wait(counter, most, self.ids)
        self.hazard = self.unwritten | self.lost_registers() | (self.queues.registers if self.run.checks.waits else 0)

    # ---- lanes of memory accesses ----

    def owners(self) -> Array | None:
        """The workgroup of each active lane, if races in global memory are looked for."""
        if not self.run.checks.global_races:
            return None
        return self.active(self.run.numbers[self.run.groups[self.ids]].astype(np.int32)[:, None])

    def active(self, values: Array) -> Array:
        """``(waves, lanes)`` or narrower to one value for each active lane, in order."""
        values = widened(values, self.exec.shape)
        return values.reshape(-1) if self.full else values[self.exec]

    def load_registers(self, first: int, data: Array) -> None:
        """Writes ``data``, uint8 ``(active lanes, 4 * registers)``, to vector registers."""
        words = data.view(np.uint32)
        registers = words.shape[1]
        if self.full:
            rows = words.reshape(self.count, self.lanes, registers)
            for j in range(registers):
                self.u32[first + j][...] = rows[:, :, j]
        else:
            for j in range(registers):
                self.u32[first + j][self.exec] = words[:, j]

    def stored_registers(self, first: int, registers: int) -> Array:
        """Vector registers of active lanes as uint8 ``(active lanes, 4 * registers)``."""
        if registers == 1:
            return np.ascontiguousarray(self.active(self.u32[first])).view(np.uint8).reshape(-1, 4)
        rows = self.vectors[first : first + registers]
        if self.full:
            words = np.ascontiguousarray(rows.reshape(registers, -1).T)
        else:
            words = np.ascontiguousarray(rows[:, self.exec].T)
        return words.view(np.uint8)

    # ---- groups of waves ----

    def select(self, waves: Array) -> Waves:
        """A copy of some of the waves (indices)."""
        made = Waves(self.vectors[:, waves], self.scalars[waves], self.lanes, self._run)
        made.pc, made.scc = self.pc, self.scc[waves]
        made.ids, made.marks, made.bases = self.ids[waves], self.marks[waves], self.bases[waves]
        made.private = self.private[:, waves]
        made.queues, made.unwritten, made.hazard = self.queues.copy(), self.unwritten, self.hazard
        made.lost = self.lost
        made.signalled, made.since_signal = self.signalled, list(self.since_signal)
        made.turns, made.steps = self.turns, self.steps
        return made

    def can_join(self, other: Waves) -> bool:
        """True if the two are at the same place with the same accesses under way."""
        return self.pc == other.pc and self.signalled == other.signalled and self.queues.same(other.queues)

    @staticmethod
    def join(parts: list[Waves]) -> Waves:
        """One group of all; see ``can_join``."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        vectors = np.concatenate([part.vectors for part in parts], axis=1)
        made = Waves(vectors, np.concatenate([part.scalars for part in parts]), first.lanes, first._run)
        made.pc, made.scc = first.pc, np.concatenate([part.scc for part in parts])
        made.ids = np.concatenate([part.ids for part in parts])
        made.marks = np.concatenate([part.marks for part in parts])
        made.bases = np.concatenate([part.bases for part in parts])
        made.private = np.concatenate([part.private for part in parts], axis=1)
        made.queues = merge([part.queues for part in parts])
        made.signalled, made.steps = first.signalled, max(part.steps for part in parts)
        made.since_signal = [pending for part in parts for pending in part.since_signal]
        for part in parts:
            made.unwritten |= part.unwritten
            made.lost |= part.lost
            made.hazard |= part.hazard
        return made
