"""The operands of a plan: whether an array fits one, and where it is. See ``plans``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tilewright.dispatch.operands.operands import (
    Cargo,
    check_output,
    locate,
    place_device,
    reply_location,
    send_copy,
)
from tilewright.errors import InvalidArgumentError
from tilewright.session.state import Core, KnownArray, Session
from tilewright.tensor.device_array import empty_like
from tilewright.tensor.interop import DeviceTensor, recognise, recognise_output
from tilewright.tensor.resident import ResidentTensor
from tilewright.tensor.segments import region_of
from tilewright.transport import messages
from tilewright.transport.rpc import Flow
from tilewright.types.addresses import address_of
from tilewright.types.spec import Array, Spec, as_array, contiguous_strides, dense, same_places, span_bytes, strided
from tilewright_proto.v1 import tensor_pb2

__all__ = ["Loaded", "Slot", "known", "place_slot_input", "place_slot_output", "single"]

BYTE = np.dtype(np.uint8)


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
        """True if the array lies as planned; False if a copy of it would. Raises ``InvalidArgumentError`` if nothing
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

    def check_tensor(self, tensor: DeviceTensor) -> None:
        """Raise ``InvalidArgumentError`` unless a tensor in device memory, which is never copied, lies as planned."""
        have, want = tensor.spec, self.spec
        alike = have.shape == want.shape and have.dtype == want.dtype and not want.packing
        if alike and self.is_strided(contiguous_strides(have.shape) if have.strides is None else have.strides):
            return
        raise InvalidArgumentError(
            f"the plan was made for another {self.name}: {_described(want)}, not {_described(have)}",
            field=self.name,
            value=have.shape,
            rule="plan_operand",
            fix="pass a tensor as planned (a contiguous copy, perhaps), or make a plan for this one",
        )

    def is_strided(self, strides: Sequence[int]) -> bool:
        """True if ``strides`` (in elements) are the planned ones, dimensions of size one aside."""
        size = self.spec.dtype.itemsize
        return all(
            n <= 1 or have * size == want
            for n, have, want in zip(self.spec.shape, strides, self.byte_strides, strict=True)
        )

    def check_copy(self, array: Array) -> None:
        """Raise ``InvalidArgumentError`` if elements of the plan share a place that are different ones in ``array``."""
        reach = self.spec.dtype.itemsize
        for step, n, have in sorted(zip(self.byte_strides, self.spec.shape, array.strides, strict=True)):
            if n <= 1 or step == have == 0:
                continue
            if step < reach:
                raise InvalidArgumentError(
                    f"the plan was made for a {self.name} whose elements share memory; those of this one do not",
                    field=self.name,
                    value=array.strides,
                    rule="plan_operand",
                    fix="broadcast the array as for planning, or make a plan for this one",
                )
            reach += (n - 1) * step

    def refuse_output(self, target: object) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self.name} does not fit the plan",
            field=self.name,
            value=type(target).__name__,
            rule="plan_operand",
            fix="pass a NumPy array as planned (of a PyTorch tensor on the host: tensor.numpy()), or leave it out",
        )


def _described(spec: Spec) -> str:
    layout = (
        f"packed as {spec.packing}" if spec.packing else f"strides {spec.strides or contiguous_strides(spec.shape)}"
    )
    return f"{spec.dtype.name} of shape {spec.shape}, {layout}"


class Loaded:
    """One execution, ready to be sent: its serialised part, and what to do when its result is there."""

    __slots__ = ("cargo", "chunk", "result", "session", "weight")

    def __init__(self, session: Session, chunk: bytes, cargo: Cargo, result: dict[str, Any]) -> None:
        self.session = session
        self.chunk = chunk
        self.cargo = cargo
        self.result = result
        self.weight = len(chunk) + (cargo.inline_reply_bytes if cargo.replies else 0)
        """Bytes that it takes of a message, there and back together."""


def known(core: Core, session: Session, slot: Slot, value: Any) -> bytes | None:
    """The serialised location of an array that was used before, or ``None``. Raises if it does not fit the plan."""
    entry = core.known_arrays.get(id(value))
    if entry is None or entry.session is not session or entry.alive() is not value or not slot.check(value):
        return None
    return entry.data


def place_slot_input(core: Core, session: Session, cargo: Cargo, slot: Slot, value: Any) -> Flow[bytes]:
    """The serialised location of an input, whose bytes lie as planned: the server reads them with the plan's strides,
    whatever the array's are.
    """
    if isinstance(value, ResidentTensor):
        if value.spec != slot.spec:
            raise InvalidArgumentError(
                f"the plan was made for another {slot.name}: {slot.spec}, not {value.spec}",
                field=slot.name,
                rule="plan_operand",
                fix="make a plan with this tensor",
            )
        cargo.keep.append(value)
        return messages.location_field(value.location().SerializeToString())
    if (tensor := recognise(value, slot.name)) is not None:
        slot.check_tensor(tensor)
        location = yield from place_device(core, session, cargo, tensor, slot.name)
        return messages.location_field(location.SerializeToString())
    array = as_array(value, slot.name)
    if (lies := slot.check(array)) and (known := (yield from by_reference(core, session, array))) is not None:
        cargo.keep.append(array)
        return known
    source, strides = dense(array)
    if array.size and not slot.is_strided(strides):
        if not lies:
            slot.check_copy(array)
        memory = planned_memory(core, session, cargo, slot)
        strided(memory, slot.spec)[...] = array
        if session.shared_memory:
            cargo.staged_bytes += memory.nbytes
            return messages.location_field((yield from locate(core, session, memory)).SerializeToString())
        source = memory
    location = yield from send_copy(core, session, cargo, source)
    return messages.location_field(location.SerializeToString())


def place_slot_output(
    core: Core, session: Session, cargo: Cargo, slot: Slot, target: Any, result: dict[str, Any]
) -> Flow[bytes]:
    """The serialised location of an output. ``result`` gets what the caller will find it in, unless ``collect`` makes
    that of the reply.
    """
    spec = slot.spec
    if isinstance(target, ResidentTensor):
        if target.spec != spec:
            raise slot.refuse_output(target)
        cargo.keep.append(target)
        result[slot.name] = target
        return messages.location_field(target.location().SerializeToString())
    if isinstance(target, Spec) and cargo.tensors and not spec.packing:
        target = yield from empty_like(core, session, cargo.tensors[0], slot.spec)
    if (tensor := recognise_output(target, slot.name)) is not None:
        slot.check_tensor(tensor)
        result[slot.name] = tensor.value
        location = yield from place_device(core, session, cargo, tensor, slot.name, output=True)
        return messages.location_field(location.SerializeToString())
    array: Array | None = None
    if isinstance(target, np.ndarray):
        check_output(target, slot.name)
        if slot.check(target) and (known := (yield from by_reference(core, session, target))) is not None:
            cargo.keep.append(target)
            result[slot.name] = target
            return known
        array = target
    elif not isinstance(target, Spec):
        raise slot.refuse_output(target)
    if spec.packing or not session.shared_memory or not spec.nbytes:
        if array is not None:
            cargo.keep.append(array)
            cargo.staged_bytes += array.nbytes
        cargo.replies[slot.name] = (spec, array)
        return messages.location_field(reply_location(session, spec).SerializeToString())
    memory = planned_memory(core, session, cargo, slot)
    view = strided(memory, spec)
    result[slot.name] = view
    if array is not None:
        cargo.keep.append(array)
        cargo.copies.append((view, array))
        cargo.staged_bytes += array.nbytes
        result[slot.name] = array
    return messages.location_field((yield from locate(core, session, memory)).SerializeToString())


def by_reference(core: Core, session: Session, array: Array) -> Flow[bytes | None]:
    """The location of an array in shared memory, remembered for as long as it lives."""
    if array.size == 0 or (array.ndim and min(array.strides) < 0):
        return None
    place = core.pool.find(address_of(array), span_bytes(array))
    if place is None:
        return None
    region = yield from region_of(core, session, place[0])
    location = tensor_pb2.Location(region=tensor_pb2.RegionSlice(region=region, offset=place[1]))
    data = messages.location_field(location.SerializeToString())
    known_arrays, key = core.known_arrays, id(array)
    alive = weakref.ref(array, lambda _: known_arrays.pop(key, None))
    spec = Spec.of_array(array, "array")
    core.remember(known_arrays, key, KnownArray(alive, session, data, spec, array.strides))
    return data


def planned_memory(core: Core, session: Session, cargo: Cargo, slot: Slot) -> Array:
    """Bytes for a tensor as planned, gaps included, in shared memory if there is any."""
    count = (slot.spec.nbytes,)
    # What travels in a message must not bring along what was in its gaps before.
    memory = core.pool.empty(count, BYTE) if session.shared_memory else np.zeros(count, BYTE)
    cargo.keep.append(memory)
    return memory


def single(result: dict[str, Any]) -> Any:
    """The one output itself, or all by name."""
    return next(iter(result.values())) if len(result) == 1 else result
