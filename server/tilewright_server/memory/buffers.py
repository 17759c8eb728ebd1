"""Resident buffers: device memory that the server allocates for a session."""

from __future__ import annotations

from tilewright_kit.device import Buffer, Device
from tilewright_server.devices.base import MemoryHandle
from tilewright_server.memory.imports import export
from tilewright_server.memory.pins import Pinned

__all__ = ["ResidentBuffer"]


class ResidentBuffer(Pinned):
    """Zeroed memory on one device, owned by one session."""

    __slots__ = ("_buffer", "device", "device_id", "exported")

    kind = "buffer"

    def __init__(self, device: Device, nbytes: int) -> None:
        """Allocate; ``ResourceExhaustedError`` if the device has not that much."""
        super().__init__(nbytes)
        self.device = device
        self.device_id = device.info.id
        self.exported = False
        """Another process may have it mapped."""
        # Where memory for other processes is another kind, clients get that: they may ask for it to be exported.
        allocate = getattr(device, "allocate_shared", device.allocate)
        self._buffer: Buffer | None = allocate(nbytes)
        self.address = self._buffer.address

    def read(self, offset: int, target: memoryview) -> None:
        """Copy bytes out. The range has been checked and the buffer is pinned."""
        assert self._buffer is not None
        self.device.read(self._buffer, offset, target)

    def write(self, offset: int, source: memoryview) -> None:
        """Copy bytes in, under the same conditions as ``read``."""
        assert self._buffer is not None
        self.device.write(self._buffer, offset, source)

    def export(self) -> MemoryHandle:
        """Name it for the client's process, under the same conditions; the caller closes the handle's descriptor.

        Raises ``UnsupportedError``, ``DeviceError``.
        """
        assert self._buffer is not None
        handle = export(self.device, self._buffer)
        self.exported = True
        return handle

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        buffer, self._buffer = self._buffer, None
        self.address = 0
        if buffer is not None:
            self.device.free(buffer)
