"""Memory messages in the core's words: used by the gRPC service and by the local socket."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright_kit.types.errors import InvalidArgumentError, UnsupportedError
from tilewright_proto.v1 import memory_pb2 as pb
from tilewright_server.devices.contract import IPC_KINDS, POOL_KINDS, MemoryHandle
from tilewright_server.memory.buffers import ResidentBuffer
from tilewright_server.session.objects import AnyRegion
from tilewright_server.session.region_sources import AttachedFile, DeviceMemory, MemoryFile, PosixObject, RegionSource

__all__ = ["KINDS", "exported", "region_reply", "region_source"]

KINDS = {
    "cuda_ipc": pb.ExportBufferReply.CUDA_IPC,
    "hip_ipc": pb.ExportBufferReply.HIP_IPC,
    "fd": pb.ExportBufferReply.FILE_DESCRIPTOR,
}


def region_source(request: pb.RegisterRegionRequest, descriptors: Sequence[int] | None = None) -> RegionSource:
    """Source that the request names. ``descriptors`` are those that came with it; None if none can come that way.

    Raises ``InvalidArgumentError`` if they are not as many as the source needs, ``UnsupportedError``.
    """
    kind = request.WhichOneof("source")
    if kind in ("attached", *POOL_KINDS, "device_fd"):
        device_fd = request.device_fd
        fds = _as_many(kind, descriptors, max(1, len(device_fd.part_bytes)) if kind == "device_fd" else 1)
        fd = fds[0]
        if kind == "attached":
            return AttachedFile(fd)
        if kind in POOL_KINDS:
            pool = getattr(request, kind)
            return DeviceMemory(kind, pool.device_uuid, pool.pointer, pool.offset, fd)
        parts = tuple(device_fd.part_bytes)
        return DeviceMemory(
            "fd", device_fd.device_uuid, b"", device_fd.offset, fd, fds=fds if parts else (), part_bytes=parts
        )
    if descriptors:
        raise InvalidArgumentError(
            "a descriptor came with a source that needs none",
            field="source",
            value=kind,
            rule="region_descriptor",
            fix="set attached, cuda_pool, hip_pool or device_fd, or send no descriptor",
        )
    if kind == "memfd":
        return MemoryFile(request.memfd.pid, request.memfd.fd, request.memfd.name)
    if kind == "posix":
        return PosixObject(request.posix.name, request.posix.unlink)
    if kind in IPC_KINDS:
        source = getattr(request, kind)
        return DeviceMemory(kind, source.device_uuid, source.handle, source.offset)
    raise InvalidArgumentError(
        "the region has no source", field="source", rule="region_source", fix="set memfd, posix, cuda_ipc or hip_ipc"
    )


def _as_many(kind: str, descriptors: Sequence[int] | None, count: int) -> tuple[int, ...]:
    if descriptors is None:
        raise UnsupportedError(
            "gRPC carries no descriptors",
            field="source",
            value=kind,
            rule="region_descriptor",
            fix="register it over the local socket, or use memfd, posix, cuda_ipc or hip_ipc",
        )
    if len(descriptors) != count:
        raise InvalidArgumentError(
            f"this source comes with {count} descriptors, not {len(descriptors)}",
            field="source",
            value=kind,
            rule="region_descriptor",
            fix="send one in the same packet (SCM_RIGHTS), or for device_fd as many as there are part_bytes",
        )
    return tuple(descriptors)


def region_reply(region: AnyRegion) -> pb.RegisterRegionReply:
    return pb.RegisterRegionReply(region=region.id, zero_copy=region.zero_copy, device=region.device_id)


def exported(buffer: ResidentBuffer, handle: MemoryHandle) -> pb.ExportBufferReply:
    """The reply for an exported buffer, without its descriptor."""
    return pb.ExportBufferReply(
        kind=KINDS[handle.kind],
        handle=handle.data,
        offset=handle.offset,
        bytes=buffer.size,
        device=buffer.device_id,
        device_uuid=getattr(buffer.device, "uuid", ""),
    )
