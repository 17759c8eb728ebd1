"""Operands that pass through staging memory, one class for each way in or out."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from tilewright_kit.contract.problem import Operand
from tilewright_kit.types.errors import NotFoundError
from tilewright_kit.types.tensor import TensorDesc, contiguous_strides
from tilewright_server.devices.contract import uses_host_memory
from tilewright_server.memory.buffers import ResidentBuffer
from tilewright_server.memory.regions import Region
from tilewright_server.memory.staging_pool import Staging, StagingPool
from tilewright_server.session.objects import OwnedObjects

__all__ = ["OperandSlot", "OutputValue", "Staged", "StagedAllocation", "StagedInline", "StagedRegion", "StagedReturn"]


@dataclass(frozen=True, slots=True)
class OutputValue:
    """An output that the reply carries: its bytes, or the id of the new buffer it is in."""

    name: str
    desc: TensorDesc
    data: bytes = b""
    buffer: int = 0


@dataclass(frozen=True, slots=True)
class OperandSlot:
    """Facts about one operand of a plan that binding needs: index, role, size and alignment in bytes, and whether an
    output may keep what it held in places that are data.
    """

    index: int
    operand: Operand
    is_output: bool
    nbytes: int
    alignment: int
    partial: bool = False

    @property
    def name(self) -> str:
        return self.operand.name


class Staged(ABC):
    """One operand. ``address`` is valid from ``begin`` to ``discard``."""

    __slots__ = ("_staging", "pool", "slot")

    def __init__(self, slot: OperandSlot, pool: StagingPool) -> None:
        self.slot = slot
        self.pool = pool
        self._staging: Staging | None = None

    @property
    def address(self) -> int:
        return 0 if self._staging is None else self._staging.address

    def content(self) -> bytes | None:
        """Bytes that the operation will read, where it is in this process' memory."""
        return None

    @abstractmethod
    def begin(self) -> int:
        """Take memory and copy in what the operation reads. Returns the bytes copied."""

    def finish(self) -> tuple[int, OutputValue | None]:
        """After a successful run: copy out. Returns the bytes copied and what the reply carries."""
        return 0, None

    def commit(self) -> None:  # noqa: B027 - most have nothing to hand over
        """The reply with what ``finish`` returned is certain: hand it over."""

    def discard(self) -> None:
        """Give the memory back. Idempotent."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.give_back()

    def _take(self) -> Staging:
        self._staging = self.pool.take(self.slot.nbytes)
        return self._staging

    def _taken(self) -> Staging:
        assert self._staging is not None, "begin comes first"
        return self._staging


class StagedInline(Staged):
    """Bytes of the request, for a device that cannot read the host's memory."""

    __slots__ = ("_data",)

    def __init__(self, slot: OperandSlot, pool: StagingPool, data: bytes) -> None:
        super().__init__(slot, pool)
        self._data = data

    def content(self) -> bytes:
        return self._data

    def begin(self) -> int:
        self._take().write(memoryview(self._data))
        return len(self._data)


class StagedRegion(Staged):
    """Part of a region that is guarded, or that the device cannot reach."""

    __slots__ = ("_offset", "_region")

    def __init__(self, slot: OperandSlot, pool: StagingPool, region: Region, offset: int) -> None:
        super().__init__(slot, pool)
        self._region = region
        self._offset = offset

    def content(self) -> bytes:
        found = memoryview(bytearray(self.slot.nbytes))
        self._region.read(self._offset, found)
        return bytes(found)

    def begin(self) -> int:
        staging = self._take()
        # A strided or partial output leaves gaps untouched: they must go back as they came.
        whole = self.slot.operand.desc.is_contiguous and not self.slot.operand.desc.packing and not self.slot.partial
        if self.slot.is_output and whole:
            return 0
        target = staging.host()
        if target is not None:
            self._region.read(self._offset, target)
        else:
            bounce = memoryview(bytearray(self.slot.nbytes))
            self._region.read(self._offset, bounce)
            staging.write(bounce)
        return self.slot.nbytes

    def finish(self) -> tuple[int, OutputValue | None]:
        if not self.slot.is_output:
            return 0, None
        self._region.write(self._offset, _content(self._taken()))
        return self.slot.nbytes, None


class StagedReturn(Staged):
    """An output that travels back in the reply, without gaps."""

    __slots__ = ()

    def begin(self) -> int:
        if self.slot.nbytes:
            staging = self._take()
            if self.slot.operand.desc.packing or self.slot.partial:
                # Padding of a packed format is nobody's element, nor are rows that the operation leaves alone: what was
                # here before must not travel.
                staging.clear()
        return 0

    def finish(self) -> tuple[int, OutputValue | None]:
        desc = self.slot.operand.desc
        if not self.slot.nbytes:
            return 0, OutputValue(self.slot.name, desc)
        content = _content(self._taken())
        if desc.packing or desc.is_contiguous:
            data = bytes(content)
        else:
            import numpy as np  # takes a tenth of a second: a server is ready without it

            size = desc.dtype.bytes
            flat: Any = np.frombuffer(content, dtype=f"u{size}")
            strides = [stride * size for stride in desc.strides]
            data = np.lib.stride_tricks.as_strided(flat, desc.shape, strides, writeable=False).tobytes()
            desc = replace(desc, strides=contiguous_strides(desc.shape))
        return len(data), OutputValue(self.slot.name, desc, data)


class StagedAllocation(Staged):
    """An output in a new resident buffer of the session."""

    __slots__ = ("_buffer", "_session")

    def __init__(self, slot: OperandSlot, pool: StagingPool, session: OwnedObjects) -> None:
        super().__init__(slot, pool)
        self._session = session
        self._buffer: ResidentBuffer | None = None

    @property
    def address(self) -> int:
        return 0 if self._buffer is None else self._buffer.address

    def begin(self) -> int:
        device = self.pool.device
        nbytes = max(self.slot.nbytes, 1)
        self._buffer = self._session.create_buffer(
            nbytes, lambda size: ResidentBuffer(device, size), on_host=uses_host_memory(device.info)
        )
        # Pinned: the end of the session during the run must not free what the device writes to.
        self._session.pin((self._buffer,))
        return 0

    def finish(self) -> tuple[int, OutputValue | None]:
        assert self._buffer is not None, "begin comes first"
        return 0, OutputValue(self.slot.name, self.slot.operand.desc, buffer=self._buffer.id)

    def commit(self) -> None:
        buffer, self._buffer = self._buffer, None
        assert buffer is not None, "begin comes first"
        self._session.unpin((buffer,))

    def discard(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._session.unpin((buffer,))
            with contextlib.suppress(NotFoundError):  # the session has ended, and the buffer with it
                self._session.free_buffer(buffer.id)


def _content(staging: Staging) -> memoryview:
    content = staging.host()
    if content is None:
        content = memoryview(bytearray(staging.nbytes))
        staging.read(content)
    return content
