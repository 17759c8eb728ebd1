"""Launches of one client on an AMD GPU, tied to its stream by signals where events keep no order."""

from __future__ import annotations

import os

from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_server.devices.gpu.launch.stream_state import Lane
from tilewright_server.devices.gpu.memory.deferred_free import Graveyard
from tilewright_server.devices.gpu.stream import GpuStream
from tilewright_server.devices.hip.driver.driver import Driver
from tilewright_server.devices.hip.signals import COMPLETION, PRODUCER, SignalPage, SignalPages

__all__ = ["HipStream"]


class HipStream(GpuStream):
    """See ``GpuStream`` and ``SignalStream``."""

    def __init__(self, lane: Lane, graveyard: Graveyard, driver: Driver, pages: SignalPages) -> None:
        super().__init__(lane, graveyard)
        self._hip = driver
        self._pages = pages
        self._page: SignalPage | None = None

    def open_signals(self) -> int:
        self._hip.enter()
        self._pages.reap()
        if self._page is not None:
            raise InvalidArgumentError(
                "the connection has signals", field="kind", rule="signals_once", fix="use those, or connect again"
            )
        page = SignalPage(self._hip)
        self.lock.set_signals(page.address + PRODUCER, page.address + COMPLETION)
        self._page = page
        return os.dup(page.file)

    def let_go(self) -> None:
        if self._page is not None:
            self._page.let_go()

    @property
    def waits(self) -> bool:
        page = self._page
        return super().waits or (page is not None and page.produced < self.lock.awaited and self.is_busy)

    def _require_events(self, flags: int, slot: int) -> None:
        if self._page is None:
            super()._require_events(flags, slot)

    def _end(self) -> None:
        super()._end()
        page, self._page = self._page, None
        if page is not None:
            self._pages.retire(page)
