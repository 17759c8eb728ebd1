"""Device regions: memory of a GPU that a client allocated and the server mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewright_kit.contract.device import Buffer, Device
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from tilewright_server.devices.contract import MAX_PARTS, GranularDevice, MemoryHandle, SharingDevice
from tilewright_server.devices.errors import check_handle as check_handle_size
from tilewright_server.memory.pinned import Pinned
from tilewright_server.memory.shm import MAX_REGION_BYTES

if TYPE_CHECKING:
    from tilewright_server.devices.registry import DeviceRegistry

__all__ = [
    "DeviceRegion",
    "allocate_exportable",
    "check_handle",
    "device_of_uuid",
    "export",
    "exportable_bytes",
    "plain_uuid",
]


class DeviceRegion(Pinned):
    """Memory of a client on one device. Bounds hold from ``address``; used in place by plans for that device only."""

    __slots__ = ("_buffer", "device", "device_id")

    kind = "region"
    zero_copy = True

    def __init__(self, device: Device, handle: MemoryHandle) -> None:
        """Map what ``handle`` names. Raises what ``SharingDevice.import_memory`` does."""
        super().__init__(handle.nbytes)
        self.device = device
        self.device_id = device.info.id
        self._buffer: Buffer | None = _sharing(device).import_memory(handle)
        self.address = self._buffer.address

    def read(self, offset: int, target: memoryview) -> None:
        """Copy bytes to the host. The range has been checked and the region is pinned."""
        assert self._buffer is not None
        self.device.read(self._buffer, offset, target)

    def write(self, offset: int, source: memoryview) -> None:
        """Copy bytes from the host, under the same conditions as ``read``."""
        assert self._buffer is not None
        self.device.write(self._buffer, offset, source)

    def release(self) -> None:
        """Unmap. Nobody may have the region pinned. Idempotent."""
        buffer, self._buffer = self._buffer, None
        self.address = 0
        if buffer is not None:
            _sharing(self.device).release_memory(buffer)


def plain_uuid(text: str) -> str:
    """A device's UUID as all programs write it: some put ``GPU-`` before it, some write capitals."""
    return text.lower().removeprefix("gpu-")


def device_of_uuid(devices: DeviceRegistry, uuid: str) -> Device:
    """The device of that UUID, opened.

    Raises ``NotFoundError`` if this server has no such device, and what opening it raises.
    """
    wanted = plain_uuid(uuid)
    infos: list[Any] = list(devices.infos())
    named = [info.id for info in infos if wanted and plain_uuid(str(info.attributes.get("uuid", ""))) == wanted]
    if not named and wanted:
        opened = devices.opened().items()
        named = [name for name, device in opened if plain_uuid(str(getattr(device, "uuid", ""))) == wanted]
    if not named:
        raise NotFoundError(
            "this server has no device of that UUID",
            field="device_uuid",
            value=uuid[:80],
            rule="device_uuid",
            fix="use memory of a device that the server has: "
            + (
                ", ".join(f"{info.id} ({info.attributes['uuid']})" for info in infos if "uuid" in info.attributes)
                or "none"
            ),
        )
    return devices.get(named[0])


def check_handle(handle: MemoryHandle) -> None:
    """``InvalidArgumentError`` for a handle that no driver needs to be asked about."""
    check_handle_size(handle)
    if not 0 < handle.nbytes <= MAX_REGION_BYTES:
        raise InvalidArgumentError(
            "a region has at least one byte and at most 2**46",
            field="bytes",
            value=handle.nbytes,
            rule="region_size",
            fix="register the part of the allocation that tensors lie in",
        )
    if not 0 <= handle.offset <= MAX_REGION_BYTES:
        raise InvalidArgumentError(
            "no allocation is as large as that",
            field="offset",
            value=handle.offset,
            rule="region_offset",
            fix="count from the beginning of the allocation, in bytes",
        )
    parts = handle.part_bytes
    if not parts:
        return
    total = sum(parts)
    if len(parts) > MAX_PARTS or not all(parts) or not handle.offset + handle.nbytes <= total <= 2 * MAX_REGION_BYTES:
        raise InvalidArgumentError(
            "the parts do not hold the region",
            field="part_bytes",
            value=f"{len(parts)} of {total} bytes",
            rule="memory_parts",
            fix=f"give the size of each part, {MAX_PARTS} at most, that the region lies in",
        )


def allocate_exportable(device: Device, nbytes: int) -> Buffer:
    """Memory that can be named for the client's process. Raises ``UnsupportedError``, ``ResourceExhaustedError``."""
    return _sharing(device).allocate_shared(nbytes)


def exportable_bytes(device: Device, nbytes: int) -> int:
    """How much of the device ``allocate_exportable`` takes."""
    granule = device.shared_granule if isinstance(device, GranularDevice) else 1
    return -(-nbytes // granule) * granule


def export(device: Device, buffer: Buffer) -> MemoryHandle:
    """Name a buffer for the client's process; the caller closes the descriptor. Raises ``UnsupportedError``."""
    return _sharing(device).export_memory(buffer)


def _sharing(device: Device) -> SharingDevice:
    if not isinstance(device, SharingDevice):
        raise UnsupportedError(
            f"{device.info.id} cannot share memory with other processes",
            field="device",
            value=device.info.id,
            rule="device_sharing",
            fix="use shared-memory regions for operands on the host",
        )
    return device
