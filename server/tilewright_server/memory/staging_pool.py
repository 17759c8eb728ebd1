"""Memory in between: for operands that the device cannot use where they are.

Inline results, guarded regions and, on devices that do not share the host's memory, every operand of the host pass
through a block of device memory. Blocks are kept for reuse in powers of two. A block that comes back to another
session's request is either overwritten in full or cleared.
"""

from __future__ import annotations

import threading

from tilewright_kit.contract.device import Buffer, Device
from tilewright_server.devices.contract import shares_host_memory
from tilewright_server.devices.lifetime import is_lost
from tilewright_server.memory.shm import view

__all__ = ["Staging", "StagingPool"]

SMALLEST = 4096
LARGEST_KEPT = 16 << 20
KEPT_BYTES = 64 << 20


class Staging:
    """``nbytes`` bytes of device memory."""

    __slots__ = ("_block", "_pool", "address", "nbytes")

    def __init__(self, pool: StagingPool, block: Buffer, nbytes: int) -> None:
        self._pool = pool
        self._block = block
        self.address = block.address
        self.nbytes = nbytes

    def write(self, data: memoryview, offset: int = 0) -> None:
        self._pool.device.write(self._block, offset, data)

    def read(self, into: memoryview) -> None:
        self._pool.device.read(self._block, 0, into)

    def host(self) -> memoryview | None:
        """The bytes themselves, if the device shares the host's memory."""
        return view(self.address, self.nbytes) if self._pool.on_host else None

    def clear(self) -> None:
        """Fill with zeros."""
        zeros = memoryview(bytes(min(self.nbytes, 1 << 20)))
        for offset in range(0, self.nbytes, len(zeros) or 1):
            self.write(zeros[: self.nbytes - offset], offset)

    def give_back(self) -> None:
        self._pool.put(self._block)


class StagingPool:
    """Blocks of one device. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.on_host = shares_host_memory(device.info)
        self._lock = threading.Lock()
        self._free: dict[int, list[Buffer]] = {}
        self._kept = 0

    def take(self, nbytes: int) -> Staging:
        """A block of at least ``nbytes``, with unknown content.

        ``ResourceExhaustedError`` if the device has no memory left.
        """
        size = max(SMALLEST, 1 << max(nbytes - 1, 0).bit_length())
        with self._lock:
            blocks = self._free.get(size)
            block = None
            while blocks and block is None:
                block = blocks.pop()
                self._kept -= size
                if is_lost(block):
                    block = None
        return Staging(self, block or self.device.allocate(size), nbytes)

    def put(self, block: Buffer) -> None:
        size = block.nbytes
        with self._lock:
            keep = size <= LARGEST_KEPT and self._kept + size <= KEPT_BYTES and not is_lost(block)
            if keep:
                self._kept += size
                self._free.setdefault(size, []).append(block)
        if not keep:
            self.device.free(block)

    def close(self) -> None:
        """Free what is kept."""
        with self._lock:
            blocks = [block for stack in self._free.values() for block in stack]
            self._free.clear()
            self._kept = 0
        for block in blocks:
            self.device.free(block)
