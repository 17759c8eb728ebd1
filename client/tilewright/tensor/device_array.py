"""Device memory that the server allocated, as an array of this process."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilewright.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from tilewright.gpu.driver import LEGACY_STREAM, GpuDriver
from tilewright.gpu.registry import KINDS, driver_of
from tilewright.gpu.streams import stream_handle
from tilewright.session.state import Core, Session, uuid_digits
from tilewright.tensor import dlpack
from tilewright.tensor.interop import DeviceTensor
from tilewright.tensor.resident import BufferState, create
from tilewright.tensor.unmapping import unmapper
from tilewright.transport import rpc
from tilewright.transport.rpc import Flow, Rpc, Work
from tilewright.types.dtypes import DTYPES, DTypeLike
from tilewright.types.spec import Array, Spec, contiguous_strides, fresh, same_places
from tilewright_proto.v1 import memory_pb2, tensor_pb2

__all__ = ["DeviceArray", "by_library", "device_empty", "empty_like", "find_mapped", "maker"]

_TORCH_NAMES = {
    DTYPES["fp32"]: "float32",
    DTYPES["fp16"]: "float16",
    DTYPES["bf16"]: "bfloat16",
    DTYPES["fp8"]: "float8_e4m3fn",
    DTYPES["bf8"]: "float8_e5m2",
    DTYPES["int8"]: "int8",
    DTYPES["int32"]: "int32",
}


class DeviceArray:
    """An array in memory of a GPU that the server keeps and this process maps; contiguous, or as ``spec`` says.

    For other libraries by DLPack (``torch.from_dlpack(x)``) and ``__cuda_array_interface__``; ``numpy()`` copies it to
    the host. The memory is given back when the last reference goes.
    """

    def __init__(
        self, state: BufferState, gpu: GpuDriver, ordinal: int, base: int, offset: int, spec: Spec, stream: int
    ) -> None:
        self._state = state
        self._gpu = gpu
        self._ordinal = ordinal
        self._address = base + offset
        self._stream = stream
        self.spec = spec
        unmapper().start()
        self._finalizer = weakref.finalize(self, unmapper().put, gpu, ordinal, base, state)
        self._finalizer.atexit = False
        state.core.maps, state.core.mapped[self._address] = True, self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.spec.dtype

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def device(self) -> str:
        """The server's id of the device."""
        return self._state.device

    def _device_tensor(self) -> DeviceTensor:
        """How this library passes it on: memory that the server knows already."""
        place = self._location(0)
        return DeviceTensor(
            self,
            self._address,
            self._ordinal,
            self.spec,
            self._stream,
            kind=self._gpu.kind,
            location=place,
            array=self,
        )

    def _location(self, offset: int) -> tensor_pb2.Location:
        self._state.check()
        return tensor_pb2.Location(buffer=tensor_pb2.BufferSlice(buffer=self._state.id, offset=offset))

    def covers(self, address: int) -> bool:
        """True if that is an address of its memory."""
        return 0 <= address - self._address < self._state.nbytes

    def show(self, tensor: DeviceTensor) -> None:
        """Note in a tensor of another library, whose address is in this memory, that the server knows it."""
        tensor.location = self._location(tensor.address - self._address)
        tensor.array, tensor.ordinal, tensor.kind = self, self._ordinal, self._gpu.kind

    def move_to(self, stream: int) -> None:
        """From now on it is used on this stream (the driver's handle), which waits for the one before."""
        self._gpu.order(self._ordinal, self._stream, stream)
        self._stream = stream

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        if self.dtype.isbuiltin != 1:
            raise AttributeError(f"__cuda_array_interface__ has no name for {self.dtype.name}: use __dlpack__")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._address, False),
            "version": 3,
            "strides": self._byte_strides(),
            "stream": self._stream,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.ROCM if self._gpu.kind == "hip" else dlpack.CUDA), self._ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """``stream`` waits for what is written to the array (``None``: the legacy default stream, -1: none does)."""
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("a DeviceArray is exported as it is: without a copy, and on its device")
        if stream != -1:
            consumer = LEGACY_STREAM if stream is None else stream_handle(stream)
            self._gpu.order(self._ordinal, self._stream, consumer)
        return dlpack.make_capsule(
            self,
            *self.__dlpack_device__(),
            self._address,
            self.dtype,
            self.shape,
            self.spec.strides or contiguous_strides(self.shape),
            versioned=max_version is not None and max_version[0] >= 1,
        )

    def numpy(self) -> Array:
        """A copy in host memory. Waits for what is written to the array."""
        array = fresh(np.empty, self.spec)
        if array.nbytes:
            self._gpu.read(self._ordinal, array.ctypes.data, self._address, self.nbytes, self._stream)
        return array

    def copy_from(self, source: Any) -> None:
        """Fill it from an array of the host of the same shape and dtype."""
        array = np.asarray(source)
        if array.shape != self.shape or array.dtype != self.dtype:
            raise InvalidArgumentError(
                f"{array.dtype.name} of shape {array.shape} does not fit {self.dtype.name} of shape {self.shape}",
                field="source",
                value=array.shape,
                rule="copy_shape",
                fix="convert and reshape it first",
            )
        if array.nbytes:
            if not same_places(array, self.spec.strides):
                laid_out = fresh(np.zeros, self.spec)
                laid_out[...] = array
                array = laid_out
            self._gpu.write(self._ordinal, self._address, array.ctypes.data, self.nbytes, self._stream)

    def _byte_strides(self) -> tuple[int, ...] | None:
        strides = self.spec.strides
        return None if strides is None else tuple(step * self.dtype.itemsize for step in strides)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype.name}, device={self.device!r})"


def find_mapped(core: Core, address: int) -> DeviceArray | None:
    """The array of the server's memory that an address lies in. (The driver cannot export what it has imported.)"""
    mapped = core.mapped
    if not mapped:
        return None
    found: DeviceArray | None = mapped.get(address)
    if found is not None:
        return found
    # A copy: other threads make arrays meanwhile.
    arrays: list[DeviceArray | None] = [reference() for reference in mapped.valuerefs()]
    return next((array for array in arrays if array is not None and array.covers(address)), None)


def device_empty(
    core: Core, shape: int | tuple[int, ...], dtype: DTypeLike = "fp32", device: str | None = None
) -> Flow[DeviceArray]:
    """An uninitialised array in memory of one of the server's GPUs (the first, if ``device`` is not given), mapped into
    this process, which must use that GPU already. Raises ``NotFoundError``, ``UnsupportedError``, ``UnavailableError``.
    """
    session = core.require()
    spec = Spec.of((shape,) if isinstance(shape, int) else shape, dtype)
    known = [item for item in session.devices if item.kind in KINDS and device in (None, item.id)]
    if not known:
        raise NotFoundError(
            f"the server has no GPU{f' {device}' if device else ''}",
            field="device",
            value=device or "",
            rule="device_known",
            fix="use one of " + (", ".join(item.id for item in session.devices) or "the server's devices"),
        )
    gpu = driver_of(known[0].kind)
    ordinal = yield Work(lambda: _ordinal_of(gpu, known[0].uuid))
    return (yield from _allocate(core, session, known[0].id, gpu, ordinal, spec, LEGACY_STREAM))


def _ordinal_of(gpu: GpuDriver, uuid: str) -> int:
    for ordinal in range(gpu.device_count()):
        if uuid_digits(gpu.label(ordinal)) == uuid_digits(uuid):
            return ordinal
    raise UnsupportedError(
        f"this process does not see GPU {uuid}",
        field="device",
        value=uuid,
        rule="device_visible",
        fix="make it visible to this process (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES)",
    )


def _allocate(
    core: Core, session: Session, device: str, gpu: GpuDriver, ordinal: int, spec: Spec, stream: int
) -> Flow[DeviceArray]:
    state = yield from create(core, max(spec.nbytes, 1), device, exportable=True)
    request = memory_pb2.ExportBufferRequest(session=session.token, buffer=state.id)
    found = yield Rpc(rpc.EXPORT_BUFFER, request, core.timeout, local=session.control is not None)
    reply, fds = found if isinstance(found, tuple) else (found, ())
    for fd in fds:
        os.close(fd)
    if reply.kind not in (memory_pb2.ExportBufferReply.CUDA_IPC, memory_pb2.ExportBufferReply.HIP_IPC):
        raise UnsupportedError(
            "the server exports its buffers in a way that this client cannot map",
            field="device",
            value=device,
            rule="buffer_export",
            fix="update the client, or let PyTorch or CuPy allocate: pass out=",
        )
    base = yield Work(lambda: gpu.open_legacy(ordinal, reply.handle))
    return DeviceArray(state, gpu, ordinal, base, reply.offset, spec, stream)


def empty_like(core: Core, session: Session, like: DeviceTensor, spec: Spec) -> Flow[Any]:
    """A fresh array beside ``like``, laid out as ``spec`` says: by the library that made it, or a ``DeviceArray``."""
    made = by_library(like, spec)
    if made is not None:
        return made
    device = session.gpus.get(uuid_digits(like.gpu.label(like.ordinal)))
    name = device.id if device is not None else ""
    return (yield from _allocate(core, session, name, like.gpu, like.ordinal, spec, like.stream))


def by_library(like: DeviceTensor, spec: Spec) -> Any:
    """A fresh array beside ``like`` by the library that made it; ``None`` if that cannot."""
    make = maker(like, spec)
    return None if make is None else make()


def maker(like: DeviceTensor, spec: Spec) -> Callable[[], Any] | None:
    """Return a maker of fresh arrays beside ``like``, which it does not hold; ``None`` without a library for it."""
    module: Any = sys.modules.get(like.library) if like.library else None
    if like.library == "torch" and module is not None:
        where = {"dtype": getattr(module, _TORCH_NAMES[spec.dtype]), "device": module.device("cuda", like.ordinal)}
        # With strides it takes PyTorch half of the time that it takes without.
        steps = contiguous_strides(spec.shape) if spec.strides is None else spec.strides
        return functools.partial(module.empty_strided, spec.shape, steps, **where)
    if like.library == "cupy" and module is not None:
        return functools.partial(_by_cupy, module, like.ordinal, spec)
    return None


def _by_cupy(module: Any, ordinal: int, spec: Spec) -> Any:
    with contextlib.suppress(TypeError, ValueError), module.cuda.Device(ordinal):  # dtypes that it has not
        if spec.strides is None:
            return module.empty(spec.shape, dtype=spec.dtype)
        memory = module.empty((max(spec.nbytes, 1),), dtype="uint8").data
        steps = tuple(step * spec.dtype.itemsize for step in spec.strides)
        return module.ndarray(spec.shape, spec.dtype, memory, steps)
    return None
