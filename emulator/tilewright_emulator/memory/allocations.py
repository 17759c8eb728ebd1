"""Device memory: allocations at addresses of their own, and lanes' access to them."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright_emulator.errors import GlobalRace, LaneFault, Misaligned, OutOfBounds
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.memory.shadow import Shadow

UNITS: dict[int, Any] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
    16: np.complex128,
}  # moved, not computed


@dataclass(eq=False)
class Allocation:
    """Bytes at an address. ``data``: uint8, one dimension."""

    name: str
    start: int
    data: Array
    writable: bool
    views: dict[int, Array] = field(default_factory=dict)  # of what begins at `even`, a multiple of 16
    owners: Shadow | None = None  # which workgroup wrote last, in the launch under way

    def __post_init__(self) -> None:
        self.end = self.start + self.data.size
        lead = -self.start % 16
        self.even = self.start + lead
        even = self.data[lead:]
        if even.ctypes.data % 16:
            even = even[:0]  # wider views would be unaligned for NumPy
        self.views = {unit: even[: even.size // unit * unit].view(dtype) for unit, dtype in UNITS.items()}


class Memory:
    """The address space that kernels see."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self._starts: list[int] = []

    def map(self, address: int, array: Array, name: str, writable: bool = True) -> Allocation:
        """Puts an array's bytes at an address; stores of kernels change the array. Raises ``ValueError`` on overlap."""
        if not array.flags.c_contiguous:
            raise ValueError(f"{name}: memory is contiguous")
        made = Allocation(name, address, array.reshape(-1).view(np.uint8), writable)
        at = bisect.bisect(self._starts, address)
        neighbours = self.allocations[max(at - 1, 0) : at + 1]
        if any(made.start < other.end and other.start < made.end for other in neighbours):
            raise ValueError(f"{name}: {address:#x} overlaps another allocation")
        self.allocations.insert(at, made)
        self._starts.insert(at, address)
        return made

    def unmap(self, address: int) -> None:
        """Takes the allocation that begins there away. Raises ``KeyError``."""
        at = bisect.bisect_left(self._starts, address)
        if at == len(self._starts) or self._starts[at] != address:
            raise KeyError(f"nothing begins at {address:#x}")
        del self.allocations[at], self._starts[at]

    def around(self, low: int, high: int) -> Allocation | None:
        """The allocation that holds bytes ``low`` up to ``high``."""
        at = bisect.bisect(self._starts, low) - 1
        if at >= 0 and high <= self.allocations[at].end:
            return self.allocations[at]
        return None

    def forget_owners(self) -> None:
        """Before a launch: nobody has written anything yet."""
        for allocation in self.allocations:
            allocation.owners = None

    def parts(self, addresses: Array, size: int) -> list[tuple[Allocation, Array | None]]:
        """The allocations that lanes touch: each with the lanes (indices; ``None``: all) that touch it.

        ``addresses``: uint64 ``(lanes,)``. Raises ``LaneFault`` for lanes outside every allocation.
        """
        low, high = int(addresses.min()), int(addresses.max()) + size
        whole = self.around(low, high)
        if whole is not None:
            return [(whole, None)]
        starts = np.array(self._starts, np.uint64)
        at = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
        ends = np.array([0, *(allocation.end for allocation in self.allocations)], np.uint64)
        outside = (at < 0) | (addresses > ends[at + 1] - np.minimum(np.uint64(size), ends[at + 1]))
        if outside.any():
            lane = int(np.argmax(outside))
            raise LaneFault(OutOfBounds, lane, self.describe(int(addresses[lane]), size))
        return [(self.allocations[i], np.flatnonzero(at == i)) for i in np.unique(at)]

    def describe(self, address: int, size: int) -> str:
        """Where an address lies, in words."""
        text = f"{size} bytes at {address:#x} are in no allocation"
        if not self.allocations:
            return text

        def distance(a: Allocation) -> int:
            return max(a.start - address, address + size - a.end, 0)

        near = min(self.allocations, key=distance)
        if address < near.start:
            return f"{text}: they begin {near.start - address} bytes before {near.name} ({near.data.size} bytes)"
        return f"{text}: they end {address + size - near.end} bytes past {near.name} ({near.data.size} bytes)"

    def load(self, addresses: Array, size: int) -> Array:
        """Data that lanes read: uint8 ``(lanes, size)``. Raises ``LaneFault``."""
        check_alignment(addresses, size)
        parts = self.parts(addresses, size)
        if len(parts) == 1:
            return _gather(parts[0][0], addresses, size)
        result = np.empty((addresses.size, size), np.uint8)
        for allocation, lanes in parts:
            result[lanes] = _gather(allocation, addresses[lanes], size)
        return result

    def store(self, addresses: Array, data: Array, owners: Array | None) -> None:
        """Lanes write ``data``, uint8 ``(lanes, size)``. ``owners``: the lanes' workgroups, to find races by."""
        size = data.shape[1]
        check_alignment(addresses, size)
        for allocation, lanes in self.parts(addresses, size):
            where, what = (addresses, data) if lanes is None else (addresses[lanes], data[lanes])
            if not allocation.writable:
                raise LaneFault(OutOfBounds, 0 if lanes is None else int(lanes[0]), f"{allocation.name} is read-only")
            _scatter(allocation, where, what)
            if owners is not None:
                _claim(allocation, where, size, owners if lanes is None else owners[lanes], lanes)


def check_alignment(addresses: Array, size: int) -> None:
    """Global memory wants addresses that are multiples of the element, four bytes at most."""
    unit = min(size & -size, 4)
    if int(np.bitwise_or.reduce(addresses)) & (unit - 1):
        lane = int(np.argmax((addresses & np.uint64(unit - 1)) != 0))
        raise LaneFault(Misaligned, lane, f"{size} bytes at {int(addresses[lane]):#x}, no multiple of {unit}")


def elements_of(allocation: Allocation, addresses: Array, size: int) -> tuple[Array, Array, int]:
    """The view with the widest element that the access is made of, each lane's first element in it, and its bytes."""
    offsets = (addresses - np.uint64(allocation.even)).view(np.int64)
    bits = int(np.bitwise_or.reduce(offsets)) | size | 16
    unit = bits & -bits
    if int(offsets.min()) < 0 or allocation.views[1].size == 0:
        return allocation.data, offsets + (allocation.even - allocation.start), 1
    return allocation.views[unit], offsets >> (unit.bit_length() - 1), unit


def _gather(allocation: Allocation, addresses: Array, size: int) -> Array:
    view, index, unit = elements_of(allocation, addresses, size)
    if unit == size:
        index = index[:, None]
    else:
        index = index[:, None] + np.arange(size // unit)
    taken: Array = view.take(index).view(np.uint8)
    return taken.reshape(-1, size)


def _scatter(allocation: Allocation, addresses: Array, data: Array) -> None:
    size = data.shape[1]
    view, index, unit = elements_of(allocation, addresses, size)
    elements = np.ascontiguousarray(data).view(UNITS[unit])
    if unit == size:
        view[index] = elements[:, 0]
    else:
        view[index[:, None] + np.arange(size // unit)] = elements


def _claim(allocation: Allocation, addresses: Array, size: int, owners: Array, lanes: Array | None) -> None:
    """Notes who wrote; a byte that another workgroup has written is a race."""
    if allocation.owners is None:
        allocation.owners = Shadow(allocation.data.size, -1)
    offsets = (addresses - np.uint64(allocation.start)).view(np.int64)
    index, repeat = allocation.owners.index(offsets, size)
    mine = np.repeat(owners, repeat) if repeat > 1 else owners
    shadow = allocation.owners.cells
    before = shadow.take(index)
    shadow[index] = mine
    wrong = ((before >= 0) & (before != mine)) | (shadow.take(index) != mine)
    if wrong.any():
        cell = int(np.argmax(wrong))
        lane = cell // repeat if lanes is None else int(lanes[cell // repeat])
        raise LaneFault(
            GlobalRace, lane, f"{allocation.name}, byte {int(offsets[cell // repeat])}: two workgroups write it"
        )
