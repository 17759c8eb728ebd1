"""Memory that the server keeps for a session: buffers, and tensors that live in them (packed weights among them)."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from tilewright.errors import InvalidArgumentError
from tilewright.session.state import Core, Session
from tilewright.transport import rpc
from tilewright.transport.rpc import Flow, Rpc
from tilewright.types.arguments import check_name
from tilewright.types.dtypes import DTypeLike
from tilewright.types.spec import MAX_BYTES, Array, Spec
from tilewright_proto.v1 import memory_pb2, tensor_pb2

__all__ = ["BufferState", "PackedTensor", "ResidentTensor", "create", "free", "read", "write"]

CHUNK = 1 << 20
"""Bytes of one message when a buffer is filled or read without shared memory: larger ones are slower."""


class BufferState:
    """A buffer's identity. Freed on the server when the last reference goes."""

    def __init__(self, core: Core, session: Session, buffer: int, nbytes: int, device: str) -> None:
        self.core = core
        self.session = session
        self.id = buffer
        self.nbytes = nbytes
        self.device = device
        self._finalizer = weakref.finalize(self, core.release_buffer, session, buffer)
        self._finalizer.atexit = False

    @property
    def freed(self) -> bool:
        return not self._finalizer.alive

    def check(self) -> None:
        """Raise unless the buffer can be used now."""
        if self.freed:
            raise InvalidArgumentError("the buffer was freed", field="buffer", value=self.id, rule="buffer_alive")
        self.core.own(self.session, "buffer")

    def release(self) -> None:
        """Free it with the next call to the server. Idempotent."""
        self._finalizer()

    def disown(self) -> bool:
        """Leave freeing to the caller; False if it was freed already."""
        return self._finalizer.detach() is not None


class ResidentTensor:
    """A tensor in a resident buffer; usable as an operand wherever an array is."""

    def __init__(self, state: BufferState, spec: Spec, offset: int = 0) -> None:
        if offset < 0 or offset + spec.nbytes > state.nbytes:
            raise InvalidArgumentError(
                f"{spec.nbytes} bytes at {offset} do not fit a buffer of {state.nbytes}",
                field="offset",
                value=offset,
                rule="buffer_bounds",
                fix="make the buffer larger, or the tensor smaller",
            )
        self._state = state
        self.spec = spec
        self.offset = offset

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.spec.dtype

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    def location(self) -> tensor_pb2.Location:
        self._state.check()
        return tensor_pb2.Location(buffer=tensor_pb2.BufferSlice(buffer=self._state.id, offset=self.offset))

    def close(self) -> None:
        """Free the buffer with the next call to the server. Also happens when the last reference goes. Idempotent."""
        self._state.release()

    def __repr__(self) -> str:
        packing = f", packing={self.spec.packing!r}" if self.spec.packing else ""
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype.name}{packing})"


class PackedTensor(ResidentTensor):
    """A matrix in the order that kernels read fastest, packed once and kept by the server. Made by ``pack_b``."""

    @property
    def packing(self) -> str:
        """Name of the packed format."""
        return self.spec.packing


def create(core: Core, nbytes: int, device: str | None = None, *, exportable: bool = False) -> Flow[BufferState]:
    """Allocate ``nbytes`` on the server, uninitialised memory of the session. ``exportable``: this process maps it."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 < nbytes <= MAX_BYTES:
        raise InvalidArgumentError(
            f"a buffer has a positive number of bytes, at most {MAX_BYTES}",
            field="nbytes",
            value=nbytes,
            rule="size",
            fix="give an int in that range",
        )
    check_name("device", device)
    session = core.require()
    request = memory_pb2.CreateBufferRequest(
        session=session.token, bytes=nbytes, device=device or "", exportable=exportable
    )
    reply = yield Rpc(rpc.CREATE_BUFFER, request, core.timeout)
    return BufferState(core, session, reply.buffer, nbytes, device or session.device)


def write(state: BufferState, data: Any, offset: int = 0) -> Flow[None]:
    """Copy ``data`` (an array or anything with a buffer, in C order) into the buffer at byte ``offset``."""
    flat = _flat(data)
    _bounds(state, offset, flat.size)
    token, core = state.session.token, state.core
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        request = memory_pb2.WriteBufferRequest(
            session=token, buffer=state.id, offset=offset + start, data=part.tobytes(), bytes=part.size
        )
        yield Rpc(rpc.WRITE_BUFFER, request, core.timeout)


def read(state: BufferState, nbytes: int | None = None, offset: int = 0, *, out: Array | None = None) -> Flow[Array]:
    """Copy bytes out of the buffer, as ``uint8``, or into the C-contiguous array ``out``, whose size then says how
    many.
    """
    if out is None:
        flat = np.empty(state.nbytes - offset if nbytes is None else nbytes, np.uint8)
    else:
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise InvalidArgumentError(
                "out must be writable and C-contiguous", field="out", value=out.shape, rule="output_layout"
            )
        flat = out.reshape(-1).view(np.uint8)
    _bounds(state, offset, flat.size)
    token, core = state.session.token, state.core
    for start in range(0, flat.size, CHUNK):
        count = min(CHUNK, flat.size - start)
        request = memory_pb2.ReadBufferRequest(session=token, buffer=state.id, offset=offset + start, bytes=count)
        reply = yield Rpc(rpc.READ_BUFFER, request, core.timeout)
        flat[start : start + count] = np.frombuffer(reply.data, np.uint8)
    return flat if out is None else out


def free(state: BufferState) -> Flow[None]:
    """Free the buffer now and wait for it. Idempotent."""
    if state.freed:
        return
    state.core.own(state.session, "buffer")
    if state.disown():
        request = memory_pb2.FreeBufferRequest(session=state.session.token, buffer=state.id)
        yield Rpc(rpc.FREE_BUFFER, request, state.core.timeout)


def tensor(state: BufferState, shape: tuple[int, ...], dtype: DTypeLike, offset: int = 0) -> ResidentTensor:
    """The buffer's bytes from ``offset`` as a contiguous tensor."""
    return ResidentTensor(state, Spec.of(shape, dtype), offset)


def _flat(data: Any) -> Array:
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def _bounds(state: BufferState, offset: int, nbytes: int) -> None:
    state.check()
    if offset < 0 or nbytes < 0 or offset + nbytes > state.nbytes:
        raise InvalidArgumentError(
            f"{nbytes} bytes at {offset} reach outside a buffer of {state.nbytes}",
            field="offset",
            value=offset,
            rule="buffer_bounds",
            fix="correct the offset or the size",
        )
