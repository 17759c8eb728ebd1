"""Memory of the device: a stream-ordered pool for everything, and allocations of their own for what is exported."""

from __future__ import annotations

from typing import Any

from tilewright_kit.errors import ResourceExhaustedError
from tilewright_server.devices.cuda.driver import Driver

__all__ = ["SHARED_GRANULE", "Memory"]

SHARED_GRANULE = 2 << 20
"""The driver carves smaller allocations out of blocks of this size, and a legacy handle maps a block as a whole: what
is exported fills its blocks, so that it never shows anybody else's data. CUDA programming guide, interprocess
communication."""
_KEPT_FRACTION = 16
"""The pool keeps up to that part of the device's memory for reuse while nobody uses it."""


class Memory:
    """Addresses and sizes; who owns what is the device's business. Thread-safe. The context must be current."""

    def __init__(self, driver: Driver, ordinal: int, total_bytes: int) -> None:
        api = driver.api
        self._driver = driver
        properties = api.CUmemPoolProps()
        properties.allocType = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.handleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        self._pool: Any = driver.check(api.cuMemPoolCreate(properties), "a memory pool")
        threshold = api.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        kept = api.cuuint64_t(total_bytes // _KEPT_FRACTION)
        driver.check(api.cuMemPoolSetAttribute(self._pool, threshold, kept))

    def take(self, nbytes: int, stream: Any) -> int:
        """Address of memory with any content, for use behind what ``stream`` has done so far.

        Raises ``ResourceExhaustedError``.
        """
        driver = self._driver
        return int(driver.check(driver.api.cuMemAllocFromPoolAsync(nbytes, self._pool, stream)))

    def give_back(self, address: int, stream: Any) -> None:
        """Free it behind everything that ``stream`` has been given."""
        self._driver.quietly(self._driver.api.cuMemFreeAsync(address, stream))

    def take_shareable(self, nbytes: int) -> int:
        """Address of memory that has a legacy handle. Raises ``ResourceExhaustedError``."""
        driver, api = self._driver, self._driver.api
        size = -(-nbytes // SHARED_GRANULE) * SHARED_GRANULE
        try:
            return int(driver.check(api.cuMemAlloc(size)))
        except ResourceExhaustedError:
            # What the pool keeps for reuse is out of reach for this kind of allocation.
            driver.check(api.cuMemPoolTrimTo(self._pool, 0))
            return int(driver.check(api.cuMemAlloc(size)))

    def give_back_shareable(self, address: int) -> None:
        """May wait for the device: only when nothing of ours is under way on the memory."""
        self._driver.quietly(self._driver.api.cuMemFree(address))

    def pooled_bytes(self) -> tuple[int, int]:
        """Bytes of the pool that are in use, and that it holds."""
        api, check = self._driver.api, self._driver.check
        attribute = api.CUmemPool_attribute
        used, held = (
            int(check(api.cuMemPoolGetAttribute(self._pool, name)))
            for name in (
                attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
                attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
            )
        )
        return used, held

    def close(self) -> None:
        self._driver.quietly(self._driver.api.cuMemPoolDestroy(self._pool))
