"""Local data share: one image for all workgroups that run together, and who touched what since the last barrier.

Every access leaves a mark ``epoch * 64 + wave`` in a cell, where ``epoch`` counts the workgroup's barriers. Two waves
race if one finds the other's mark of the same epoch and one of them wrote.
"""

from __future__ import annotations

import numpy as np

from tilewright_emulator.errors import LaneFault, LdsRace, Misaligned, MissingWait, OutOfBounds, UninitialisedLds
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.memory.allocations import UNITS
from tilewright_emulator.memory.shadow import Shadow

UNWRITTEN, IN_FLIGHT = -1, -2
EPOCH, MANY, ATOMIC = 64, 63, 62  # marks: waves of an epoch; several readers; atomics, which do not race with another
POISON_BYTE = 0xAD


class Lds:
    """``size`` bytes for each of ``slots`` workgroups."""

    def __init__(self, size: int, slots: int, races: bool, uninitialised: bool) -> None:
        self.size, self.stride = size, -(-size // 16) * 16
        self.data: Array = np.full(max(self.stride * slots, 16), POISON_BYTE, np.uint8)
        self.views = {unit: self.data.view(dtype) for unit, dtype in UNITS.items()}
        self.writers = Shadow(self.data.size, UNWRITTEN)
        self.readers = Shadow(self.data.size, UNWRITTEN)
        self.races, self.uninitialised = races, uninitialised

    def check(self, addresses: Array, size: int) -> None:
        """Bounds and alignment of lanes' addresses (int64, within the workgroup)."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        if low < 0 or high > self.size:
            lane = int(np.argmax((addresses < 0) | (addresses + size > self.size)))
            raise LaneFault(OutOfBounds, lane, f"{size} bytes at LDS {int(addresses[lane])} of {self.size}")
        unit = min(size & -size, 4)
        if unit > 1 and int(np.bitwise_or.reduce(addresses)) & (unit - 1):
            lane = int(np.argmax(addresses & (unit - 1) != 0))
            raise LaneFault(Misaligned, lane, f"{size} bytes at LDS {int(addresses[lane])}, no multiple of {unit}")

    def gather(self, places: Array, size: int) -> Array:
        """Bytes ``(lanes, size)`` at places (int64) in the whole image."""
        bits = int(np.bitwise_or.reduce(places)) | size | 16
        unit = bits & -bits
        index = places >> (unit.bit_length() - 1)
        if unit != size:
            index = index[:, None] + np.arange(size // unit)
        taken: Array = self.views[unit].take(index).view(np.uint8)
        return taken.reshape(-1, size)

    def scatter(self, places: Array, data: Array) -> None:
        """Writes ``data``, uint8 ``(lanes, size)``."""
        size = data.shape[1]
        bits = int(np.bitwise_or.reduce(places)) | size | 16
        unit = bits & -bits
        index = places >> (unit.bit_length() - 1)
        elements = np.ascontiguousarray(data).view(UNITS[unit])
        if unit == size:
            self.views[unit][index] = elements[:, 0]
        else:
            self.views[unit][index[:, None] + np.arange(size // unit)] = elements

    # ---- marks ----

    def _cells(self, places: Array, size: int, marks: Array) -> tuple[Array, Array, int]:
        index, repeat = self.writers.index(places, size)
        if self.readers.granule != self.writers.granule:
            self.readers.cells = np.repeat(self.readers.cells, self.readers.granule // self.writers.granule)
            self.readers.granule = self.writers.granule
        return index, np.repeat(marks, repeat) if repeat > 1 else marks, repeat

    def _place(self, places: Array, cell: int, repeat: int) -> int:
        return int(places[cell // repeat]) % max(self.stride, 1)

    def note_read(self, places: Array, size: int, marks: Array) -> None:
        """Lanes read; ``marks``: int32 ``(lanes,)``, their waves' own. Raises ``LaneFault``."""
        index, mine, repeat = self._cells(places, size, marks)
        written = self.writers.cells.take(index)
        if int(written.min()) < 0:
            self._unready(written, places, repeat)
        if not self.races:
            return
        since = mine & -EPOCH
        self._refuse((written >= since) & (written != mine), written, places, repeat, "reads what wave {} wrote")
        readers = self.readers.cells
        before = readers.take(index)
        readers[index] = np.where((before >= since) & (before != mine), since | MANY, mine)
        several = (readers.take(index) & (EPOCH - 1)) != (mine & (EPOCH - 1))
        if several.any():
            readers[index[several]] = since[several] | MANY

    def note_write(self, places: Array, size: int, marks: Array, atomic: bool = False) -> None:
        """Lanes write. Raises ``LaneFault``."""
        index, mine, repeat = self._cells(places, size, marks)
        written = self.writers.cells.take(index)
        if int(written.min()) == IN_FLIGHT or (atomic and int(written.min()) < 0):
            self._unready(written, places, repeat)
        if atomic:
            mine = (mine & -EPOCH) | ATOMIC
        if self.races:
            since = mine & -EPOCH
            self._refuse((written >= since) & (written != mine), written, places, repeat, "writes what wave {} wrote")
            read = self.readers.cells.take(index)
            self._refuse((read >= since) & (read != mine), read, places, repeat, "writes what wave {} read")
        self.writers.cells[index] = mine
        if self.races:
            now = self.writers.cells.take(index)
            self._refuse(now != mine, now, places, repeat, "writes what wave {} wrote")

    def note_flight(self, places: Array, size: int, marks: Array) -> None:
        """A load straight into LDS has begun: nobody may touch these bytes until it is waited for."""
        self.note_write(places, size, marks)
        index, _ = self.writers.index(places, size)
        self.writers.cells[index] = IN_FLIGHT

    def note_landed(self, places: Array, size: int, marks: Array) -> None:
        """Such a load has been waited for."""
        index, mine, _ = self._cells(places, size, marks)
        self.writers.cells[index] = mine

    def _refuse(self, wrong: Array, marks: Array, places: Array, repeat: int, text: str) -> None:
        if not wrong.any():
            return
        cell = int(np.argmax(wrong))
        other = int(marks[cell]) % EPOCH
        who = {MANY: "several", ATOMIC: "an atomic"}.get(other, str(other))
        message = f"LDS {self._place(places, cell, repeat)}: {text.format(who)} with no barrier between"
        raise LaneFault(LdsRace, cell // repeat, message)

    def _unready(self, written: Array, places: Array, repeat: int) -> None:
        flying = written == IN_FLIGHT
        if flying.any():
            cell = int(np.argmax(flying))
            raise LaneFault(
                MissingWait, cell // repeat,
                f"LDS {self._place(places, cell, repeat)}: a load into it has not been waited for",
            )  # fmt: skip
        if self.uninitialised:
            cell = int(np.argmax(written == UNWRITTEN))
            place = self._place(places, cell, repeat)
            raise LaneFault(UninitialisedLds, cell // repeat, f"LDS {place} has not been written")
