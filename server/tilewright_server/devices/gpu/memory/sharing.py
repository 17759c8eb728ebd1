"""Memory of other processes, mapped, and ours, named for them."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tilewright_kit.types.errors import DeviceError, InvalidArgumentError, TilewrightError, UnsupportedError
from tilewright_server.devices.contract import MemoryHandle
from tilewright_server.devices.errors import check_handle
from tilewright_server.devices.gpu.driver import GpuDriver

__all__ = ["CAUSES", "Importer", "Mapping", "import_error"]

CAUSES = {
    "stale": (
        "memory_handle",
        "the handle names no memory that can be mapped: it was freed, or the handle is of another kind or device",
        "export it again from the base of a live allocation, with the kind that its allocator supports",
    ),
    "own": (
        "memory_own_process",
        "the handle is of memory that the server itself allocated, of another device, or of a process that has the "
        "number of this one in another PID namespace",
        "send handles of memory that your own process allocated on this device; between containers share the PID "
        "namespace, or send a file descriptor",
    ),
    "mapping": (
        "memory_mapping",
        "the memory cannot be mapped into the server's process",
        "if client and server are in containers, let them share PID and IPC namespaces, or send a file descriptor",
    ),
    "device": ("memory_device", "the memory lies on another device", "send it to the device that it lies on"),
    "peers": (
        "memory_peers",
        "the device has as many peers as it can have",
        "send the memory to the device that it lies on",
    ),
    "unsupported": (
        "memory_kind",
        "this driver cannot map memory of that kind",
        "use a handle of another kind, or inline operands",
    ),
    "forbidden": (
        "memory_kind",
        "the driver does not permit mapping that memory",
        "use a handle of another kind, or inline operands",
    ),
}
"""Rule, reason and fix, by what ``Results.imports`` says."""


def import_error(driver: GpuDriver, result: Any, kind: str) -> TilewrightError:
    """Why the driver would not map a handle of ``kind``."""
    error = driver.error(result, "memory of another process")
    cause = driver.results.imports.get(result.name)
    if cause is None:
        return error
    rule, reason, fix = CAUSES[cause]
    return DeviceError(f"{reason} ({result.name})", field="handle", value=kind, rule=rule, fix=fix)


@dataclass(slots=True, eq=False)
class Mapping:
    """An allocation of another process, in our address space. ``nbytes`` is 0 where the driver does not tell it."""

    key: tuple[str, bytes]
    base: int
    nbytes: int
    unmap: Callable[[], None]
    users: int = 1


class Importer:
    """Maps every allocation once, however many tensors lie in it. Thread-safe. The context must be current."""

    def __init__(self, driver: GpuDriver, ordinal: int, bury: Callable[[Callable[[], None]], None]) -> None:
        """``bury`` calls back when nothing that was launched can use a mapping any more."""
        self._driver = driver
        self._ordinal = ordinal
        self._bury = bury
        self._mappings: dict[tuple[str, bytes], Mapping] = {}
        self._others: list[Mapping] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._mappings) + len(self._others)

    def open(self, handle: MemoryHandle) -> Mapping:
        """A mapping that holds the handle's part; ``close`` it. Raises as ``SharingDevice.import_memory``."""
        driver = self._driver
        openers = {driver.ipc_kind: self._open_legacy, driver.pool_kind: self._open_pooled, "fd": self._open_fd}
        opener = openers.get(handle.kind)
        if opener is None:
            raise UnsupportedError(
                "this device cannot map handles of that kind",
                field="kind",
                value=handle.kind,
                rule="memory_kind",
                fix=f"use {driver.ipc_kind}, {driver.pool_kind} or fd",
            )
        self._check(handle)
        key = (handle.kind, handle.data)
        with self._lock:
            known = self._mappings.get(key) if handle.data else None
            mapping = known or opener(handle)
            try:
                self._require_part(handle, mapping)
            except TilewrightError:
                if known is None:
                    mapping.unmap()
                raise
            if known is not None:
                known.users += 1
            elif handle.data:
                self._mappings[key] = mapping
            else:
                self._others.append(mapping)
        return mapping

    def close(self, mapping: Mapping) -> None:
        """One user less; the last one unmaps it, behind what was launched."""
        with self._lock:
            mapping.users -= 1
            last = not mapping.users
        if last:
            self._bury(lambda: self._unmap(mapping))

    def close_all(self) -> None:
        """Unmap everything: the device is idle."""
        with self._lock:
            mappings = [*self._mappings.values(), *self._others]
            self._mappings.clear()
            self._others.clear()
        for mapping in mappings:
            mapping.unmap()

    def _unmap(self, mapping: Mapping) -> None:
        with self._lock:
            if mapping.users:
                return  # it was asked for again meanwhile
            if self._mappings.get(mapping.key) is mapping:
                del self._mappings[mapping.key]
            elif mapping in self._others:
                self._others.remove(mapping)
            else:
                return
            mapping.unmap()

    def _check(self, handle: MemoryHandle) -> None:
        if handle.offset < 0 or handle.nbytes <= 0:
            raise InvalidArgumentError(
                "a handle stands for at least one byte of its allocation",
                field="bytes",
                value=handle.nbytes,
                rule="memory_part",
                fix="give offset and size of the part that is meant",
            )
        check_handle(handle)
        for fd in (handle.descriptors or (-1,)) if handle.kind != self._driver.ipc_kind else ():
            try:
                mode = os.fstat(fd).st_mode
            except OSError:
                mode = stat.S_IFREG
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                raise InvalidArgumentError(
                    "the descriptor is no memory of a device",
                    field="descriptor",
                    rule="memory_descriptor",
                    fix="send the descriptor that the driver exported; memory files are regions of the host",
                )

    @staticmethod
    def _require_part(handle: MemoryHandle, mapping: Mapping) -> None:
        if mapping.nbytes and handle.offset + handle.nbytes > mapping.nbytes:
            raise InvalidArgumentError(
                f"the allocation has {mapping.nbytes} bytes, and the part would end at {handle.offset + handle.nbytes}",
                field="offset",
                value=handle.offset,
                rule="memory_part",
                fix="count the offset from the base of the allocation that the handle was made of",
            )

    def _require_device(self, address: int) -> None:
        """A legacy handle of another device's memory can be mapped as well, through the link between them."""
        if int(self._driver.check(self._driver.api.device_of(address))) != self._ordinal:
            raise _other_device()

    def _open_legacy(self, handle: MemoryHandle) -> Mapping:
        driver, api = self._driver, self._driver.api
        answer = api.open_handle(handle.data)
        if answer[0]:
            raise import_error(driver, answer[0], handle.kind)
        opened = int(answer[1])

        def unmap() -> None:
            driver.quietly(api.close_handle(opened))

        return self._mapping(handle, opened, unmap)

    def _open_pooled(self, handle: MemoryHandle) -> Mapping:
        driver, api = self._driver, self._driver.api
        if self._ordinal and driver.imports_pools_first_only:
            raise UnsupportedError(
                "the runtime imports pools of other processes on its first device only",
                field="kind",
                value=handle.kind,
                rule="memory_kind",
                fix=f"allocate the memory outside of a pool, and send it by {driver.ipc_kind} or fd",
            )
        answer = api.import_pool(handle.fd)
        if answer[0]:
            raise import_error(driver, answer[0], handle.kind)
        pool = answer[1]
        answer = api.allow_pool(pool, self._ordinal)
        if not answer[0]:
            answer = api.import_pointer(pool, handle.data)
        if answer[0]:
            driver.quietly(api.end_pool(pool))
            raise import_error(driver, answer[0], handle.kind)
        opened = int(answer[1])

        def unmap() -> None:
            driver.quietly(api.free(opened))
            driver.quietly(api.end_pool(pool))

        return self._mapping(handle, opened, unmap)

    def _mapping(self, handle: MemoryHandle, opened: int, unmap: Callable[[], None]) -> Mapping:
        """Mapping of the whole allocation at an address that was opened."""
        driver = self._driver
        try:
            self._require_device(opened)
            base, size = driver.check(driver.api.address_range(opened))
        except TilewrightError:
            unmap()
            raise
        return Mapping((handle.kind, handle.data), base, size, unmap)

    def _open_fd(self, handle: MemoryHandle) -> Mapping:
        """Only the part that is asked for, from the beginning: the driver does not tell the size of an allocation, but
        refuses to map more than there is."""
        if handle.part_bytes:
            return self._open_parts(handle)
        with self._allocation(handle.fd) as (allocation, granule):
            size = -(-(handle.offset + handle.nbytes) // granule) * granule
            base, result = self._mapped(allocation, size)
            if result:
                raise self._refused(allocation, size, granule, result)
        return Mapping((handle.kind, handle.data), base, size, lambda: self._unmapped(base, size))

    def _open_parts(self, handle: MemoryHandle) -> Mapping:
        """Several allocations, one behind the other in one range of addresses."""
        driver, api = self._driver, self._driver.api
        total = sum(handle.part_bytes)
        with self._allocation(handle.fds[0]) as (_, granule):
            # Before anything is reserved: the driver refuses a range of a part of a granule without saying why.
            if uneven := next((size for size in handle.part_bytes if size % granule), 0):
                raise _uneven(uneven, granule)
        base = int(driver.check(api.reserve(total)))
        mapped: list[tuple[int, int]] = []

        def unmap() -> None:
            for at, size in mapped:
                driver.quietly(api.unmap_range(at, size))
            driver.quietly(api.free_range(base, total))

        try:
            at = base
            for fd, size in zip(handle.fds, handle.part_bytes, strict=True):
                with self._allocation(fd) as (allocation, granule):
                    result = api.map_range(at, size, allocation)[0]
                    if result:
                        raise self._refused(allocation, size, granule, result)
                mapped.append((at, size))
                at += size
            driver.check(api.allow_range(base, total, self._ordinal))
        except TilewrightError:
            unmap()
            raise
        return Mapping((handle.kind, handle.data), base, total, unmap)

    @contextmanager
    def _allocation(self, fd: int) -> Iterator[tuple[Any, int]]:
        """The allocation of this device behind a descriptor, and the granule of its mappings, which hold it."""
        driver, api = self._driver, self._driver.api
        answer = api.import_fd(fd)
        if answer[0]:
            raise import_error(driver, answer[0], "fd")
        allocation = answer[1]
        try:
            ordinal, granule = driver.check(api.describe(allocation))
            if ordinal != self._ordinal:
                raise _other_device()
            yield allocation, granule
        finally:
            driver.quietly(api.release(allocation))

    def _refused(self, allocation: Any, size: int, granule: int, result: Any) -> TilewrightError:
        """Why the first ``size`` bytes of an allocation could not be mapped.

        Drivers differ in which call refuses more than there is, and how: some say INVALID_VALUE, others NOT_SUPPORTED.
        So what fails is tried once more with the one granule that every allocation has: if that goes, size was it.
        """
        if size > granule and result.name != self._driver.results.full:
            least, failed = self._mapped(allocation, granule)
            if not failed:
                self._unmapped(least, granule)
                return _too_small(size)
        return import_error(self._driver, result, "fd")

    def _mapped(self, allocation: Any, size: int) -> tuple[int, Any]:
        """Base and the driver's result; nothing is mapped unless that is success."""
        driver, api = self._driver, self._driver.api
        base = int(driver.check(api.reserve(size)))
        result = api.map_range(base, size, allocation)[0]
        if result:
            driver.quietly(api.free_range(base, size))
            return 0, result
        result = api.allow_range(base, size, self._ordinal)[0]
        if result:
            self._unmapped(base, size)
            return 0, result
        return base, result

    def _unmapped(self, base: int, size: int) -> None:
        self._driver.quietly(self._driver.api.unmap_range(base, size))
        self._driver.quietly(self._driver.api.free_range(base, size))


def _other_device() -> DeviceError:
    return DeviceError(
        "the memory lies on another device",
        field="handle",
        rule="memory_device",
        fix="send it to the device that it lies on",
    )


def _too_small(size: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the allocation has fewer than the {size} bytes that the part would end at",
        field="offset",
        rule="memory_part",
        fix="count the offset from the beginning of the allocation that the descriptor stands for",
    )


def _uneven(size: int, granule: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"parts of memory are multiples of {granule} bytes",
        field="part_bytes",
        value=size,
        rule="memory_part",
        fix="give the sizes that they were mapped with",
    )
