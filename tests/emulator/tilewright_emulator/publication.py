"""Whether what one workgroup reads of another's stores has been published by an atomic.

A store is public once its wave has waited for it and then made an atomic operation (read-modify-write) itself, or once
its workgroup has passed a barrier behind it and then one of its waves has. On CDNA a workgroup's stores leave its
compute unit in order, so that the barrier suffices without the wait. Whether the reader looked at the atomic's result
is not checked; flags that are polled by plain loads are not understood, so this check is off unless asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .errors import GlobalRace
from .faults import LaneFault
from .memory import Allocation
from .shadow import Shadow
from .state import Array

if TYPE_CHECKING:
    from .state import Waves

IN_FLIGHT = 1


class Publication:
    """The stores of one launch. A cell holds ``group << 32 | epoch << 8 | wave << 1``, and a bit while under way."""

    def __init__(self, groups: int, in_order: bool) -> None:
        self.in_order = in_order
        self.groups: Array = np.zeros(groups, np.int64)  # stores of earlier epochs are public
        self.waves: dict[tuple[int, int], int] = {}  # a wave's own, up to this epoch
        self.shadows: dict[int, Shadow] = {}

    def _marks(self, w: Waves) -> Array:
        run = w.run
        slots = run.groups[w.ids]
        marks: Array = (slots + run.first_group) << 32 | run.epochs[slots] << 8 | (w.ids % run.per_group) << 1
        return marks

    def stored(self, w: Waves, addresses: Array, size: int) -> Callable[[Array], None]:
        """Active lanes have stored; the result is what to do when it has been waited for."""
        owners = w.active(w.ids[:, None])
        marks = w.active(self._marks(w)[:, None])
        places = [
            (self._shadow(allocation), addresses - np.uint64(allocation.start), lanes)
            for allocation, lanes in w.run.memory.parts(addresses, size)
        ]

        def mark(chosen: Array, values: Array) -> None:
            for shadow, offsets, lanes in places:
                mine = chosen if lanes is None else chosen & np.isin(np.arange(chosen.size), lanes)
                index, repeat = shadow.index(offsets[mine].view(np.int64), size)
                shadow.cells[index] = np.repeat(values[mine], repeat)

        mark(np.ones(owners.size, bool), marks if self.in_order else marks | IN_FLIGHT)
        if self.in_order:
            return lambda waves: None

        def landed(waves: Array) -> None:
            table = np.zeros(int(w.run.groups.size), np.int64)
            ids = np.arange(table.size)
            slots = w.run.groups
            table[:] = (slots + w.run.first_group) << 32 | w.run.epochs[slots] << 8 | (ids % w.run.per_group) << 1
            chosen = np.isin(owners, waves)
            if chosen.any():
                mark(chosen, table[owners])

        return landed

    def _shadow(self, allocation: Allocation) -> Shadow:
        if allocation.start not in self.shadows:
            self.shadows[allocation.start] = Shadow(allocation.data.size, -1, np.int64)
        return self.shadows[allocation.start]

    def released(self, w: Waves) -> None:
        """Waves with active lanes have made an atomic operation."""
        settled = not any(p.kind == "store" for queue in w.queues.by_counter.values() for p in queue)
        for mark in self._marks(w)[np.any(w.exec, axis=1)].tolist():
            group, epoch, wave = mark >> 32, mark >> 8 & 0xFFFFFF, mark >> 1 & 127
            self.groups[group] = max(int(self.groups[group]), epoch)
            if settled:
                self.waves[group, wave] = epoch

    def loaded(self, w: Waves, addresses: Array, size: int) -> None:
        """Active lanes read. Raises ``LaneFault`` for what is not public."""
        if not self.shadows:
            return
        own = w.active((w.run.groups[w.ids] + w.run.first_group)[:, None])
        for allocation, lanes in w.run.memory.parts(addresses, size):
            shadow = self.shadows.get(allocation.start)
            if shadow is None:
                continue
            chosen = np.arange(addresses.size) if lanes is None else lanes
            offsets = (addresses[chosen] - np.uint64(allocation.start)).view(np.int64)
            index, repeat = shadow.index(offsets, size)
            marks = shadow.cells.take(index)
            foreign = (marks >= 0) & (marks >> 32 != np.repeat(own[chosen], repeat))
            for mark in np.unique(marks[foreign]).tolist():
                if not self._is_public(mark):
                    cell = int(np.argmax(marks == mark))
                    why = "has not waited for it" if mark & IN_FLIGHT else "has not published it by an atomic"
                    text = f"workgroup {mark >> 32} wrote it and {why}"
                    lane = int(chosen[cell // repeat])
                    raise LaneFault(GlobalRace, lane, f"{allocation.name}, byte {int(offsets[cell // repeat])}: {text}")

    def _is_public(self, mark: int) -> bool:
        group, epoch, wave = mark >> 32, mark >> 8 & 0xFFFFFF, mark >> 1 & 127
        if mark & IN_FLIGHT:
            return False
        return epoch < int(self.groups[group]) or epoch <= self.waves.get((group, wave), -1)
