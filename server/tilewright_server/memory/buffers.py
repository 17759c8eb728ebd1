"""Resident buffers: device memory that the server allocates for a session."""

from __future__ import annotations

from tilewright_kit.contract.device import Buffer, Device
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_server.devices.contract import MemoryHandle, uses_host_memory
from tilewright_server.memory.device_regions import allocate_exportable, export
from tilewright_server.memory.pinned import Pinned

__all__ = ["ResidentBuffer"]


class ResidentBuffer(Pinned):
    """Zeroed memory on one device, owned by one session."""

    __slots__ = ("_buffer", "device", "device_id", "exportable", "exported", "on_host", "taken_bytes")

    kind = "buffer"

    def __init__(self, device: Device, nbytes: int, *, exportable: bool = False) -> None:
        """Allocate; ``ResourceExhaustedError`` if the device has not that much, ``UnsupportedError`` if it exports
        nothing."""
        super().__init__(nbytes)
        self.taken_bytes = nbytes
        """Bytes of the device, as far as quotas are concerned."""
        self.device = device
        self.device_id = device.info.id
        self.on_host = uses_host_memory(device.info)
        self.exported = False
        """Another process may have it mapped."""
        self.exportable = exportable
        """Memory for other processes is of another kind, and takes more of the device than was asked for."""
        self._buffer: Buffer | None = allocate_exportable(device, nbytes) if exportable else device.allocate(nbytes)
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

        Raises ``InvalidArgumentError`` if it was not made for that, ``UnsupportedError``, ``DeviceError``.
        """
        assert self._buffer is not None
        if not self.exportable:
            raise InvalidArgumentError(
                "the buffer was not made to be exported",
                field="buffer",
                value=self.id,
                rule="buffer_exportable",
                fix="set exportable when it is created",
            )
        handle = export(self.device, self._buffer)
        self.exported = True
        return handle

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        buffer, self._buffer = self._buffer, None
        self.address = 0
        if buffer is not None:
            self.device.free(buffer)
