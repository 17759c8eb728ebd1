"""Accesses that a wave has under way, and the counters that it waits by.

Loads are done at once here, but their registers may not be touched before a wait covers them: a group of waves keeps a
queue for every counter and the set of registers that are not ready, as bits of one integer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction
from tilewright_emulator.isa.registers import Array

Kind = Literal["load", "store", "lds", "scalar", "direct"]


@dataclass(eq=False)
class Pending:
    """One access under way.

    ``registers``: bits of those that it will write. ``again``: marks the LDS that it touches once more, when a barrier
    comes before the wait; ``landed``: what happens when it has been waited for. Both take the numbers of the waves that
    it concerns.
    """

    kind: Kind
    registers: int = 0
    again: Callable[[Array], object] | None = None
    landed: Callable[[Array], object] | None = None


class Queues:
    """The accesses under way of waves in lock-step, oldest first, by counter."""

    def __init__(self) -> None:
        self.by_counter: dict[str, list[Pending]] = {}
        self.registers = 0

    def copy(self) -> Queues:
        other = Queues()
        other.by_counter = {name: list(queue) for name, queue in self.by_counter.items()}
        other.registers = self.registers
        return other

    def same(self, other: Queues) -> bool:
        """True if the same instructions' accesses are under way, so that two groups of waves can become one."""
        mine = {name: [(p.kind, p.registers) for p in queue] for name, queue in self.by_counter.items() if queue}
        its = {name: [(p.kind, p.registers) for p in queue] for name, queue in other.by_counter.items() if queue}
        return mine == its

    def issue(self, counters: tuple[str, ...], pending: Pending) -> None:
        for counter in counters:
            self.by_counter.setdefault(counter, []).append(pending)
        self.registers |= pending.registers

    def wait(self, counter: str, most: int, waves: Array) -> None:
        """Until at most ``most`` are under way. Scalar loads return in any order: only a wait for all covers them."""
        queue = self.by_counter.get(counter)
        if not queue or len(queue) <= most:
            return
        if most and any(p.kind == "scalar" for p in queue):
            return
        done = queue[: len(queue) - most]
        del queue[: len(queue) - most]
        still = {id(p) for other in self.by_counter.values() for p in other}
        for pending in done:
            if pending.landed is not None and id(pending) not in still:
                pending.landed(waves)
        self.registers = 0
        for other in self.by_counter.values():
            for pending in other:
                self.registers |= pending.registers


def merge(parts: list[Queues]) -> Queues:
    """The queues of groups of waves that become one: they hold the same instructions' accesses (``Queues.same``)."""
    made = parts[0].copy()
    others: dict[int, list[Pending]] = {}
    for name, queue in made.by_counter.items():
        for at, pending in enumerate(queue):
            others[id(pending)] = [part.by_counter[name][at] for part in parts]
    replaced = {key: _merged(group) for key, group in others.items()}
    made.by_counter = {name: [replaced[id(p)] for p in queue] for name, queue in made.by_counter.items()}
    return made


def _merged(group: list[Pending]) -> Pending:
    unique = list({id(pending): pending for pending in group}.values())
    if len(unique) == 1:
        return unique[0]
    return Pending(
        unique[0].kind,
        unique[0].registers,
        lambda waves: [p.again(waves) for p in unique if p.again is not None],
        lambda waves: [p.landed(waves) for p in unique if p.landed is not None],
    )


def counters_of(arch: Arch, kind: str) -> tuple[str, ...]:
    """The counters of an access: "load", "store" (global memory), "flat_load", "flat_store", "lds", "scalar"."""
    if arch.generation == 9:
        table = {"load": "vm", "store": "vm", "flat_load": "vm lgkm", "flat_store": "vm lgkm"}
        table |= {"lds": "lgkm", "scalar": "lgkm"}
    elif arch.generation == 11:
        table = {"load": "vm", "store": "vs", "flat_load": "vm lgkm", "flat_store": "vs lgkm"}
        table |= {"lds": "lgkm", "scalar": "lgkm"}
    else:
        table = {"load": "load", "store": "store", "flat_load": "load ds", "flat_store": "store ds"}
        table |= {"lds": "ds", "scalar": "km"}
    return tuple(table[kind].split())


def waits_of(instruction: Instruction) -> list[tuple[str, int]]:
    """Operands of a wait instruction: counters, and how many may stay under way."""
    name, text = instruction.name, instruction.operands[0] if instruction.operands else ""
    if name == "s_waitcnt":
        if re.fullmatch(r"0x[0-9a-f]+|\d+", text.strip()):
            return [(counter, 0) for counter in ("vm", "lgkm")] if int(text, 0) == 0 else []
        return [(match[1], int(match[2])) for match in re.finditer(r"(vm|lgkm|exp)cnt\((\d+)\)", text)]
    if match := re.fullmatch(r"s_waitcnt_(vs|vm|lgkm|exp)cnt", name):
        return [(match[1], int(instruction.operands[-1], 0))]
    value = int(text, 0)
    if match := re.fullmatch(r"s_wait_(load|store)cnt_dscnt", name):
        return [(match[1], value >> 8 & 63), ("ds", value & 63)]
    match = re.fullmatch(r"s_wait_(\w+)cnt", name)
    return [(match[1], value)] if match else []
