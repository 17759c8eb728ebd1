"""Sources of regions that a client can hand over, as plain values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright_kit.types.errors import InvalidArgumentError, UnsupportedError
from tilewright_server.devices.contract import MemoryHandle
from tilewright_server.memory.device_regions import DeviceRegion, check_handle, device_of_uuid
from tilewright_server.memory.populated import check_file
from tilewright_server.memory.shm import OpenedFile, open_attached, open_memfd, open_posix, unlink_posix
from tilewright_server.session.objects import AnyRegion
from tilewright_server.session.processes import is_known, process_client
from tilewright_server.session.session import Session

if TYPE_CHECKING:
    from tilewright_server.devices.registry import DeviceRegistry

__all__ = ["AttachedFile", "DeviceMemory", "MemoryFile", "PosixObject", "RegionSource", "register"]


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """A memory file of another process."""

    pid: int
    fd: int
    name: str


@dataclass(frozen=True, slots=True)
class PosixObject:
    name: str
    unlink: bool = False
    """The name goes when the region is registered."""


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """A memory file behind a descriptor of this process; whoever made this closes it."""

    fd: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device; see ``MemoryHandle``. Descriptors stay their holder's to close."""

    kind: str
    uuid: str
    data: bytes = b""
    offset: int = 0
    fd: int = -1
    fds: tuple[int, ...] = ()
    part_bytes: tuple[int, ...] = ()


RegionSource = MemoryFile | PosixObject | AttachedFile | DeviceMemory


def register(
    session: Session, devices: DeviceRegistry, source: RegionSource, nbytes: int, owner: object = None
) -> AnyRegion:
    """Make a region of ``nbytes`` bytes of ``source``; it ends with ``owner``, if one is given.

    Raises ``InvalidArgumentError``, ``AccessError``, ``NotFoundError``, ``ResourceExhaustedError``,
    ``UnsupportedError`` and ``DeviceError``; then nothing stays mapped or open.
    """
    if not isinstance(source, DeviceMemory):
        region = session.register(lambda: _opened(source, nbytes), owner)
        if isinstance(source, PosixObject) and source.unlink:
            unlink_posix(source.name, region.inode)
        if isinstance(source, MemoryFile) and not is_known(session.client):
            proved = process_client(source.pid)  # its memory file proved it
            if proved is not None:
                session.identify(proved)
        return region
    handle = MemoryHandle(source.kind, source.data, nbytes, source.fd, source.offset, source.fds, source.part_bytes)
    check_handle(handle)
    return session.import_region(lambda: _imported(devices, source, handle), owner)


def _imported(devices: DeviceRegistry, source: DeviceMemory, handle: MemoryHandle) -> DeviceRegion:
    device = device_of_uuid(devices, source.uuid)
    if device.info.kind == "cpu" and handle.kind == "fd":
        if handle.part_bytes:
            raise UnsupportedError(
                "memory files are used one by one",
                field="part_bytes",
                value=len(handle.part_bytes),
                rule="memory_parts",
                fix="leave part_bytes empty, and register each file",
            )
        _check_sealed(handle)
    return DeviceRegion(device, handle)


def _check_sealed(handle: MemoryHandle) -> None:
    """A file that shrinks under its mapping would end the device's process, which also pays for pages that it makes."""
    opened = open_attached(handle.fd, handle.offset + handle.nbytes)
    os.close(opened.fd)
    if not opened.sealed:
        raise InvalidArgumentError(
            "the memory file is not sealed",
            field="device_fd",
            rule="region_sealed",
            fix="seal it (F_SEAL_SHRINK and F_SEAL_SEAL), or register it as `attached`",
        )
    check_file(handle.fd, handle.offset, handle.nbytes)


def _opened(source: MemoryFile | PosixObject | AttachedFile, nbytes: int) -> OpenedFile:
    if isinstance(source, MemoryFile):
        return open_memfd(source.pid, source.fd, source.name, nbytes)
    if isinstance(source, PosixObject):
        return open_posix(source.name, nbytes)
    return open_attached(source.fd, nbytes)
