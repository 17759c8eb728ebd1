"""Guard of mapped memory files (``native/runtime/guard``): a page that its owner took away is not made anew.

Between a look at pages and their use, an owner may punch holes. Under the guard whoever touches one goes on with memory
that is nobody's; the mapping is spoilt, and what was computed is void. Where the system offers no userfaultfd, or there
is no libtilewright, nothing is guarded, and pages that are missing are made and charged to this process.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from ctypes import POINTER, byref, c_int32, c_uint32, c_uint64, c_void_p
from functools import cache
from types import SimpleNamespace
from typing import Any

from tilewright_native import library_path

__all__ = ["Guard", "prepare", "watch"]

log = logging.getLogger("tilewright.session.regions")


class _Counts(ctypes.Structure):
    """``tw_guard_counts``."""

    _fields_ = (("spoilt", c_uint64), ("holes", c_uint64), ("given_up", c_uint64))


class _Watch:
    """Counts of all mappings: ``counts.spoilt`` of those that are there have had a page missing."""

    counts: Any = SimpleNamespace(spoilt=0, holes=0, given_up=0)


watch = _Watch()


@cache
def _library() -> Any:
    """The library; None where nothing can be guarded, which the log says."""
    try:
        library = ctypes.CDLL(str(library_path()))
        library.tw_guard_add.argtypes = (c_void_p, c_uint64, POINTER(c_int32))
        library.tw_guard_add.restype = c_int32
        library.tw_guard_holes.argtypes, library.tw_guard_holes.restype = (c_int32,), c_uint32
        library.tw_guard_remove.argtypes, library.tw_guard_remove.restype = (c_int32,), None
        library.tw_guard_watch.argtypes, library.tw_guard_watch.restype = (), POINTER(_Counts)
    except (OSError, AttributeError) as error:
        _say(f"libtilewright is missing or of another release: {error}")
        return None
    watch.counts = library.tw_guard_watch().contents
    return library


class Guard:
    """Guards a mapping until ``end``, which comes before it is unmapped."""

    __slots__ = ("_slot",)

    def __init__(self, address: int, nbytes: int) -> None:
        self._slot = -1
        library = _library()
        slot = c_int32(-1)
        if library is not None:
            status = library.tw_guard_add(address, nbytes, byref(slot))
            if status:
                _say(f"the system does not allow userfaultfd (status {status})")
            self._slot = slot.value

    @property
    def is_on(self) -> bool:
        return self._slot >= 0

    @property
    def is_spoilt(self) -> bool:
        """True if a page was missing when it was touched."""
        return self._slot >= 0 and bool(_library().tw_guard_holes(self._slot))

    def end(self) -> None:
        """Idempotent."""
        slot, self._slot = self._slot, -1
        if slot >= 0:
            _library().tw_guard_remove(slot)


@cache
def prepare() -> None:
    """Find out whether there can be a guard, which the log says if not: what it takes is there from then on."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:  # shared
        place = ctypes.c_char.from_buffer(page)
        Guard(ctypes.addressof(place), mmap.PAGESIZE).end()
        del place  # which keeps the mapping from being closed


@cache
def _say(why: str) -> None:
    log.warning("pages that clients take away from shared memory are made anew, and charged to this server: %s", why)
