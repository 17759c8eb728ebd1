"""Shared memory of the Open Inference Protocol: POSIX objects and memory of GPUs under names of their owner."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError
from tilewright_server.clients.client import Client
from tilewright_server.devices.contract import IPC_KINDS, MemoryHandle
from tilewright_server.endpoints.kserve.owners import Owner, Owners, SharedRegion, no_region
from tilewright_server.memory.device_regions import DeviceRegion, check_handle
from tilewright_server.memory.shm import MAX_REGION_BYTES, open_object
from tilewright_server.session.objects import AnyRegion
from tilewright_server.session.session import Session

if TYPE_CHECKING:
    from tilewright_server.devices.registry import DeviceRegistry

__all__ = ["SharedMemory"]

MAX_NAME = 256
UNREGISTER_S = 60.0
"""How long unregistering waits for work in flight where the call has no deadline; the region goes with that work."""


class SharedMemory:
    """Registers, lists and ends regions. Thread-safe."""

    def __init__(self, owners: Owners, devices: DeviceRegistry, *, fill: bool = True) -> None:
        """``fill``: pages of results that their owner did not touch are made."""
        self._fill = fill
        self._owners = owners
        self._devices = devices

    def register_system(self, client: Client, name: str, key: str, offset: int, nbytes: int) -> None:
        """Register part of a POSIX object of the caller's user. Raises ``InvalidArgumentError``, ``AccessError``,
        ``NotFoundError`` and ``ResourceExhaustedError``; then nothing stays open."""
        _check(name, nbytes, offset)
        uid = self._owners.uid(client)
        plain = key.removeprefix("/")
        lease = self._owners.lease(client, plain)
        owner = self._owners.owner(client, lease)
        region = self._registered(owner.session, plain, offset + nbytes, uid)
        self._name(owner, SharedRegion(name, key, offset, nbytes, 0, region.id, lease))

    def _registered(self, session: Session, name: str, nbytes: int, uid: int) -> AnyRegion:
        """A region over an object. What is owed for its pages already is a part of the charge from now on, or stays."""
        from tilewright_server.endpoints.kserve.charges import Charge  # not before the first region

        debts, opened = self._owners.debts, open_object(name, nbytes, uid, fills=self._fill)
        try:
            with debts.taken_over(opened.fd, opened.inode) as owed:
                charge = Charge(session.account, nbytes, debts)
                try:
                    return session.register(
                        lambda: replace(opened, fd=os.dup(opened.fd), filled=owed, on_release=charge.end)
                    )
                except BaseException:
                    charge.end()
                    raise
        finally:
            os.close(opened.fd)

    def register_device(self, client: Client, name: str, handle: bytes, ordinal: int, nbytes: int) -> None:
        """Register memory of a GPU by the handle of its driver. Raises what ``register_system`` does."""
        _check(name, nbytes, 0)
        self._owners.uid(client)
        info = next((item for item in self._devices.infos() if _is_gpu(item.id, item.kind, ordinal)), None)
        if info is None:
            raise NotFoundError(
                "this server has no GPU of that number",
                field="device_id",
                value=ordinal,
                rule="device_id",
                fix="use memory of a GPU that the server has, by the number that it has there",
            )
        memory = MemoryHandle(f"{info.kind}_ipc", handle, nbytes)
        check_handle(memory)
        lease = self._owners.lease(client)
        owner = self._owners.owner(client, lease)
        region = owner.session.import_region(lambda: DeviceRegion(self._devices.get(info.id), memory))
        self._name(owner, SharedRegion(name, "", 0, nbytes, ordinal, region.id, lease))

    def unregister(self, client: Client, name: str, deadline: float | None, *, system: bool) -> None:
        """Forget a region of the caller, or with an empty name all of that kind, and wait until nothing uses it. No
        error for a name that he has not: clients clear before they begin."""
        owner = self._owners.find(client)
        if owner is None:
            return
        with owner.lock:
            found = [item for item in _of_kind(owner, system=system) if name in ("", item.name)]
            for item in found:
                del owner.regions[item.name]
        for item in found:
            owner.session.unregister(item.region, deadline or time.monotonic() + UNREGISTER_S)

    def list(self, client: Client, name: str, *, system: bool) -> list[SharedRegion]:
        """Regions of the caller of one kind. Raises ``NotFoundError`` for a name that he has not."""
        owner = self._owners.find(client)
        found: list[SharedRegion] = []
        if owner is not None:
            with owner.lock:
                found = [item for item in _of_kind(owner, system=system) if name in ("", item.name)]
        if name and not found:
            raise no_region(name)
        return found

    def find(self, client: Client, name: str) -> SharedRegion:
        """A region of the caller. Raises ``NotFoundError``."""
        owner = self._owners.find(client)
        if owner is None:
            raise no_region(name)
        return owner.region(name)

    @staticmethod
    def _name(owner: Owner, made: SharedRegion) -> None:
        with owner.lock:
            is_new = made.name not in owner.regions
            if is_new:
                owner.regions[made.name] = made
        if not is_new:
            owner.session.unregister(made.region)
            raise InvalidArgumentError(
                "this client has a region of that name already",
                field="name",
                value=made.name,
                rule="region_name_taken",
                fix="unregister it first, or choose another name",
            )


def _of_kind(owner: Owner, *, system: bool) -> list[SharedRegion]:
    return [item for item in owner.regions.values() if bool(item.key) is system]


def _is_gpu(device_id: str, kind: str, ordinal: int) -> bool:
    return f"{kind}_ipc" in IPC_KINDS and device_id == f"{kind}:{ordinal}"


def _check(name: str, nbytes: int, offset: int) -> None:
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise InvalidArgumentError(
            "the name of a region is empty, too long or not printable",
            field="name",
            value=name[:MAX_NAME],
            rule="name",
            fix=f"give it a name of 1 to {MAX_NAME} printable characters",
        )
    if not (0 < nbytes <= MAX_REGION_BYTES and 0 <= offset <= MAX_REGION_BYTES):
        raise InvalidArgumentError(
            "a region has at least one byte, and ends before 2**46",
            field="byte_size",
            value=nbytes,
            rule="region_size",
            fix="register the part of the object that tensors lie in",
        )
