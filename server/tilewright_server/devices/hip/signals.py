"""A page of memory that the server and one client see, and so do their streams: two numbers that order them."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright_server.devices.hip.driver.driver import Driver

__all__ = ["PAGE_BYTES", "SignalPage", "SignalPages"]

PAGE_BYTES = 4096
PRODUCER, COMPLETION = 0, 64
"""Bytes from the page's beginning to the client's number and to the server's, in cache lines of their own."""
_NUMBER_BYTES = 8
_PASSED = (1 << 64) - 1
"""At least any number."""


class SignalPage:
    """See above. ``file`` is a descriptor for the client, whose size nobody can change."""

    def __init__(self, driver: Driver) -> None:
        """Raises ``OSError``, ``DeviceError``, ``ResourceExhaustedError``."""
        self._driver = driver
        self.file = os.memfd_create("tilewright-signals", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file, PAGE_BYTES)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self.file, PAGE_BYTES)
            self._bytes = memoryview(self._map)
            self._numbers = self._bytes.cast("Q")
            driver.check(driver.api.lock_host(self._bytes), "locking a page for signals")
            self.address = int(driver.check(driver.api.device_address(self._bytes), "the address of a page"))
        except BaseException:
            os.close(self.file)
            raise

    @property
    def produced(self) -> int:
        """The client's number."""
        return self._numbers[PRODUCER // _NUMBER_BYTES]

    def let_go(self) -> None:
        """Whatever waits for the client's number goes on."""
        self._numbers[PRODUCER // _NUMBER_BYTES] = _PASSED

    def unlock(self) -> None:
        """Nothing on the device uses the page any more."""
        self._driver.quietly(self._driver.api.unlock_host(self._bytes))


class SignalPages:
    """Pages that are out of use. To unlock one waits for the whole device, which may be waiting for a client: so they
    are unlocked when nothing is under way. Thread-safe."""

    def __init__(self, is_quiet: Callable[[], bool]) -> None:
        self._is_quiet = is_quiet
        self._retired: list[SignalPage] = []
        self._lock = threading.Lock()

    def retire(self, page: SignalPage) -> None:
        """Nothing that was launched uses it any more."""
        with self._lock:
            self._retired.append(page)

    def reap(self) -> None:
        """Unlock retired pages if that waits for nobody."""
        with self._lock:
            if not self._retired or not self._is_quiet():
                return
            pages, self._retired = self._retired, []
        for page in pages:
            page.unlock()
