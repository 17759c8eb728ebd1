"""The page in which a session's launches in this process are counted, for the server to read. See ``local.proto``."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from ctypes import addressof, c_char, c_uint64
from struct import Struct

__all__ = ["LaunchPage"]

_RECORD = Struct("=4Q")
_STEP = 64
"""Bytes of a record, of which four numbers are the client's."""


class LaunchPage:
    """Thread-safe. Mapped for as long as a plan counts into it."""

    def __init__(self, fd: int, records: int) -> None:
        """The descriptor stays the caller's. Raises ``OSError`` and ``ValueError`` for what cannot be mapped."""
        self._memory = mmap.mmap(fd, records * _STEP)
        self._address = addressof(c_char.from_buffer(self._memory))
        self.changes = c_uint64.from_buffer(self._memory, _STEP - 8)
        """Its value is ``choices``."""
        self._records = records
        self._used = 0
        self._free: deque[int] = deque()
        """Records of plans that are gone, the longest gone first: the server has seen what they had by then."""
        self._lock = threading.Lock()

    @property
    def choices(self) -> int:
        """Number of times that the server's choices of kernels have changed."""
        return self.changes.value

    def take(self, plan: int) -> tuple[int, int] | None:
        """A record for a plan of the session, and its address; ``None`` if all are taken."""
        with self._lock:
            if self._used < self._records:
                place = self._used
                self._used += 1
            elif self._free:
                place = self._free.popleft()
            else:
                return None
        offset = place * _STEP
        _RECORD.pack_into(self._memory, offset, plan, 0, 0, 0)
        return place, self._address + offset

    def give_back(self, place: int) -> None:
        """For finalizers, which run anywhere."""
        self._free.append(place)
