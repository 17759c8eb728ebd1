"""Where a call's operands are: by reference where that can be, else inside the message or staged through shared
memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewright.errors import InternalError, InvalidArgumentError, UnsupportedError
from tilewright.session.state import Core, Session
from tilewright.tensor import resident
from tilewright.tensor.device_array import find_mapped
from tilewright.tensor.export import device_region
from tilewright.tensor.interop import DeviceTensor, busy_streams
from tilewright.tensor.resident import BufferState, PackedTensor
from tilewright.tensor.segments import region_of
from tilewright.transport.rpc import Flow
from tilewright.types.addresses import address_of
from tilewright.types.spec import Array, Spec, as_array, fresh, span_bytes, strided
from tilewright_proto.v1 import dispatch_pb2, tensor_pb2

__all__ = [
    "INLINE_BYTES",
    "Cargo",
    "attributes_to_wire",
    "check_output",
    "collect",
    "locate",
    "place_device",
    "reply_location",
    "send_copy",
]

INLINE_BYTES = 64 << 10
"""Inputs up to this size go inside the message; above it one copy into shared memory is faster. Without shared memory
the server's limit counts.
"""


class Cargo:
    """Attachments of one call besides its message: memory to keep alive, results to copy back, bytes that were
    copied."""

    __slots__ = ("copies", "in_place", "keep", "replies", "room", "staged_bytes", "tensors")

    def __init__(self, session: Session) -> None:
        self.room = session.message_room
        self.keep: list[object] = []
        self.copies: list[tuple[Array, Array]] = []
        """(temporary, caller's array): copy when the call is done."""
        self.replies: dict[str, tuple[Spec, Array | None]] = {}
        """Outputs that come back in the reply or in a buffer, and the array to put them into."""
        self.staged_bytes = 0
        self.tensors: list[DeviceTensor] = []
        """Operands in device memory of this process."""
        self.in_place = True
        """True if all operands are where a device can use them, so that the call can be bound."""

    def fence(self) -> None:
        """Wait, on the host, until the operands in device memory have what was written to them."""
        for gpu, ordinal, stream in busy_streams(self.tensors):
            gpu.synchronize(ordinal, stream)

    @property
    def inline_reply_bytes(self) -> int:
        """Bytes of the outputs that may come back inside the reply."""
        return sum(0 if spec.packing else spec.nbytes for spec, _ in self.replies.values())

    def copy_back(self) -> None:
        for source, target in self.copies:
            target[...] = source


def place_device(
    core: Core, session: Session, cargo: Cargo, tensor: DeviceTensor, field: str, *, output: bool = False
) -> Flow[tensor_pb2.Location]:
    """Location of a tensor in device memory of this process."""
    cargo.keep.append(tensor)
    if not tensor.spec.nbytes:
        cargo.in_place = False
        if output:
            return tensor_pb2.Location(return_inline=tensor_pb2.ReturnInline())
        return tensor_pb2.Location(inline=b"")
    if tensor.location is None and (array := find_mapped(core, tensor.address)) is not None:
        array.show(tensor)
    if tensor.location is None:
        region, offset = yield from device_region(core, session, tensor, field)
        location = _region(region, offset)
    else:
        location = tensor.location
    other = cargo.tensors[0] if cargo.tensors else tensor
    if (other.kind, other.ordinal) != (tensor.kind, tensor.ordinal):
        raise InvalidArgumentError(
            f"{field} is on {tensor.gpu.title} device {tensor.ordinal}, and another operand on {other.gpu.title} "
            f"device {other.ordinal}",
            field=field,
            value=tensor.ordinal,
            rule="one_device",
            fix="move them to one device",
        )
    cargo.tensors.append(tensor)
    return location


def send_copy(core: Core, session: Session, cargo: Cargo, source: Array) -> Flow[tensor_pb2.Location]:
    """Location of a copy of ``source`` in C order, without gaps."""
    cargo.in_place = False
    cargo.staged_bytes += source.nbytes
    limit = session.inline_limit
    if session.shared_memory:
        limit = min(limit, INLINE_BYTES)
    if source.nbytes <= min(limit, cargo.room):
        cargo.room -= source.nbytes
        return tensor_pb2.Location(inline=source.tobytes())
    if session.shared_memory:
        staged = core.pool.empty(source.shape, source.dtype)
        staged[...] = source
        cargo.keep.append(staged)
        return (yield from locate(core, session, staged))
    buffer = yield from resident.create(core, source.nbytes)
    cargo.keep.append(buffer)
    yield from resident.write(buffer, source)
    return tensor_pb2.Location(buffer=tensor_pb2.BufferSlice(buffer=buffer.id))


def locate(core: Core, session: Session, array: Array) -> Flow[tensor_pb2.Location]:
    """Location of an array that this pool made."""
    place = core.pool.find(address_of(array), span_bytes(array))
    if place is None:
        raise UnsupportedError("the client was closed during the call", field="client", rule="client_open")
    return _region((yield from region_of(core, session, place[0])), place[1])


def collect(core: Core, session: Session, cargo: Cargo, outputs: Any) -> Flow[dict[str, Any]]:
    """Take results out of a reply (inline bytes, resident buffers) and copy temporaries to where the caller wants
    them.
    """
    cargo.copy_back()
    found: dict[str, Any] = {}
    for output in outputs:
        if output.name not in cargo.replies:
            continue
        spec, target = cargo.replies[output.name]
        if not output.buffer:
            found[output.name] = take_inline(output, spec, target)
            continue
        # The reply's spec is the truth: a packed format may have been chosen while planning.
        final = Spec.of_wire(output.spec) if output.HasField("spec") else spec
        buffer = BufferState(core, session, output.buffer, final.nbytes, session.device)
        if final.packing:
            found[output.name] = PackedTensor(buffer, final)
        else:
            array = fresh(np.empty, final) if target is None else target
            if final.strides is None and array.flags.c_contiguous:
                yield from resident.read(buffer, out=array)
            else:
                array[...] = strided((yield from resident.read(buffer, final.nbytes)), final)
            found[output.name] = array
    return found


def take_inline(output: dispatch_pb2.OutputTensor, spec: Spec, target: Array | None) -> Array:
    """The array that came inside a reply, without gaps, copied to ``target`` or to where ``spec`` says."""
    flat, expected = np.frombuffer(output.inline, np.uint8), math.prod(spec.shape) * spec.dtype.itemsize
    if flat.size != expected:
        raise InternalError(
            f"the server sent {flat.size} bytes for {output.name}, which has {expected}",
            field=output.name,
            rule="reply_size",
        )
    array: Array = flat.view(spec.dtype).reshape(spec.shape)
    if target is None:
        target = fresh(np.empty, spec)
    target[...] = array
    return target


def attributes_to_wire(attributes: Mapping[str, Any]) -> dict[str, tensor_pb2.Attribute]:
    """Attributes in the protocol's types; ``None`` values are left out. Raises ``InvalidArgumentError`` for what it
    has no type for.
    """
    return {name: _attribute(name, value) for name, value in attributes.items() if value is not None}


def _attribute(name: str, value: Any) -> tensor_pb2.Attribute:
    if isinstance(value, np.generic):
        value = value.item()
    try:
        if isinstance(value, bool):
            return tensor_pb2.Attribute(flag=value)
        if isinstance(value, int):
            return tensor_pb2.Attribute(integer=value)
        if isinstance(value, float):
            return tensor_pb2.Attribute(number=value)
        if isinstance(value, str):
            return tensor_pb2.Attribute(text=value)
        if isinstance(value, (tuple, list)):
            items = list(value)
            if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
                return tensor_pb2.Attribute(integers=tensor_pb2.Attribute.Ints(values=items))
            if all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in items):
                return tensor_pb2.Attribute(numbers=tensor_pb2.Attribute.Floats(values=items))
            if all(isinstance(item, str) for item in items):
                return tensor_pb2.Attribute(texts=tensor_pb2.Attribute.Strings(values=items))
    except (ValueError, OverflowError) as error:
        raise _bad_attribute(name, value, str(error)) from None
    raise _bad_attribute(name, value, f"it is of type {type(value).__name__}")


def _bad_attribute(name: str, value: object, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"attribute {name} cannot be sent: {reason}",
        field=f"attributes.{name}",
        value=value,
        rule="attribute_type",
        fix="give a bool, a 64-bit int, a float, a str, or a list of one of the last three",
    )


def check_output(value: Any, name: str) -> None:
    if not isinstance(value, np.ndarray):
        raise InvalidArgumentError(
            f"{name} is not a numpy.ndarray",
            field=name,
            value=type(value).__name__,
            rule="output_type",
            fix="pass an array to write into, or leave it out",
        )
    as_array(value, name)
    if not value.flags.writeable:
        raise InvalidArgumentError(
            f"{name} is read-only", field=name, value=value.shape, rule="output_writable", fix="pass a writable array"
        )


def _region(region: int, offset: int) -> tensor_pb2.Location:
    return tensor_pb2.Location(region=tensor_pb2.RegionSlice(region=region, offset=offset))


def reply_location(session: Session, spec: Spec) -> tensor_pb2.Location:
    """Where an output goes that the reply is to bring: into it, or into a buffer that is then read."""
    if spec.packing or spec.nbytes > session.inline_limit:
        return tensor_pb2.Location(allocate=tensor_pb2.AllocateBuffer())
    return tensor_pb2.Location(return_inline=tensor_pb2.ReturnInline())
