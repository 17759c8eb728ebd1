"""Check that a store which another workgroup reads has been published by an atomic.

A store is public once its wave has waited for it and then made an atomic operation (read-modify-write) itself, or once
its workgroup has passed a barrier behind that wait and then one of its waves has. The wave that makes the atomic waits
for its own stores only. Those of other waves may still be on their way when they are past a barrier, to another channel
of the L2 cache than the atomic's: a barrier without the wait orders them within the workgroup, not for others.

Atomics, and loads and stores of what is handed over, must reach the device (scopes.py). Stores that do not are written
back ahead of the atomic; ahead of loads that do not, caches are invalidated. Whether the reader looked at the atomic's
result is not checked; flags that are polled by plain loads are not understood, so this check is off unless asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from tilewright_emulator.errors import GlobalRace, LaneFault
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.memory.allocations import Allocation, Memory
from tilewright_emulator.memory.shadow import Shadow
from tilewright_emulator.state.waits import Queues

IN_FLIGHT, NARROW = 1, 2


class LaunchedWaves(Protocol):
    """The numbering of a launch's waves: ``Run``."""

    @property
    def memory(self) -> Memory: ...
    @property
    def groups(self) -> Array: ...
    @property
    def per_group(self) -> int: ...
    @property
    def numbers(self) -> Array: ...
    @property
    def epochs(self) -> Array: ...


class AccessingWaves(Protocol):
    """Waves at an access to memory: ``Waves``."""

    @property
    def run(self) -> LaunchedWaves: ...
    @property
    def ids(self) -> Array: ...
    @property
    def exec(self) -> Array: ...
    @property
    def queues(self) -> Queues: ...
    def active(self, values: Array) -> Array: ...


def fields(mark: int) -> tuple[int, int, int]:
    """Workgroup, epoch and wave."""
    return mark >> 32, mark >> 8 & 0xFFFFFF, mark >> 2 & 63


class Covered:
    """Stores that an operation of a workgroup covers: those of earlier epochs, and those of the same wave so far."""

    def __init__(self, groups: int) -> None:
        self.groups: Array = np.zeros(groups, np.int64)
        self.waves: dict[tuple[int, int], int] = {}

    def note(self, group: int, epoch: int, wave: int, own: bool = True) -> None:
        self.groups[group] = max(int(self.groups[group]), epoch)
        if own:
            self.waves[group, wave] = epoch

    def __contains__(self, mark: int) -> bool:
        group, epoch, wave = fields(mark)
        return epoch < int(self.groups[group]) or epoch <= self.waves.get((group, wave), -1)


class Publication:
    """The stores of one launch. A cell holds ``group << 32 | epoch << 8 | wave << 2``, a bit for a store that does not
    reach the device by itself, and one for a store under way."""

    def __init__(self, groups: int) -> None:
        self.announced = Covered(groups)  # by atomics
        self.written_back = Covered(groups)
        self.narrow = Covered(groups)  # by atomics, of what had been written back
        self.fresh: dict[int, dict[int, int]] = {}  # workgroups' waves: epoch of the invalidation since their atomic
        self.shadows: dict[int, Shadow] = {}
        self.atomics: dict[int, int] = {}  # by address: group << 1, and whether it did not reach the device

    def _marks(self, w: AccessingWaves) -> Array:
        run = w.run
        slots = run.groups[w.ids]
        marks: Array = run.numbers[slots] << 32 | run.epochs[slots] << 8 | (w.ids % run.per_group) << 2
        return marks

    def _active(self, w: AccessingWaves) -> list[tuple[int, int, int]]:
        """Workgroup, epoch and wave of those with active lanes."""
        return [fields(mark) for mark in self._marks(w)[np.any(w.exec, axis=1)].tolist()]

    def stored(self, w: AccessingWaves, addresses: Array, size: int, wide: bool) -> Callable[[Array], None]:
        """Active lanes have stored; the result is what to do when it has been waited for."""
        owners = w.active(w.ids[:, None])
        narrow = 0 if wide else NARROW
        places = [
            (self._shadow(allocation), addresses - np.uint64(allocation.start), lanes)
            for allocation, lanes in w.run.memory.parts(addresses, size)
        ]

        def mark(chosen: Array, values: Array) -> None:
            for shadow, offsets, lanes in places:
                mine = chosen if lanes is None else chosen & np.isin(np.arange(chosen.size), lanes)
                index, repeat = shadow.index(offsets[mine].view(np.int64), size)
                shadow.cells[index] = np.repeat(values[mine], repeat)

        mark(np.ones(owners.size, bool), w.active(self._marks(w)[:, None]) | IN_FLIGHT | narrow)

        def landed(waves: Array) -> None:
            slots = w.run.groups
            ids = np.arange(slots.size)
            table = w.run.numbers[slots] << 32 | w.run.epochs[slots] << 8 | (ids % w.run.per_group) << 2
            chosen = np.isin(owners, waves)
            if chosen.any():
                mark(chosen, table[owners] | narrow)

        return landed

    def _shadow(self, allocation: Allocation) -> Shadow:
        if allocation.start not in self.shadows:
            self.shadows[allocation.start] = Shadow(allocation.data.size, -1, np.int64)
        return self.shadows[allocation.start]

    def atomic(self, w: AccessingWaves, addresses: Array, wide: bool) -> None:
        """Active lanes make an atomic operation. Raises ``LaneFault`` where workgroups do not agree about it."""
        owners = w.active(w.run.numbers[w.run.groups[w.ids]][:, None]).tolist()
        for lane, (address, group) in enumerate(zip(addresses.tolist(), owners, strict=True)):
            before = self.atomics.get(address, group << 1)
            if before >> 1 != group and (before & 1 or not wide):
                late = before >> 1 if before & 1 else group
                text = f"workgroups {before >> 1} and {group} meet in an atomic, and that of {late} does not reach"
                raise LaneFault(GlobalRace, lane, f"{text} the device")
            self.atomics[address] = group << 1 | (before & 1) | (not wide)
        if not wide:
            return
        settled = not any(p.kind == "store" for queue in w.queues.by_counter.values() for p in queue)
        for group, epoch, wave in self._active(w):
            self.fresh.get(group, {}).pop(wave, None)
            self.announced.note(group, epoch, wave, settled)
            if settled:
                self.narrow.note(group, int(self.written_back.groups[group]), wave, False)
                if (group, wave) in self.written_back.waves:
                    self.narrow.waves[group, wave] = self.written_back.waves[group, wave]

    def wrote_back(self, w: AccessingWaves) -> None:
        """Waves with active lanes have asked their L2 cache to hand on what it holds."""
        for group, epoch, wave in self._active(w):
            self.written_back.note(group, epoch, wave)

    def invalidated(self, w: AccessingWaves) -> None:
        """Waves with active lanes have emptied the caches that do not hold what the device does."""
        for group, epoch, wave in self._active(w):
            self.fresh.setdefault(group, {})[wave] = epoch

    def loaded(self, w: AccessingWaves, addresses: Array, size: int, wide: bool) -> None:
        """Active lanes read. Raises ``LaneFault`` for what is not public, or may be read from a cache."""
        if not self.shadows:
            return
        own = w.active(self._marks(w)[:, None])
        for allocation, lanes in w.run.memory.parts(addresses, size):
            shadow = self.shadows.get(allocation.start)
            if shadow is None:
                continue
            chosen = np.arange(addresses.size) if lanes is None else lanes
            offsets = (addresses[chosen] - np.uint64(allocation.start)).view(np.int64)
            index, repeat = shadow.index(offsets, size)
            marks, readers = shadow.cells.take(index), np.repeat(own[chosen], repeat)
            foreign = (marks >= 0) & (marks >> 32 != readers >> 32)
            for mark in np.unique(marks[foreign]).tolist():
                why = self._why_not(mark)
                if not why and not wide:
                    why = self._why_stale(np.unique(readers[foreign & (marks == mark)]).tolist())
                if why:
                    cell = int(np.argmax(marks == mark))
                    text = f"workgroup {mark >> 32} wrote it and {why}"
                    lane = int(chosen[cell // repeat])
                    raise LaneFault(GlobalRace, lane, f"{allocation.name}, byte {int(offsets[cell // repeat])}: {text}")

    def _why_not(self, mark: int) -> str:
        """Why a store is not public; empty if it is."""
        if mark & IN_FLIGHT:
            return "has not waited for it"
        if mark not in self.announced:
            return "has not published it by an atomic that reaches the device"
        if mark & NARROW and mark not in self.narrow:
            return "has not written it back to where the whole device finds it"
        return ""

    def _why_stale(self, readers: list[int]) -> str:
        for reader in readers:
            group, epoch, wave = fields(reader)
            since = self.fresh.get(group, {})
            if not any(each == wave or before < epoch for each, before in since.items()):
                return "this load may find what a cache held before"
        return ""
