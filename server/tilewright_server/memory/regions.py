"""Shared-memory regions: a mapped (or guarded) part of a client's memory file, and which session each file is of."""

from __future__ import annotations

import os
import threading

from tilewright_server.memory.pinned import Pinned
from tilewright_server.memory.populated import MappedPages, check_file, holes_in
from tilewright_server.memory.shm import Mapping, OpenedFile, not_there, read_into, view, write_from

__all__ = ["InodeOwners", "Region"]


class Region(Pinned):
    """Memory of a client that operands may lie in.

    A region over a sealed file is mapped and used in place: ``address`` is set and no descriptor is kept. Any other is
    *guarded*: its owner could shrink it at any moment, and touching a page that is gone would kill the server, so it
    is only read and written through its descriptor.
    """

    __slots__ = ("_filled", "_fills", "_mapping", "_on_release", "_pages", "fd", "inode")

    kind = "region"
    device_id = ""
    """Memory of the host."""

    def __init__(self, opened: OpenedFile) -> None:
        """Take over ``opened``; on errors its descriptor is closed."""
        super().__init__(opened.bytes)
        self.inode = opened.inode
        self.fd = opened.fd
        self._on_release = opened.on_release
        self._fills = opened.fills
        self._filled = opened.filled
        self._mapping: Mapping | None = None
        if opened.sealed:
            try:
                self._mapping = Mapping(opened.fd, opened.bytes)
                self.address = self._mapping.address
                self._pages = MappedPages(self.address)
            finally:
                os.close(opened.fd)
                self.fd = -1

    @property
    def zero_copy(self) -> bool:
        return self._mapping is not None

    @property
    def is_spoilt(self) -> bool:
        """True if a page that had been there was missing when it was used: the region is of no more use."""
        return self._mapping is not None and self._mapping.is_spoilt

    def check_pages(self, offset: int, nbytes: int, *, written: bool) -> None:
        """Raise ``InvalidArgumentError`` where using a range would make the server pay for pages that its owner has
        not made: all holes of mapped memory, and holes of other memory that are ``written`` to.
        """
        if self._mapping is not None:
            self._pages.check(offset, nbytes)
        elif written and not self._fills:
            check_file(self.fd, offset, nbytes)

    def read(self, offset: int, target: memoryview) -> None:
        """Copy bytes out. The range has been checked and the region is pinned."""
        if self._mapping is not None:
            target[:] = view(self.address + offset, len(target))
        else:
            read_into(self.fd, offset, target)

    def write(self, offset: int, source: memoryview) -> None:
        """Copy bytes in, under the same conditions as ``read``."""
        if self._mapping is not None:
            view(self.address + offset, len(source))[:] = source
        else:
            if self._fills:  # two writers into the same hole count it twice, which is no less than it is
                self._filled += holes_in(self.fd, offset, len(source))
            write_from(self.fd, offset, source, fills=self._fills)

    def release(self) -> None:
        """Give the memory back. Nobody may have the region pinned. Idempotent."""
        self.address = 0
        if self._mapping is not None:
            self._mapping.close()
        told, self._on_release = self._on_release, None
        if told is not None:
            told(self.fd, self._filled)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class InodeOwners:
    """Which session a memory file belongs to: the first that registered it, for as long as it has a region over it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[tuple[int, int], tuple[object, int]] = {}

    def claim(self, inode: tuple[int, int], owner: object) -> None:
        """Count one more region of ``owner`` over the file; ``NotFoundError`` if the file is another session's."""
        with self._lock:
            current, count = self._owners.get(inode, (owner, 0))
            if current is not owner:
                raise not_there()
            self._owners[inode] = (owner, count + 1)

    def drop(self, inode: tuple[int, int]) -> None:
        with self._lock:
            owner, count = self._owners[inode]
            if count == 1:
                del self._owners[inode]
            else:
                self._owners[inode] = (owner, count - 1)

    def __len__(self) -> int:
        return len(self._owners)
