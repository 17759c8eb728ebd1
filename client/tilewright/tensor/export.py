"""Device memory of this process as the server's regions: each allocation is exported once and remembered until another
one takes its place.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tilewright.errors import DeviceError, InvalidArgumentError, TilewrightError, UnsupportedError
from tilewright.gpu.driver import GpuDriver, Pointer
from tilewright.session.state import Core, Session, uuid_digits
from tilewright.tensor.interop import UNKNOWN, DeviceTensor
from tilewright.transport import frames, rpc
from tilewright.transport.rpc import Flow, Rpc, Work
from tilewright_proto.v1 import memory_pb2

__all__ = ["Exported", "device_for", "device_of", "device_region", "forget_exports"]


class Exported(NamedTuple):
    """An allocation that the server knows."""

    key: tuple[int, int]
    """Base and size."""
    identity: tuple[tuple[int, int], ...]
    """Identity of each part; most allocations have one."""
    region: int
    gpu: GpuDriver
    ordinal: int
    simple: bool
    """True if one call of the driver tells that it still lives."""


def device_of(session: Session, gpu: GpuDriver, ordinal: int, field: str) -> str:
    """The server's id of a device of this process. Raises ``UnsupportedError`` if the server has not opened it."""
    label = gpu.label(ordinal)
    found = session.gpus.get(uuid_digits(label))
    if found is None:
        raise UnsupportedError(
            f"{field} is on GPU {label}, which this server does not run",
            field=field,
            value=label,
            rule="device_visible",
            fix="move it to a device of the server (client.session.devices), or make that device visible to the server",
        )
    return found.id


def device_for(session: Session, values: Mapping[str, Any]) -> str | None:
    """The server's id of the device that holds the first device tensor among ``values``; ``None`` without one."""
    for name, value in values.items():
        if isinstance(value, DeviceTensor) and value.spec.nbytes:
            if value.ordinal == UNKNOWN:
                value.ordinal = value.gpu.pointer(value.address, name).ordinal
            return device_of(session, value.gpu, value.ordinal, name)
    return None


def device_region(core: Core, session: Session, tensor: DeviceTensor, field: str) -> Flow[tuple[int, int]]:
    """The server's region for the allocation that holds ``tensor``, registering it on first use, and the tensor's
    offset in it. Raises ``InvalidArgumentError`` for memory that is none, ``UnsupportedError`` for memory that cannot
    be shared.
    """
    gpu = tensor.gpu
    place = gpu.pointer(tensor.address, field)
    tensor.ordinal = place.ordinal
    offset = tensor.address - place.base
    parts = (place,) if offset + tensor.spec.nbytes <= place.size else _parts(gpu, tensor, place, field)
    key = (place.base, sum(part.size for part in parts))
    identity = tuple(part.identity for part in parts)
    known = session.exports.get(key)
    if known is not None:
        if known.identity == identity:
            tensor.exported = known
            return known.region, offset
        _forget(core, session, key)
    if not session.shared_memory:
        raise UnsupportedError(
            f"{field} is in memory of a GPU of this machine, and the server was reached over TCP",
            field=field,
            rule="device_memory_local",
            fix="connect to a server on this machine over its Unix socket, or pass NumPy arrays",
        )
    device_of(session, gpu, place.ordinal, field)
    yield Work(lambda: _sweep(core, session))
    region = yield from _register(core, session, gpu, tensor, parts, field)
    made = Exported(key, identity, region, gpu, place.ordinal, place.legacy)
    winner = tensor.exported = session.exports.setdefault(key, made)
    if winner.region != region:  # another thread was first
        core.release_region(session, region)
    return winner.region, offset


def _register(
    core: Core, session: Session, gpu: GpuDriver, tensor: DeviceTensor, parts: Sequence[Pointer], field: str
) -> Flow[int]:
    place, size = parts[0], sum(part.size for part in parts)
    uuid = session.gpus[uuid_digits(gpu.label(place.ordinal))].uuid
    request = memory_pb2.RegisterRegionRequest(session=session.token, bytes=size)
    local = session.control is not None
    if place.legacy:
        handle = yield Work(lambda: gpu.export_legacy(place.ordinal, place.base))
        source = memory_pb2.GpuIpcSource(handle=handle, device_uuid=uuid, pid=os.getpid())
        getattr(request, gpu.ipc_source).CopyFrom(source)
        reply = yield Rpc(rpc.REGISTER, request, core.timeout, local=local)
        return int(reply.region)
    if not place.descriptors:
        raise UnsupportedError(
            f"{field} is in memory that was not made to be shared with other processes",
            field=field,
            value=hex(tensor.address),
            rule="device_memory_shareable",
            fix="allocate it with cudaMalloc or hipMalloc (as PyTorch does by default), or so that it has descriptors",
        )
    if not local:
        raise UnsupportedError(
            f"{field} is in memory that only descriptors can share, and this server has no local socket",
            field=field,
            rule="local_socket",
            fix="turn the server's local socket on, or allocate with cudaMalloc or hipMalloc",
        )
    with contextlib.ExitStack() as exported:
        fds: list[int] = []
        if place.pool:
            fd, pointer = yield Work(lambda: gpu.export_pool(place.ordinal, place.pool, place.base))
            fds.append(fd)
            exported.callback(os.close, fd)
            pool = memory_pb2.GpuPoolSource(pointer=pointer, device_uuid=uuid)
            getattr(request, gpu.pool_source).CopyFrom(pool)
        else:
            for part in parts:
                fds.append((yield Work(partial(gpu.export_mapped, place.ordinal, part.base))))
                exported.callback(os.close, fds[-1])
            sizes = [part.size for part in parts] if len(parts) > 1 else ()
            request.device_fd.CopyFrom(memory_pb2.DeviceFdSource(device_uuid=uuid, part_bytes=sizes))
        reply = yield Rpc(rpc.REGISTER, request, core.timeout, local=True, fds=tuple(fds))
    return int(reply.region)


def _parts(gpu: GpuDriver, tensor: DeviceTensor, place: Pointer, field: str) -> tuple[Pointer, ...]:
    """The allocations, mapped one behind the other, that a tensor lies in. Raises ``InvalidArgumentError`` if it
    reaches beyond them, or they are too many."""
    parts, end = [place], place.base + place.size
    while end < tensor.address + tensor.spec.nbytes:
        part = None
        if not (place.legacy or place.pool):
            with contextlib.suppress(InvalidArgumentError, DeviceError):
                part = gpu.pointer(end, field)
        if part is None or part.base != end or part.legacy or part.pool or part.ordinal != place.ordinal:
            raise InvalidArgumentError(
                f"{field} reaches beyond its allocation of {end - place.base} bytes",
                field=field,
                value=tensor.spec.nbytes,
                rule="region_bounds",
                fix="correct its shape or strides",
            )
        parts.append(part)
        end += part.size
        if len(parts) > frames.MAX_PARTS:
            raise InvalidArgumentError(
                f"{field} lies across more than {frames.MAX_PARTS} parts of memory that were mapped one by one",
                field=field,
                value=tensor.spec.nbytes,
                rule="device_memory_parts",
                fix="copy it to memory of one allocation; of PyTorch, turn expandable_segments off for such tensors",
            )
    return tuple(parts)


def _sweep(core: Core, session: Session) -> None:
    """Forget allocations that are gone, so that the server's mappings do not keep their memory."""
    for key, known in list(session.exports.items()):
        try:
            gone = _identity(known.gpu, key) != known.identity
        except TilewrightError:
            gone = True
        if gone:
            _forget(core, session, key)


def _identity(gpu: GpuDriver, key: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Identity of the memory at an ``Exported``'s base. Raises ``InvalidArgumentError`` if there is none."""
    at, size = key
    end, found = at + size, []
    while at < end:
        part = gpu.pointer(at)
        found.append(part.identity)
        at = part.base + part.size
    return tuple(found)


def _forget(core: Core, session: Session, key: tuple[int, int]) -> None:
    known = session.exports.pop(key, None)
    if known is not None:
        core.release_region(session, known.region)


def forget_exports(core: Core) -> Flow[None]:
    """Have the server unmap all device memory of this process, and wait for it. What is used again is exported again.

    Call it before memory is to be really freed, for example before ``torch.cuda.empty_cache()``: memory that another
    process maps is not given back to the device. Plans stay; what was bound to such memory is bound again.
    """
    session = core.require()
    session.epoch += 1
    while session.exports:
        _, known = session.exports.popitem()
        request = memory_pb2.UnregisterRegionRequest(session=session.token, region=known.region)
        yield Rpc(rpc.UNREGISTER, request, core.timeout)
