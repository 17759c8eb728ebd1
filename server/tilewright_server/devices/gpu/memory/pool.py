"""Memory of the device: a stream-ordered pool for everything, and allocations of their own for what is exported."""

from __future__ import annotations

from typing import Any

from tilewright_kit.types.errors import ResourceExhaustedError
from tilewright_server.devices.gpu.driver import GpuDriver

__all__ = ["SHARED_GRANULE", "Memory"]

SHARED_GRANULE = 2 << 20
"""Drivers carve smaller allocations out of blocks of this size, and a handle maps a block as a whole: what is exported
fills its blocks, so that it never shows anybody else's data. CUDA programming guide, interprocess communication; the
allocator of fragments in AMD's ROCr has blocks of the same size."""
_KEPT_FRACTION = 16
"""The pool keeps up to that part of the device's memory for reuse while nobody uses it."""


class Memory:
    """Addresses and sizes; who owns what is the device's business. Thread-safe. The context must be current."""

    def __init__(self, driver: GpuDriver, ordinal: int, total_bytes: int) -> None:
        self._driver = driver
        self._pool: Any = driver.check(driver.api.new_pool(ordinal, total_bytes // _KEPT_FRACTION), "a memory pool")

    def take(self, nbytes: int, stream: Any) -> int:
        """Address of memory with any content, for use behind what ``stream`` has done so far.

        Raises ``ResourceExhaustedError``.
        """
        driver = self._driver
        return int(driver.check(driver.api.take(nbytes, self._pool, stream)))

    def give_back(self, address: int, stream: Any) -> None:
        """Free it behind everything that ``stream`` has been given."""
        self._driver.quietly(self._driver.api.give_back(address, stream))

    def take_shareable(self, nbytes: int) -> int:
        """Address of memory that has a legacy handle. Raises ``ResourceExhaustedError``."""
        driver, api = self._driver, self._driver.api
        size = -(-nbytes // SHARED_GRANULE) * SHARED_GRANULE
        try:
            return int(driver.check(api.allocate(size)))
        except ResourceExhaustedError:
            # What the pool keeps for reuse is out of reach for this kind of allocation.
            driver.check(api.trim_pool(self._pool))
            return int(driver.check(api.allocate(size)))

    def give_back_shareable(self, address: int) -> None:
        """May wait for the device: only when nothing of ours is under way on the memory."""
        self._driver.quietly(self._driver.api.free(address))

    def pooled_bytes(self) -> tuple[int, int]:
        """Bytes of the pool that are in use, and that it holds."""
        used, held = self._driver.check(self._driver.api.pool_use(self._pool))
        return used, held

    def close(self) -> None:
        self._driver.quietly(self._driver.api.end_pool(self._pool))
