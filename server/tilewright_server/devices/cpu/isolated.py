"""The CPU as a device in a process of its own: made by a worker, with memory apart from the server's."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright_kit.contract.device import Buffer, DeviceInfo
from tilewright_kit.types.errors import DeviceError, InvalidArgumentError, UnsupportedError
from tilewright_server.devices.contract import MemoryHandle
from tilewright_server.devices.cpu.device import CpuDevice
from tilewright_server.devices.cpu.runtime import Runtime

__all__ = ["CPU_FACTORY", "CPU_UUID", "HostedCpu", "open_cpu"]

CPU_FACTORY = "tilewright_server.devices.cpu.isolated:open_cpu"
CPU_UUID = "cpu"
"""There is one on a machine."""


def open_cpu(info: DeviceInfo, options: Mapping[str, Any]) -> HostedCpu:
    """The CPU, on the cores of ``info.attributes["cpus"]``; ``runtime`` is the path of the built runtime."""
    return HostedCpu(info, Runtime(Path(options["runtime"])).open(info.attributes["cpus"]))


class HostedCpu(CpuDevice):
    """The CPU in a process of its own: there the memory of clients is as far away as it is from a GPU."""

    uuid = CPU_UUID

    def allocate_shared(self, nbytes: int) -> Buffer:
        """No other process can map it: see ``export_memory``."""
        return self.allocate(nbytes)

    def import_memory(self, handle: MemoryHandle) -> Buffer:
        """Map a sealed memory file (kind ``fd``)."""
        if handle.kind != "fd" or handle.fd < 0:
            raise UnsupportedError(
                "a CPU maps memory files only", field="kind", value=handle.kind, rule="memory_sharing", fix="pass a fd"
            )
        status = os.fstat(handle.fd)
        if not stat.S_ISREG(status.st_mode) or not 0 <= handle.offset <= status.st_size - handle.nbytes:
            raise InvalidArgumentError(
                "the memory file is smaller than the region",
                field="bytes",
                value=handle.nbytes,
                rule="region_size",
                fix="register fewer bytes",
            )
        try:
            mapping = mmap.mmap(handle.fd, status.st_size)
        except (OSError, ValueError) as error:
            raise DeviceError("the memory file cannot be mapped", rule="memory_sharing", fix="seal it") from error
        return Buffer(_address(mapping) + handle.offset, handle.nbytes, owner=mapping)

    def release_memory(self, buffer: Buffer) -> None:
        mapping, buffer.owner = buffer.owner, None
        if isinstance(mapping, mmap.mmap):
            mapping.close()

    def export_memory(self, buffer: Buffer) -> MemoryHandle:  # noqa: ARG002
        raise UnsupportedError(
            "buffers of this device cannot be mapped by others",
            field="buffer",
            rule="memory_sharing",
            fix="register a memory file of your own, or read the buffer",
        )


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
