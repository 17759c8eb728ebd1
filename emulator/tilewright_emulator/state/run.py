"""Objects that the waves of a launch share: memory, LDS, settings of the checks, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.memory.allocations import Memory
from tilewright_emulator.memory.lds import EPOCH, Lds
from tilewright_emulator.state.publication import Publication
from tilewright_emulator.state.weak import WeakMemory


@dataclass(frozen=True)
class Checks:
    """Errors that a launch looks for. ``publication``: see publication.py. ``instruction_limit``: instructions of one
    wave. ``traffic``: count LDS bank conflicts and memory transactions (slow). ``order``: of workgroups, and of their
    atomics: 0 as they are numbered, -1 backwards, else any that this seed gives. ``waves``: how those of a workgroup
    run: 0 in lock-step, 1 and -1 one after the other from barrier to barrier (-1: the last one first), else all waves
    of some workgroups in turns that this seed gives. ``weak``: see weak.py."""

    lds_races: bool = True
    uninitialised_lds: bool = True
    uninitialised_registers: bool = True
    waits: bool = True
    global_races: bool = True
    publication: bool = True
    traffic: bool = False
    instruction_limit: int = 20_000_000
    order: int = 0
    waves: int = 0
    weak: bool = False


@dataclass
class Traffic:
    """``lds_passes``: cycles that LDS accesses take beyond one for each group of lanes served together is a conflict.
    ``lines``: 128-byte lines that global accesses touch, wave by wave."""

    lds_accesses: int = 0
    lds_conflicts: int = 0
    global_accesses: int = 0
    lines: int = 0


@dataclass(eq=False)
class Run:
    """``groups``: int64 ``(waves,)``, each wave's workgroup (its slot in ``lds``). ``numbers``: int64, of each slot in
    the grid (as they come, if there are none). ``epochs``: barriers that each slot has passed."""

    arch: Arch
    memory: Memory
    lds: Lds
    checks: Checks
    groups: Array
    per_group: int
    numbers: Array = field(default_factory=lambda: np.arange(0))
    traffic: Traffic = field(default_factory=Traffic)
    publication: Publication | None = None
    weak: WeakMemory | None = None
    code_base: int = 0
    clock: int = 0

    def __post_init__(self) -> None:
        slots = int(self.groups.max()) + 1
        self.epochs: Array = np.zeros(slots, np.int64)
        if not self.numbers.size:
            self.numbers = np.arange(slots)

    def marks_of(self, waves: Array) -> Array:
        """The marks (lds.py) that waves leave now: int32."""
        marks: Array = (self.epochs[self.groups[waves]] * EPOCH + waves % self.per_group).astype(np.int32)
        return marks


@dataclass(eq=False)
class LdsAccess:
    """Places in LDS that lanes touch, to mark them again later. ``owners``: the lanes' waves."""

    run: Run
    places: Array
    size: int
    owners: Array
    writes: bool
    direct: bool = False

    def again(self, waves: Array) -> None:
        mine = np.isin(self.owners, waves)
        if mine.any():
            note = self.run.lds.note_write if self.writes else self.run.lds.note_read
            if not self.direct:
                note(self.places[mine], self.size, self.run.marks_of(self.owners[mine]))

    def landed(self, waves: Array) -> None:
        mine = np.isin(self.owners, waves)
        if mine.any():
            self.run.lds.note_landed(self.places[mine], self.size, self.run.marks_of(self.owners[mine]))
