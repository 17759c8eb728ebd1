"""Pages of shared memory that are there already.

The system charges a page of shared memory to the process that touches it first. A client whose memory has holes would
have the server pay for them, which reads inputs and writes outputs; so operands lie in pages that their owner has made.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["MappedPages", "check_file", "holes_in", "missing", "taken_away"]

PAGE = mmap.PAGESIZE
CHUNK = 2 << 20
"""Bytes that are looked at, and remembered, together."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.restype = ctypes.c_int
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class MappedPages:
    """Pages of a mapped file. Thread-safe: what is known only grows, one item at a time."""

    __slots__ = ("_address", "_known")

    def __init__(self, address: int) -> None:
        self._address = address
        self._known: set[int] = set()
        """Chunks that were seen whole."""

    def check(self, offset: int, nbytes: int) -> None:
        """Raise ``InvalidArgumentError`` unless all pages of a range are there (or were, when it was looked at first).

        Pages that were swapped out, and such as were allocated (``fallocate``) and never touched, count as missing
        until their owner touches them.
        """
        end = offset + nbytes
        while offset < end:
            number = offset // CHUNK
            stop = min((number + 1) * CHUNK, end)
            if number not in self._known:
                self._look(offset, stop)
                if stop - offset == CHUNK:
                    self._known.add(number)
            offset = stop

    def _look(self, offset: int, end: int) -> None:
        start = offset // PAGE * PAGE
        pages = (end - start + PAGE - 1) // PAGE
        there = (ctypes.c_ubyte * pages)()
        if _libc.mincore(self._address + start, end - start, there) != 0:
            raise missing(offset)  # the mapping has ended meanwhile
        found = bytes(there)
        if any(not page & 1 for page in found):
            first = next(index for index, page in enumerate(found) if not page & 1)
            raise missing(max(offset, start + first * PAGE))


def check_file(fd: int, offset: int, nbytes: int) -> None:
    """Raise ``InvalidArgumentError`` unless a range of a memory file has no hole."""
    if not nbytes:
        return
    try:
        hole = os.lseek(fd, offset, os.SEEK_HOLE)
    except OSError as error:
        if error.errno != errno.ENXIO:  # of offsets beyond the end, which whoever copies finds out
            raise
        return
    if hole < min(offset + nbytes, os.fstat(fd).st_size):
        raise missing(hole)


def holes_in(fd: int, offset: int, nbytes: int) -> int:
    """Bytes of a range of a memory file, whole pages of it, that have no page."""
    at, found = offset // PAGE * PAGE, 0
    end = min((offset + nbytes + PAGE - 1) // PAGE * PAGE, os.fstat(fd).st_size)
    while at < end:
        try:
            hole = os.lseek(fd, at, os.SEEK_HOLE)
        except OSError:  # the file became shorter
            return found
        try:
            data = os.lseek(fd, hole, os.SEEK_DATA)
        except OSError:  # there is none
            data = end
        found += max(0, min(data, end) - hole)
        at = max(data, at + PAGE)
    return found


def missing(offset: int) -> InvalidArgumentError:
    """Refuse to use shared memory at an offset where it has no page."""
    return InvalidArgumentError(
        "the shared memory has no page there yet, and the server makes none for its clients",
        field="location.offset",
        value=offset,
        rule="region_populated",
        fix="write a byte of each page before the memory is used, or madvise it with MADV_POPULATE_WRITE",
    )


def taken_away() -> InvalidArgumentError:
    """Refuse what was computed with pages that its owner took away meanwhile."""
    return InvalidArgumentError(
        "pages of shared memory were taken away while they were in use; the region has ended",
        field="location",
        rule="region_populated",
        fix="register the memory again, and punch no holes (fallocate, MADV_REMOVE) where operands lie",
    )
