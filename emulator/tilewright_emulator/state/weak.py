"""Weak memory: what a workgroup has stored is not seen by others before the instructions that make it seen.

A load of another workgroup finds what was there before a store, unless the store's wave has waited for it (or ended),
and has had it written back behind that where it does not reach the device by itself; and unless the load reaches the
device, or its workgroup has emptied its caches since. Other waves of the same workgroup find it once it has been waited
for. So a kernel that hands values over without the waits, releases and acquires that the ISA asks for computes wrong
numbers, as it may on a GPU, where ``publication`` raises errors by rules about atomics; flags that are polled by plain
loads work here as they do on a GPU.

Atomics act on the newest value, and scalar loads find it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewright_emulator.isa.registers import Array
from tilewright_emulator.memory.allocations import Allocation
from tilewright_emulator.state.publication import AccessingWaves

NEVER = 1 << 62
DELAY = 64
"""Loads, until what ended waves have not waited for arrives, one store after the other."""
WAVES = 64
"""Waves of a workgroup, at most: ``wave`` below is ``workgroup * WAVES + wave of the workgroup``."""


class Cells:
    """Each byte of an allocation: the wave that stored last (-1: none in this launch), when that arrived, whether it
    stays in a cache of its own, and what was there for everybody before."""

    def __init__(self, size: int) -> None:
        self.wave: Array = np.full(size, -1, np.int64)
        self.arrived: Array = np.full(size, NEVER, np.int64)
        self.narrow: Array = np.zeros(size, bool)
        self.before: Array = np.zeros(size, np.uint8)


@dataclass(eq=False)
class Flight:
    """A store under way: ``bytes`` of ``cells``, ``(lanes, size)``, by ``waves``, ``(lanes,)``."""

    cells: Cells
    bytes: Array
    waves: Array
    number: int


class WeakMemory:
    """The stores of one launch, in the order of a clock that ticks with each event."""

    def __init__(self) -> None:
        self._cells: dict[int, Cells] = {}
        self._written_back: dict[int, list[int]] = {}  # by workgroup: when
        self._fresh: dict[int, int] = {}  # by workgroup: when its caches were emptied
        self._flights: list[Flight] = []
        self._late: list[tuple[int, Flight, Array]] = []
        self._loads = 0
        self._clock = 0

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    @staticmethod
    def _waves(w: AccessingWaves) -> Array:
        """Wave of each active lane, by its number in the run."""
        run = w.run
        waves = run.numbers[run.groups[w.ids]] * WAVES + w.ids % run.per_group
        return w.active(waves[:, None])

    @staticmethod
    def _bytes(allocation: Allocation, addresses: Array, size: int) -> Array:
        offsets = (addresses - np.uint64(allocation.start)).view(np.int64)
        places: Array = offsets[:, None] + np.arange(size)
        return places

    def storing(self, w: AccessingWaves, addresses: Array, size: int, wide: bool) -> Callable[[Array], None]:
        """Active lanes are about to store; the result is what to do when it has been waited for."""
        waves, number = self._waves(w), -self._tick()
        flights = []
        for allocation, lanes in w.run.memory.parts(addresses, size):
            cells = self._cells.setdefault(allocation.start, Cells(0))
            if not cells.wave.size:
                cells = self._cells[allocation.start] = Cells(allocation.data.size)
            where = addresses if lanes is None else addresses[lanes]
            mine = waves if lanes is None else waves[lanes]
            places = self._bytes(allocation, where, size)
            seen = self._seen_from(cells, places) < NEVER
            seen |= cells.wave[places] < 0
            cells.before[places[seen]] = allocation.data[places[seen]]
            cells.wave[places] = mine[:, None]
            cells.narrow[places] = not wide
            cells.arrived[places] = NEVER + number  # above any time, and no other store's
            flights.append(Flight(cells, places, mine, NEVER + number))
        self._flights += flights

        def landed(ids: Array) -> None:
            run = w.run
            waves = run.numbers[run.groups[ids]] * WAVES + ids % run.per_group
            self._land(flights, waves)
            self._flights = [f for f in self._flights if f not in flights or not np.isin(f.waves, waves).all()]

        return landed

    def _land(self, flights: list[Flight], waves: Array) -> None:
        """Stores of these waves have arrived, unless they had, or later ones are under way."""
        time = self._tick()
        for flight in flights:
            places = flight.bytes[np.isin(flight.waves, waves)]
            mine = flight.cells.arrived[places] == flight.number
            flight.cells.arrived[places[mine]] = time

    def ended(self, w: AccessingWaves) -> None:
        """Waves have come to their end: what they stored arrives after more loads, the latest first, and what later
        waves of a workgroup stored after what earlier ones did."""
        run = w.run
        waves = run.numbers[run.groups[w.ids]] * WAVES + w.ids % run.per_group
        still = [flight for flight in self._flights if np.isin(flight.waves, waves).any()]
        self._flights = [flight for flight in self._flights if not np.isin(flight.waves, waves).all()]
        last = int((waves % WAVES).max())
        for place, flight in enumerate(reversed(still), 1):
            self._late.append((self._loads + DELAY * (place + last), flight, waves))

    def _arrive_late(self) -> None:
        self._loads += 1
        due = [late for late in self._late if late[0] <= self._loads]
        if due:
            self._late = [late for late in self._late if late[0] > self._loads]
            for _, flight, waves in due:
                self._land([flight], waves)

    def wrote_back(self, w: AccessingWaves) -> None:
        """Workgroups have had their L2 cache written back."""
        time = self._tick()
        for group in np.unique(w.run.numbers[w.run.groups[w.ids]]).tolist():
            self._written_back.setdefault(group, []).append(time)

    def invalidated(self, w: AccessingWaves) -> None:
        """Workgroups have emptied the caches that do not hold what the device does."""
        time = self._tick()
        for group in np.unique(w.run.numbers[w.run.groups[w.ids]]).tolist():
            self._fresh[group] = time

    def _seen_from(self, cells: Cells, places: Array) -> Array:
        """When others may see these bytes, ``NEVER`` or above if not yet."""
        when = cells.arrived[places]
        narrow = cells.narrow[places] & (when < NEVER)
        if narrow.any():
            found = when[narrow]
            groups = cells.wave[places][narrow] // WAVES
            for group in np.unique(groups).tolist():
                times, chosen = self._written_back.get(group, []), groups == group
                found[chosen] = [
                    times[at] if (at := bisect_right(times, time)) < len(times) else NEVER
                    for time in found[chosen].tolist()
                ]
            when[narrow] = found
        return when

    def loaded(self, w: AccessingWaves, addresses: Array, data: Array, wide: bool) -> Array:
        """Contents that active lanes find where ``data``, uint8 ``(lanes, size)``, is the newest."""
        if not self._cells:
            return data
        self._arrive_late()
        readers, size, found = self._waves(w), data.shape[1], data
        for allocation, lanes in w.run.memory.parts(addresses, size):
            cells = self._cells.get(allocation.start)
            if cells is None:
                continue
            chosen = np.arange(addresses.size) if lanes is None else lanes
            places, mine = self._bytes(allocation, addresses[chosen], size), readers[chosen][:, None]
            waves = cells.wave[places]
            others = (waves >= 0) & (waves != mine)
            if not others.any():
                continue
            foreign = others & (waves // WAVES != mine // WAVES)
            when = np.where(foreign, self._seen_from(cells, places), cells.arrived[places])
            hidden = others & (when >= NEVER)
            if not wide:
                emptied = np.array([self._fresh.get(group, -1) for group in (readers[chosen] // WAVES).tolist()])
                hidden |= foreign & (emptied[:, None] < when)
            if hidden.any():
                found = found.copy() if found is data else found
                part = found[chosen]
                part[hidden] = cells.before[places][hidden]
                found[chosen] = part
        return found
