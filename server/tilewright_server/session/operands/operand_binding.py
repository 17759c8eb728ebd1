"""From locations to addresses: checks each operand of an execution against the memory it names, and stages what cannot
be used in place.

``bind`` only looks things up and decides. The caller then pins the objects of the binding, calls ``begin`` (copies
in), runs the plan, calls ``finish`` (copies out) and ``discard``, and unpins.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError
from tilewright_server.devices.contract import DeviceLostError, shares_host_memory
from tilewright_server.devices.lifetime import is_lost
from tilewright_server.memory.device_regions import DeviceRegion
from tilewright_server.memory.errors import unknown_session
from tilewright_server.memory.pinned import Pinned
from tilewright_server.memory.staging_pool import StagingPool
from tilewright_server.session.objects import OwnedObjects
from tilewright_server.session.operands.staged_operands import (
    OperandSlot,
    OutputValue,
    Staged,
    StagedAllocation,
    StagedInline,
    StagedRegion,
    StagedReturn,
)

if TYPE_CHECKING:
    from tilewright_server.engine.engine import Prepared
    from tilewright_server.engine.execution.caller_launch import CallerPlan
    from tilewright_server.engine.types import Selection
    from tilewright_server.memory.buffers import ResidentBuffer

__all__ = ["Binder", "Binding", "Location", "Place", "Target"]


_SLOT_BYTES = 150
_BINDING_BYTES = 700
_ADDRESS_BYTES = 64


class Place(IntEnum):
    """Where an operand's bytes are."""

    NONE = 0
    INLINE = 1
    REGION = 2
    BUFFER = 3
    RETURN = 4
    ALLOCATE = 5


class Location(NamedTuple):
    """``value`` is the id of a region or buffer; ``data`` the bytes of an inline operand."""

    place: Place = Place.NONE
    value: int = 0
    offset: int = 0
    data: bytes = b""


class Target:
    """A prepared plan with the slots of its operands."""

    __slots__ = ("asked", "caller_plan", "device_id", "nbytes", "on_host", "prepared", "slots")

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.caller_plan: CallerPlan | None = None
        """Its launch plan, if the session was given it: then it may fetch the code objects."""
        self.asked: tuple[OperationRequest, Selection] | None = None
        """Request and selection that it was made for, where somebody keeps a journal of them."""
        self.device_id: str = prepared.device.id
        self.on_host = shares_host_memory(prepared.device)
        self.slots = tuple(
            OperandSlot(
                index,
                item,
                item.role is Role.OUTPUT,
                item.desc.nbytes,
                item.desc.dtype.bytes,
                item.name in prepared.partial,
            )
            for index, item in enumerate(prepared.operands)
        )
        plans = 2 if prepared.is_fallback else 1  # its successor comes on top
        self.nbytes = plans * prepared.nbytes + _SLOT_BYTES * len(self.slots)
        """About how much memory it keeps in use."""


class Binding:
    """One execution with an address for each operand (0 where staging will set it)."""

    __slots__ = ("_keep", "addresses", "objects", "repeat", "returned", "staged", "target")

    def __init__(self, target: Target, repeat: int, returned: int = 0) -> None:
        self.target = target
        self.repeat = repeat
        self.returned = returned
        self.addresses: list[int] = [0] * len(target.slots)
        self.objects: list[Pinned] = []
        self.staged: list[Staged] = []
        self._keep: list[bytes] = []

    @property
    def reusable(self) -> bool:
        """True if the same request binds to the same addresses again."""
        return not self.staged and not self._keep

    @property
    def nbytes(self) -> int:
        """About how much memory it takes to remember it."""
        return _BINDING_BYTES + _ADDRESS_BYTES * len(self.addresses)

    def keep(self, data: bytes) -> None:
        self._keep.append(data)

    def contents(self, names: Sequence[str]) -> dict[str, bytes]:
        """The bytes of those inputs among ``names`` that are on their way to a device."""
        found = {item.slot.name: item.content() for item in self.staged if item.slot.name in names}
        return {name: content for name, content in found.items() if content is not None}

    def begin(self) -> int:
        """Take staging memory and copy inputs in. Returns the bytes copied."""
        copied = 0
        for item in self.staged:
            copied += item.begin()
            self.addresses[item.slot.index] = item.address
        return copied

    def finish(self) -> tuple[int, list[OutputValue]]:
        """Copy outputs out. Returns the bytes copied and what the reply must carry."""
        copied, values = 0, []
        for item in self.staged:
            count, value = item.finish()
            copied += count
            if value is not None:
                values.append(value)
        for item in self.staged:
            item.commit()
        return copied, values

    def discard(self) -> None:
        """Give staging memory back, and new buffers that ``finish`` did not hand out. Idempotent."""
        for item in self.staged:
            item.discard()


class Binder:
    """Binds executions under the server's limits."""

    def __init__(self, inline_limit: int, reply_limit: int, pool_of: Callable[[str], StagingPool]) -> None:
        self.inline_limit = inline_limit
        self.reply_limit = reply_limit
        self._pool_of = pool_of

    def bind(
        self,
        target: Target,
        locations: Sequence[Location],
        session: OwnedObjects | None,
        repeat: int = 1,
        returned: int = 0,
    ) -> Binding:
        """Resolve ``locations``, one per slot; ``returned`` bytes of the reply are taken already.

        Raises ``InvalidArgumentError`` and ``NotFoundError`` that name the operand.
        """
        slots = target.slots
        if len(locations) != len(slots):
            raise InvalidArgumentError(
                f"the plan has {len(slots)} operands, but {len(locations)} locations were given",
                field="locations",
                value=len(locations),
                rule="operand_count",
                fix="give one location for each operand, in the order of the plan's reply",
            )
        binding = Binding(target, repeat, returned)
        for slot, location in zip(slots, locations):  # noqa: B905 - lengths are equal, and this is the hot path
            place = location.place
            if place is Place.REGION:
                self._in_region(binding, slot, location, session)
            elif place is Place.BUFFER:
                self._in_buffer(binding, slot, location, session)
            elif slot.is_output:
                self._given_back(binding, slot, place, session)
            else:
                self._inline(binding, slot, location)
        return binding

    def _in_region(self, binding: Binding, slot: OperandSlot, location: Location, session: OwnedObjects | None) -> None:
        region = _session(session).region(location.value)
        if isinstance(region, DeviceRegion):
            self._in_device_memory(binding, slot, region, location.offset)
            return
        offset = location.offset
        if offset > region.size - slot.nbytes or offset % slot.alignment:
            raise _out_of_bounds(slot, "region", offset, region.size)
        if not slot.nbytes:
            return
        region.check_pages(offset, slot.nbytes, written=slot.is_output)
        binding.objects.append(region)
        if region.address and binding.target.on_host:
            binding.addresses[slot.index] = region.address + offset
        else:
            binding.staged.append(StagedRegion(slot, self._pool_of(binding.target.device_id), region, offset))

    def _in_buffer(self, binding: Binding, slot: OperandSlot, location: Location, session: OwnedObjects | None) -> None:
        self._in_device_memory(binding, slot, _session(session).buffer(location.value), location.offset)

    def _in_device_memory(
        self, binding: Binding, slot: OperandSlot, item: DeviceRegion | ResidentBuffer, offset: int
    ) -> None:
        if offset > item.size - slot.nbytes or offset % slot.alignment:
            raise _out_of_bounds(slot, item.kind, offset, item.size)
        if item.device_id != binding.target.device_id:
            raise _wrong_device(slot, item, binding.target.device_id)
        if is_lost(item.address):
            # A region's memory is the client's, and there still: it can be registered again.
            later = 0.5 if isinstance(item, DeviceRegion) else None
            lost = f"the {item.kind} was on the device when it was lost"
            raise DeviceLostError(lost, device=item.device_id, retry_after_s=later)
        if item.address % slot.alignment:
            raise _misaligned(slot, item)
        if slot.nbytes:
            binding.objects.append(item)
            binding.addresses[slot.index] = item.address + offset

    def _inline(self, binding: Binding, slot: OperandSlot, location: Location) -> None:
        data = location.data
        if location.place not in (Place.INLINE, Place.NONE) or (location.place is Place.NONE and slot.nbytes):
            raise InvalidArgumentError(
                f"{slot.name} is an input, but its location has no bytes to read",
                field=f"{slot.name}.location",
                value=location.place.name.lower(),
                rule="operand_location",
                fix="give inline bytes, a region or a buffer",
            )
        if len(data) != slot.nbytes:
            raise InvalidArgumentError(
                f"{slot.name} needs {slot.nbytes} bytes, but {len(data)} were given",
                field=f"{slot.name}.location",
                value=len(data),
                rule="inline_size",
                fix="send the bytes from the first element to the last",
            )
        self._check_inline(slot, len(data))
        if not data:
            return
        if binding.target.on_host:
            binding.keep(data)
            binding.addresses[slot.index] = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
        else:
            binding.staged.append(StagedInline(slot, self._pool_of(binding.target.device_id), data))

    def _given_back(self, binding: Binding, slot: OperandSlot, place: Place, session: OwnedObjects | None) -> None:
        if place is Place.INLINE:
            raise InvalidArgumentError(
                f"{slot.name} is an output: the server cannot write to bytes of the request",
                field=f"{slot.name}.location",
                value="inline",
                rule="operand_location",
                fix="use return_inline, allocate, a region or a buffer",
            )
        pool = self._pool_of(binding.target.device_id)
        if place is Place.ALLOCATE:
            binding.staged.append(StagedAllocation(slot, pool, _session(session)))
            return
        desc = slot.operand.desc
        nbytes = slot.nbytes if desc.packing else desc.size * desc.dtype.bytes
        self._check_inline(slot, nbytes)
        binding.returned += nbytes
        if binding.returned > self.reply_limit:
            raise InvalidArgumentError(
                f"the outputs that are asked for do not fit into one reply ({self.reply_limit} bytes)",
                field=f"{slot.name}.location",
                value=binding.returned,
                rule="reply_limit",
                fix="send fewer executions at a time, or put outputs into a shared-memory region or a resident buffer",
            )
        binding.staged.append(StagedReturn(slot, pool))

    def _check_inline(self, slot: OperandSlot, nbytes: int) -> None:
        if nbytes > self.inline_limit:
            raise InvalidArgumentError(
                f"{slot.name} is larger than operands inside messages may be ({self.inline_limit} bytes)",
                field=f"{slot.name}.location",
                value=nbytes,
                rule="inline_limit",
                fix="put it into a shared-memory region or a resident buffer",
            )


def _session(session: OwnedObjects | None) -> OwnedObjects:
    if session is None:
        raise unknown_session()
    return session


def _wrong_device(slot: OperandSlot, item: DeviceRegion | ResidentBuffer, device_id: str) -> InvalidArgumentError:
    mend = f"make the buffer on {device_id}" if item.kind == "buffer" else f"register memory of {device_id}"
    return InvalidArgumentError(
        f"{slot.name} is in a {item.kind} on {item.device_id}, but the plan is for {device_id}",
        field=slot.name,
        value=item.device_id,
        rule=f"{item.kind}_device",
        fix=f"plan for {item.device_id} (selection.device), or {mend}",
    )


def _misaligned(slot: OperandSlot, item: DeviceRegion | ResidentBuffer) -> InvalidArgumentError:
    """A client chooses where in an allocation its region begins; a kernel that reads elements there would fault."""
    return InvalidArgumentError(
        f"the {item.kind} of {slot.name} does not begin at a multiple of its element size",
        field=slot.name,
        value=item.address % slot.alignment,
        rule="operand_alignment",
        fix=f"register it from a multiple of {slot.alignment} bytes on",
    )


def _out_of_bounds(slot: OperandSlot, kind: str, offset: int, size: int) -> InvalidArgumentError | NotFoundError:
    if offset % slot.alignment:
        return InvalidArgumentError(
            f"the offset of {slot.name} is not a multiple of its element size",
            field=f"{slot.name}.location.offset",
            value=offset,
            rule="offset_alignment",
            fix=f"use a multiple of {slot.alignment}",
        )
    return InvalidArgumentError(
        f"{slot.name} reaches past the end of its {kind}: {slot.nbytes} bytes from offset {offset} of {size}",
        field=f"{slot.name}.location.offset",
        value=offset,
        rule="location_bounds",
        fix=f"use an offset of at most {size - slot.nbytes}" if size >= slot.nbytes else f"use a larger {kind}",
    )
