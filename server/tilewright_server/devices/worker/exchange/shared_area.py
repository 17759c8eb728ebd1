"""The memory that a server and a worker share: who is on the device at the moment, and room for bytes on their way.

It begins with a table of the programs that are being run, one place for each thread of the worker. It outlives the
worker, and so tells which kernels were running when one ended it. After it every control connection has a slot of its
own for copies.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import suppress

__all__ = ["CONNECTIONS", "SLOT_BYTES", "Area"]

CONNECTIONS = 16
"""Control connections of one worker, each with a slot."""
SLOT_BYTES = 4 << 20
_TABLE_BYTES = 8192
_PLACES = _TABLE_BYTES // 16
_RECENT_NS = 2_000_000_000
"""A launch that was not waited for is taken to be over after so long: nobody says when it is."""
_BYTES = _TABLE_BYTES + CONNECTIONS * SLOT_BYTES


class Area:
    """A mapping of the shared memory. Pages take memory when they are first used."""

    def __init__(self, fd: int = -1) -> None:
        """Map the area behind ``fd``, or a new one; ``fd`` is its holder's to close."""
        self.fd = fd
        if fd < 0:
            self.fd = os.memfd_create("tw-device", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, _BYTES)
        self._map = mmap.mmap(self.fd, _BYTES)
        self._is_over = False
        self._free = set(range(CONNECTIONS + 1, _PLACES))

    def places(self) -> memoryview:
        """The table as 64-bit words, two for each place but the first, which is unused: a program (0: none), and when
        it was launched (monotonic, nanoseconds) if nobody waits for its end (else 0)."""
        return memoryview(self._map)[:_TABLE_BYTES].cast("Q")

    def running(self) -> set[int]:
        """Programs that are being run, or were when the worker ended."""
        words = self.places().tolist()
        recent = time.monotonic_ns() - _RECENT_NS
        pairs = zip(words[2::2], words[3::2], strict=True)
        return {program for program, since in pairs if program and (not since or since > recent)}

    def take_place(self) -> int:
        """A place for a thread that serves a client; 0 is nobody's and stands for "no place left"."""
        return self._free.pop() if self._free else 0

    def give_place_back(self, place: int) -> None:
        if place:
            self.places()[2 * place] = 0
            self._free.add(place)

    def clear(self) -> None:
        """Nobody is on the device."""
        places = self.places()
        for index in range(len(places)):
            places[index] = 0

    def slot(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Part of a connection's slot, until ``take_back``. ``ValueError`` if it is none, or the area is closed."""
        if not 0 <= offset <= SLOT_BYTES - nbytes or not 0 <= number < CONNECTIONS:
            raise ValueError("outside the staging area")
        start = _TABLE_BYTES + number * SLOT_BYTES + offset
        return memoryview(self._map)[start : start + nbytes]

    def take_back(self, room: memoryview) -> None:
        """The end of the use of a part. With the last one an area that was closed meanwhile goes."""
        room.release()
        if self._is_over:
            self.close()

    def all_slots(self) -> memoryview:
        """All slots, for a device that locks them."""
        return memoryview(self._map)[_TABLE_BYTES:]

    def close_fd(self) -> None:
        """The mapping stays."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Unmap, unless somebody is still copying: then ``take_back`` of the last of them does."""
        self._is_over = True
        self.close_fd()
        with suppress(BufferError):
            self._map.close()
