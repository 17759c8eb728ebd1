"""The operands of a plan: whether an array fits one, and where it is. See ``plans``."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np

from tilewright import wire
from tilewright.core import Core, Session
from tilewright.errors import InvalidArgumentError
from tilewright.layout import Array, Spec, contiguous_strides, same_places, span_bytes
from tilewright.operands import Cargo, address_of, place_input, place_output, region_of
from tilewright.resident import ResidentTensor
from tilewright.steps import Flow
from tilewright_proto.v1 import tensor_pb2

__all__ = ["Loaded", "Slot", "known", "place_slot_input", "place_slot_output", "single"]


class Slot(NamedTuple):
    """One operand of a plan."""

    name: str
    spec: Spec
    byte_strides: tuple[int, ...]

    @classmethod
    def of(cls, operand: tensor_pb2.Operand) -> Slot:
        spec = Spec.of_wire(operand.spec)
        strides = spec.strides if spec.strides is not None else contiguous_strides(spec.shape)
        return cls(operand.name, spec, tuple(stride * spec.dtype.itemsize for stride in strides))

    def check(self, array: Array) -> bool:
        """Whether the array lies as planned; False if a copy of it would. Raises ``InvalidArgumentError`` if nothing
        would.
        """
        spec = self.spec
        if array.shape != spec.shape or array.dtype != spec.dtype or spec.packing:
            wanted = (
                f"a tensor packed as {spec.packing}" if spec.packing else f"{spec.dtype.name} of shape {spec.shape}"
            )
            raise InvalidArgumentError(
                f"the plan was made for {self.name} as {wanted}, not {array.dtype.name} of shape {array.shape}",
                field=self.name,
                value=array.shape,
                rule="plan_operand",
                fix="pass an array as planned, or make a plan for this one",
            )
        return array.strides == self.byte_strides or same_places(array, spec.strides)


class Loaded:
    """One execution, ready to be sent: its serialised part, and what to do when its result is there."""

    __slots__ = ("cargo", "chunk", "result", "session")

    def __init__(self, session: Session, chunk: bytes, cargo: Cargo, result: dict[str, Any]) -> None:
        self.session = session
        self.chunk = chunk
        self.cargo = cargo
        self.result = result


def known(core: Core, session: Session, slot: Slot, value: Any) -> bytes | None:
    """The serialised location of an array that was used before, or ``None``. Raises if it does not fit the plan."""
    entry = core.chunks.get(id(value))
    if entry is None or entry.session is not session or entry.alive() is not value or not slot.check(value):
        return None
    return entry.data


def place_slot_input(core: Core, session: Session, cargo: Cargo, slot: Slot, value: Any) -> Flow[bytes]:
    if isinstance(value, ResidentTensor):
        if value.spec != slot.spec:
            raise InvalidArgumentError(
                f"the plan was made for another {slot.name}: {slot.spec}, not {value.spec}",
                field=slot.name,
                rule="plan_operand",
                fix="make a plan with this tensor",
            )
        cargo.keep.append(value)
        return wire.location_field(value.location().SerializeToString())
    array = np.asarray(value)
    if not slot.check(array):
        array = arranged(core, cargo, slot, array)
    elif (known := (yield from by_reference(core, session, array))) is not None:
        cargo.keep.append(array)
        return known
    spec, location = yield from place_input(core, session, cargo, array, slot.name)
    if (spec.strides or None) != slot.spec.strides and array.size > 1 and not same_places(array, slot.spec.strides):
        array = arranged(core, cargo, slot, array)
        _, location = yield from place_input(core, session, cargo, array, slot.name)
    return wire.location_field(location.SerializeToString())


def place_slot_output(
    core: Core, session: Session, cargo: Cargo, slot: Slot, target: Any, result: dict[str, Any]
) -> Flow[bytes]:
    if isinstance(target, np.ndarray):
        if not slot.check(target):
            temporary = arranged(core, cargo, slot, np.zeros((), target.dtype))
            cargo.copies.append((temporary, target))
            result[slot.name] = target
            target = temporary
        elif target.flags.writeable and (known := (yield from by_reference(core, session, target))) is not None:
            cargo.keep.append(target)
            result[slot.name] = target
            return known
    elif not isinstance(target, Spec) and (not isinstance(target, ResidentTensor) or target.spec != slot.spec):
        raise InvalidArgumentError(
            f"{slot.name} does not fit the plan",
            field=slot.name,
            value=type(target).__name__,
            rule="plan_operand",
            fix="pass an array as planned, or leave it out",
        )
    _, location, found = yield from place_output(core, session, cargo, slot.name, target)
    if found is not None:
        result.setdefault(slot.name, found)
    return wire.location_field(location.SerializeToString())


def by_reference(core: Core, session: Session, array: Array) -> Flow[bytes | None]:
    """The location of an array in shared memory, remembered for as long as it lives."""
    if array.size == 0 or (array.ndim and min(array.strides) < 0):
        return None
    place = core.pool.find(address_of(array), span_bytes(array))
    if place is None:
        return None
    region = yield from region_of(core, session, place[0])
    location = tensor_pb2.Location(region=tensor_pb2.RegionSlice(region=region, offset=place[1]))
    data = wire.location_field(location.SerializeToString())
    chunks, key = core.chunks, id(array)
    core.add_chunk(key, weakref.ref(array, lambda _: chunks.pop(key, None)), session, data)
    return data


def arranged(core: Core, cargo: Cargo, slot: Slot, array: Array) -> Array:
    """A copy that lies as planned, in shared memory if there is any."""
    count = slot.spec.nbytes // slot.spec.dtype.itemsize
    shared = core.require().shared_memory
    flat = core.pool.empty((count,), slot.spec.dtype) if shared else np.empty((count,), slot.spec.dtype)
    view = np.lib.stride_tricks.as_strided(flat, slot.spec.shape, slot.byte_strides)
    # Broadcast dimensions are written once per element that shares a place, always with the same value.
    view[...] = array
    cargo.keep.append(flat)
    cargo.staged_bytes += flat.nbytes
    return view


def single(result: dict[str, Any]) -> Any:
    """The one output itself, or all by name."""
    return next(iter(result.values())) if len(result) == 1 else result
