"""Shared memory of this process: sealed memory files in few large segments, handed out as NumPy arrays.

A segment is a memfd that nobody can shrink, so that the server may use it in place. Arrays are cut from segments;
when an array and all of its views are gone, its range is free again (and its pages are warm: the next array there
costs no page faults). Nothing here talks to a server.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import secrets
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable
from typing import Any

import numpy as np

from tilewright.errors import ResourceExhaustedError
from tilewright.session.available_memory import available
from tilewright.session.free_ranges import GRAIN, FreeList, round_up
from tilewright.types.spec import MAX_BYTES, Array, too_large

__all__ = ["SEGMENT_BYTES", "Pool", "Segment"]

SEGMENT_BYTES = 64 << 20
KEEP_BYTES = 512 << 20
"""Empty segments beyond this many bytes are given back."""
PAGE = mmap.PAGESIZE
LARGE = 64 << 10
"""Arrays of this size or more begin on a page of their own."""
HUGE = 2 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class Segment:
    """One memory file, mapped. ``regions`` maps a session to the region id that the server gave it there."""

    __slots__ = ("__weakref__", "_map", "address", "fd", "free_list", "name", "regions", "size", "touched")

    def __init__(self, size: int) -> None:
        self.name = f"tilewright-{secrets.token_hex(16)}"
        self.size = size
        self.fd = -1
        self.free_list = FreeList(size)
        self.regions: dict[Hashable, int] = {}
        self.touched = 0
        _check_room(size)
        try:
            self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.fd, size)
        except OSError as error:
            self.close()
            raise ResourceExhaustedError(
                f"cannot make {size} bytes of shared memory: {error.strerror}",
                field="nbytes",
                value=size,
                rule="shared_memory",
                fix="free arrays, or raise the limits on memory and open files",
            ) from None
        self.address = int(np.frombuffer(self._map, np.uint8).__array_interface__["data"][0])

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> Array:
        made: Array = np.ndarray(shape, dtype, self._map, offset)
        return made

    def populate(self, end: int) -> None:
        """Fault in all pages up to ``end`` in one go, which is much faster than one by one on first use.

        The system charges a page of shared memory to the process that touches it first: pages that were missing would
        count as the server's, once it writes results there. Raises ``ResourceExhaustedError`` if the system has none.
        """
        if end <= self.touched:
            return
        end = min(round_up(end, HUGE), self.size)
        start = self.touched // PAGE * PAGE
        try:
            self._map.madvise(_POPULATE_WRITE, start, end - start)
        except OSError:  # an old kernel, or no memory
            try:
                os.posix_fallocate(self.fd, start, end - start)
                # Only pages that were touched show, and none of these was.
                np.frombuffer(self._map, np.uint8)[start:end:PAGE] = 0
            except OSError as error:
                raise ResourceExhaustedError(
                    f"cannot have {end - start} bytes of shared memory: {error.strerror}",
                    field="nbytes",
                    value=end - start,
                    rule="shared_memory",
                    fix="free arrays, or give the machine or the container more memory",
                ) from None
        self.touched = end

    def close(self) -> None:
        """Close the descriptor. The mapping lives for as long as arrays in it do."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class Pool:
    """The segments of one client. Thread-safe."""

    def __init__(self, segment_bytes: int = SEGMENT_BYTES, keep_bytes: int = KEEP_BYTES) -> None:
        self.segment_bytes = segment_bytes
        self.keep_bytes = keep_bytes
        self.generation = 0
        """Changes whenever a segment goes: an address may mean something else afterwards."""
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._addresses: list[int] = []
        self._freed: deque[tuple[Segment, int]] = deque()
        self._inherited: list[Segment] = []
        self._retired: deque[Segment] = deque()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array in shared memory. Its range is free again when the array and its views are gone.

        Raises ``InvalidArgumentError`` for impossible sizes, ``ResourceExhaustedError`` if the system gives no more
        memory.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        if nbytes > MAX_BYTES:
            raise too_large("shape", shape)
        with self._lock:
            segment, offset = self._take(nbytes)
            try:
                segment.populate(offset + nbytes)
            except ResourceExhaustedError:
                segment.free_list.free(offset)
                raise
        array = segment.array(shape, dtype, offset)
        # The finalizer may run at any moment in any thread, inside this very pool too: it only leaves a note.
        weakref.finalize(array, self._freed.append, (segment, offset)).atexit = False
        return array

    def _take(self, nbytes: int) -> tuple[Segment, int]:
        self._collect()
        align = PAGE if nbytes >= LARGE else GRAIN
        if nbytes <= self.segment_bytes:
            for address in self._addresses:
                segment = self._segments[address]
                offset = segment.free_list.allocate(nbytes, align)
                if offset is not None:
                    return segment, offset
            segment = self._add(self.segment_bytes)
        else:
            size = _size_class(nbytes)
            for address in self._addresses:
                segment = self._segments[address]
                # A large array may share a segment that is not much too large for it.
                if segment.size <= 2 * size and (offset := segment.free_list.allocate(nbytes, align)) is not None:
                    return segment, offset
            segment = self._add(size)
        offset = segment.free_list.allocate(nbytes, align)
        if offset is None:  # pragma: no cover
            raise ResourceExhaustedError("a fresh segment is too small", field="nbytes", value=nbytes)
        return segment, offset

    def _add(self, size: int) -> Segment:
        segment = Segment(size)
        self._segments[segment.address] = segment
        # A new list each time: `find` reads without the lock.
        self._addresses = sorted((*self._addresses, segment.address))
        return segment

    def _collect(self) -> None:
        """Take freed ranges back; give back empty segments beyond what is worth keeping."""
        changed = False
        while self._freed:
            segment, offset = self._freed.popleft()
            if segment.address in self._segments and self._segments[segment.address] is segment:
                segment.free_list.free(offset)
                changed = changed or segment.free_list.used == 0
        if not changed:
            return
        spare = 0
        for address in self._addresses:
            segment = self._segments[address]
            if segment.free_list.used == 0:
                spare += segment.size
                if spare > self.keep_bytes:
                    self._addresses = [other for other in self._addresses if other != address]
                    del self._segments[address]
                    self.generation += 1
                    self._retired.append(segment)

    def take_retired(self) -> list[Segment]:
        """Segments that were given back since the last call; their regions want to be unregistered."""
        taken = []
        while self._retired:
            taken.append(self._retired.popleft())
        return taken

    def find(self, address: int, nbytes: int) -> tuple[Segment, int] | None:
        """The segment that holds all of ``[address, address + nbytes)``, and the offset in it."""
        addresses = self._addresses
        index = bisect_right(addresses, address) - 1
        if index < 0:
            return None
        segment = self._segments.get(addresses[index])
        if segment is None:
            return None
        offset = address - segment.address
        return (segment, offset) if offset >= 0 and offset + nbytes <= segment.size else None

    def forget(self, session: Hashable) -> None:
        """Forget a session that is over, with the ids of its regions."""
        with self._lock:
            for segment in self._segments.values():
                segment.regions.pop(session, None)

    def trim(self) -> None:
        """Take freed ranges back now."""
        with self._lock:
            self._collect()

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in list(self._segments.values()))

    def after_fork(self) -> None:
        """In a forked child: the parent still hands out parts of these segments, and they are registered as the
        parent's. Arrays in them stay what they are, memory shared with the parent; the child cuts new arrays from
        segments of its own.
        """
        self._lock = threading.Lock()
        self._inherited.extend(self._segments.values())
        self._segments, self._addresses = {}, []
        self._freed.clear()
        self._retired.clear()
        self.generation += 1

    def close(self) -> None:
        """Forget all segments. Arrays stay usable; they are no longer shared. Idempotent."""
        with self._lock:
            for segment in (*self._segments.values(), *self._inherited, *self._retired):
                segment.close()
            self._segments, self._addresses, self._inherited = {}, [], []
            self._retired.clear()
            self._freed.clear()
            self.generation += 1


def _check_room(size: int) -> None:
    """Raise ``ResourceExhaustedError`` for what the machine or the container cannot hold: the system promises any size,
    and ends the process when the pages are used.
    """
    room = available()
    if size > room:
        raise ResourceExhaustedError(
            f"{size} bytes of shared memory are more than the {room} that are left",
            field="nbytes",
            value=size,
            rule="shared_memory",
            fix="correct the sizes, work in parts, free arrays, or give the container more memory",
        )


def _size_class(nbytes: int) -> int:
    """Segment size for a large array: at most an eighth more than needed, so that arrays of like sizes recycle each
    other's segments.
    """
    step = max(HUGE, 1 << max((nbytes - 1).bit_length() - 3, 0))
    return round_up(nbytes, step)
