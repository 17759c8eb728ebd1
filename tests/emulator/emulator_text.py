"""Runs a few instructions given as text, without a compiler: for tests of single instructions and of the checks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_emulator.decode.program import Program
from tilewright_emulator.decode.steps import parse
from tilewright_emulator.isa.arch import ARCHS
from tilewright_emulator.isa.registers import EXEC, POISON, SCALARS
from tilewright_emulator.launch.scheduler import Scheduler
from tilewright_emulator.memory.allocations import Memory
from tilewright_emulator.memory.lds import Lds
from tilewright_emulator.state.run import Checks, Run
from tilewright_emulator.state.waves import Waves

Words = npt.NDArray[np.uint32]
ALL = tuple(ARCHS)
CDNA, RDNA = ALL[:3], ALL[3:]


def program(text: str, arch: str) -> Program:
    """Lines of instructions; ``name:`` marks a place that branches name; ``;`` begins a comment."""
    lines = [line.partition(";")[0].strip() for line in text.strip().splitlines()]
    labels: dict[str, int] = {}
    listed: list[str] = []
    for line in filter(None, lines):
        if line.endswith(":"):
            labels[line[:-1]] = 4 * len(listed)
        else:
            listed.append(line)
    instructions = []
    for at, line in enumerate(listed):
        match = re.fullmatch(r"(s_c?branch\w*) (\w+)", line)
        target = labels[match[2]] if match else None
        instructions.append(parse(f"{match[1]} 0" if match else line, 4 * at, 4, target))
    return Program("text", instructions, ARCHS[arch])


@dataclass
class Bench:
    """A launch of some waves: registers by name, scalars one value for all waves or one for each.

    ``v0`` is the work-item's number within the workgroup unless ``vectors`` says otherwise; what is not given holds
    nothing. ``groups`` workgroups of ``waves`` waves, all lanes active; ``lds``, ``private``: bytes of a
    workgroup and of a lane.
    """

    arch: str
    waves: int = 1
    groups: int = 1
    lds: int = 0
    private: int = 0
    scalars: dict[str, Any] = field(default_factory=dict)
    vectors: dict[str, Words] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    checks: Checks = field(default_factory=lambda: Checks(instruction_limit=100_000))

    def run(self, text: str) -> Waves:
        """Runs to ``s_endpgm``, which is added; gives the waves as they ended, in their order."""
        made = program(f"{text}\ns_endpgm", self.arch)
        assert made.unknown() == []
        lanes = made.arch.lanes
        count = self.waves * self.groups
        slots = np.repeat(np.arange(self.groups), self.waves)
        lds = Lds(self.lds, self.groups, self.checks.lds_races, self.checks.uninitialised_lds)
        self.launch = Run(made.arch, self.memory, lds, self.checks, slots, self.waves)
        registers = max(made.registers, *(int(name[1:]) + 1 for name in self.vectors), 1)
        w = Waves(
            np.full((registers, count, lanes), POISON, np.uint32), np.full((count, SCALARS), POISON, np.uint32), lanes,
            self.launch,
        )  # fmt: skip
        w.bases = np.repeat((slots * lds.stride)[:, None], lanes, axis=1)
        w.refresh_marks()
        w.private = np.full((-(-self.private // 4), count, lanes), POISON, np.uint32)
        w.scalars[:, EXEC : EXEC + 2] = 0
        w.set_exec(np.ones((count, lanes), bool))
        given = 0
        item = (np.arange(count)[:, None] % self.waves) * lanes + np.arange(lanes)
        for name, rows in {"v0": item.astype(np.uint32), **self.vectors}.items():
            w.u32[int(name[1:])][...] = rows
            given |= 1 << int(name[1:])
        for name, value in self.scalars.items():
            index = {"m0": 124, "vcc_lo": 106, "vcc_hi": 107}.get(name) or int(name[1:])
            w.scalars[:, index] = np.array(value, np.int64).astype(np.uint32)
            given |= 1 << 512 + index
        if self.checks.uninitialised_registers:
            w.unwritten = ((1 << 512 + 108) - 1) & ~given
            w.hazard = w.unwritten
        scheduler = Scheduler(made, self.launch, {}, [0] * len(made.steps))
        with np.errstate(all="ignore"):
            scheduler.start(w)
        ended = scheduler.finished
        order = np.argsort(np.concatenate([part.ids for part in ended]))
        self.executed = sum(scheduler.executed)
        return Waves.join([part.select(np.arange(part.count)) for part in _alike(ended)]).select(order)


def _alike(ended: list[Waves]) -> list[Waves]:
    """Groups that may end with different accesses under way, made alike so that they can be put together."""
    for part in ended:
        part.queues = type(part.queues)()
    return ended
