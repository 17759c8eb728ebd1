"""Giving things back when the device is done with them, without waiting for it.

Launches of clients are not waited for, and may themselves wait for a client that never comes. So what they may use
(memory, mappings, modules) is not destroyed at once, and nobody's request stands still meanwhile: a mark is recorded in
every stream that is busy, and what all marks have passed is finished later, by whoever comes by or by a thread that
lives only while something is pending.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from tilewright_kit.types.errors import TilewrightError
from tilewright_server.devices.gpu.driver import GpuDriver

__all__ = ["Graveyard"]

log = logging.getLogger(__name__)

_POLL_S = 0.02
_LAST_S = 2.0
"""How long the end waits for what other threads are finishing; it takes microseconds."""

_Pending = tuple[list[Any], Callable[[], None]]


class Graveyard:
    """Knows the streams whose launches are not waited for. Thread-safe. The context must be current."""

    def __init__(self, driver: GpuDriver) -> None:
        self._driver = driver
        self._streams: list[Any] = []
        self._pending: list[_Pending] = []
        self._watched = False
        self._lock = threading.Lock()
        self._finishing = 0
        self._quiet = threading.Condition(self._lock)

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, stream: Any) -> None:
        """Launches of this stream count from now on."""
        with self._lock:
            self._streams.append(stream)

    def remove(self, stream: Any) -> None:
        """It is idle, and about to be destroyed: nobody may ask about it any more."""
        with self._lock:
            self._streams = [item for item in self._streams if item is not stream]

    def is_busy(self, stream: Any) -> bool:
        """True if launches of a stream are under way; not any more once it was removed."""
        with self._lock:
            if not any(item is stream for item in self._streams):
                return False
            return self._driver.is_busy(self._driver.api.query_stream(stream))

    @property
    def is_quiet(self) -> bool:
        """True if no stream has anything under way. Never waits."""
        with self._lock:
            return not any(self._driver.is_busy(self._driver.api.query_stream(stream)) for stream in self._streams)

    def has_come(self, stream: Any, events: Iterable[Any]) -> bool:
        """True if all of a stream's events have been passed; they may be destroyed only after ``remove``."""
        with self._lock:
            if not any(item is stream for item in self._streams):
                return True
            return not any(self._driver.api.query_event(event)[0] for event in events)

    def bury(self, finish: Callable[[], None]) -> None:
        """Call ``finish`` when everything that was launched before has ended: now, if that is so."""
        self.reap()
        with self._lock:
            marks = [mark for stream in self._streams if (mark := self._mark(stream)) is not None]
            if marks:
                self._pending.append((marks, finish))
                if not self._watched:
                    self._watched = True
                    threading.Thread(target=self._watch, name="gpu-graveyard", daemon=True).start()
                return
            self._finishing += 1
        self._finish([finish])

    def reap(self) -> None:
        """Finish what has become free. Never waits."""
        if not self._pending:
            return
        with self._lock:
            ready = [finish for marks, finish in self._pending if self._passed(marks)]
            self._pending = [item for item in self._pending if item[0]]
            self._finishing += 1
        self._finish(ready)

    def _finish(self, ready: list[Callable[[], None]]) -> None:
        """Call them; who ends the device waits for that."""
        try:
            for finish in ready:
                finish()
        finally:
            with self._quiet:
                self._finishing -= 1
                self._quiet.notify_all()

    def finish_all(self) -> None:
        """Nothing can be running any more: finish everything, and wait for others that are at it: afterwards the
        streams may go.
        """
        with self._quiet:
            pending, self._pending = self._pending, []
            self._quiet.wait_for(lambda: not self._finishing, _LAST_S)
        for marks, finish in pending:
            for mark in marks:
                self._driver.quietly(self._driver.api.end_event(mark))
            finish()

    def _mark(self, stream: Any) -> Any:
        """An event behind all work of a stream; None if there is no such work. Lock held."""
        api = self._driver.api
        if not api.query_stream(stream)[0]:
            return None
        answer = api.new_event(timing=False)
        if not self._driver.quietly(answer):
            return None
        if self._driver.quietly(api.record_event(answer[1], stream)):
            return answer[1]
        self._driver.quietly(api.end_event(answer[1]))  # the device is lost
        return None

    def _passed(self, marks: list[Any]) -> bool:
        """True if all are behind us; those that are, are removed. Lock held."""
        api = self._driver.api
        left = []
        for mark in marks:
            if self._driver.is_busy(api.query_event(mark)):
                left.append(mark)
            else:
                self._driver.quietly(api.end_event(mark))
        marks[:] = left
        return not left

    def _watch(self) -> None:
        try:
            self._driver.enter()
            while True:
                time.sleep(_POLL_S)
                self.reap()
                with self._lock:
                    if not self._pending:
                        self._watched = False
                        return
        except TilewrightError as error:
            self._watched = False
            log.warning("nothing more is given back to the device: %s", error)
