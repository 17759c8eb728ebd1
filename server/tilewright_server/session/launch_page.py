"""Pages into which clients count the launches that they make in their own processes; ``local.proto`` has the format.

The client writes, the server reads: everything in a page is taken for a claim.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any

from tilewright_kit.types.errors import ResourceExhaustedError
from tilewright_server.memory.errors import unknown_session

__all__ = ["RECORDS", "CallerLaunches", "LaunchPage"]

RECORDS = 1024
_RECORD = Struct("=4Q32x")
_BYTES = RECORDS * _RECORD.size
_CHOICES = Struct("=Q")
_CHOICES_AT = _RECORD.size - _CHOICES.size
"""Where the server counts changes of its choices: in the last number of the first record."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_RATE = 20_000_000
"""Launches a second that a process could make; more are not believed."""
_BURST = 1_000_000
"""Launches between two looks that are always believed."""
_SAMPLE_NS = 3600 * 10**9
"""Longest time of one launch that is believed."""
_Count = Callable[[Any, int, int, int], None]


class LaunchPage:
    """The page of one session. Thread-safe."""

    def __init__(self, count: _Count) -> None:
        """``count`` gets a plan with the launches, samples and nanoseconds that are new.

        Raises ``ResourceExhaustedError`` if there is no descriptor or memory left.
        """
        self._count = count
        self._lock = threading.Lock()
        self._known: dict[int, tuple[int, int, int, int]] = {}
        """By place in the page: what it had at the last look."""
        self._looked = time.monotonic()
        self._choices = 0
        try:
            self._fd = os.memfd_create("tw-launches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(self._fd, _BYTES)
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise ResourceExhaustedError(
                f"there is no room for a launch page: {error.strerror}",
                field="launch_page",
                rule="launch_page",
                fix="launch without counting, or try again later",
            ) from error

    @property
    def nbytes(self) -> int:
        return _BYTES

    def descriptor(self) -> int:
        """A descriptor of the page, the caller's to close. Raises ``OSError`` if it was closed."""
        with self._lock:
            return os.dup(self._fd)

    def announce(self) -> None:
        """Count a change of the server's choices, for the client to see."""
        with self._lock:
            if self._fd >= 0:
                self._choices += 1
                os.pwrite(self._fd, _CHOICES.pack(self._choices), _CHOICES_AT)

    def collect(self, find: Callable[[int], Any]) -> None:
        """Count what is new. ``find`` returns the plan of an id, ``None`` if there is none."""
        with self._lock:
            if self._fd < 0:
                return
            now = time.monotonic()
            most = _BURST + int((now - self._looked) * _RATE)
            self._looked = now
            for place, record in enumerate(_RECORD.iter_unpack(os.pread(self._fd, _BYTES, 0))):
                if record[0]:
                    self._take(place, record, find, most)

    def close(self) -> None:
        """Idempotent. The client may keep it mapped."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def _take(self, place: int, record: tuple[int, ...], find: Callable[[int], Any], most: int) -> None:
        number, launches, samples, total = record
        before = self._known.get(place, (number, 0, 0, 0))
        if before[0] != number:
            before = (number, 0, 0, 0)
        if (number, launches, samples, total) == before:
            return
        self._known[place] = (number, launches, samples, total)
        launches, samples, total = (new - old for new, old in zip(record[1:], before[1:], strict=True))
        if not 0 <= launches <= most or (plan := find(number)) is None:
            return
        if not (0 <= samples <= launches + 1 and 0 <= total <= samples * _SAMPLE_NS):
            samples = total = 0
        self._count(plan, launches, samples, total)


class CallerLaunches:
    """Launches of one session in its client's process. Thread-safe."""

    def __init__(self, plans: Mapping[int, tuple[Any, int]]) -> None:
        """``plans`` are the session's, by their ids."""
        self._plans = plans
        self._lock = threading.Lock()
        self._page: LaunchPage | None = None
        self._closed = False
        self._tell: Callable[[int], None] | None = None
        self._told = 0
        self.begun = False
        """The client was given a launch plan."""

    def tell_by(self, tell: Callable[[int], None]) -> None:
        """How a client without a page is told of changes of the server's choices: by their number. Never waits."""
        self._tell = tell

    def page(self, count: _Count) -> LaunchPage:
        """The session's page, made at the first call. ``count`` gets plans with what the client has launched. Raises
        ``NotFoundError`` if the session has ended, ``ResourceExhaustedError``.
        """
        with self._lock:
            if self._closed:
                raise unknown_session()
            if self._page is None:
                self._page = LaunchPage(count)
            return self._page

    def collect(self) -> bool:
        """Count what the client has launched since the last call; False if it has launched nothing by itself, as far as
        one can tell."""
        page, plans = self._page, self._plans
        if page is None:
            return self.begun
        page.collect(lambda number: plans.get(number, (None, 0))[0])
        return True

    def announce(self) -> None:
        """Count a change of the server's choices, and tell the client, by its page if it has one."""
        page, tell = self._page, self._tell
        if page is not None:
            page.announce()
        elif tell is not None and self.begun and not self._closed:
            self._told += 1
            tell(self._told)

    def close(self) -> None:
        """Count the last launches; the session ends. Idempotent."""
        with self._lock:
            self._closed = True
        self.collect()
        if self._page is not None:
            self._page.close()
