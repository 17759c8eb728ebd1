"""Arrays in device memory, whoever made them: PyTorch, CuPy, JAX, Numba, anything that speaks DLPack or
``__cuda_array_interface__``. None of these libraries is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from tilewright.errors import InvalidArgumentError, UnsupportedError
from tilewright.gpu.driver import LEGACY_STREAM, GpuDriver
from tilewright.gpu.registry import driver_of, kind_of_address
from tilewright.gpu.streams import current_stream
from tilewright.tensor import dlpack
from tilewright.tensor.resident import PackedTensor, ResidentTensor
from tilewright.types.dtypes import DTYPES, element_type
from tilewright.types.spec import MAX_RANK, Spec, contiguous_strides
from tilewright_proto.v1 import tensor_pb2

__all__ = ["UNKNOWN", "DeviceTensor", "alignment", "all_recognised", "busy_streams", "recognise", "recognise_output"]

UNKNOWN = -1
_HOST = frozenset({np.ndarray, float, int, bool, list, tuple, type(None), Spec, ResidentTensor, PackedTensor})
"""Types that are no device arrays, for a quick answer."""
_TORCH_DTYPES = {
    "torch.float32": DTYPES["fp32"],
    "torch.float16": DTYPES["fp16"],
    "torch.bfloat16": DTYPES["bf16"],
    "torch.float8_e4m3fn": DTYPES["fp8"],
    "torch.float8_e5m2": DTYPES["bf8"],
    "torch.int8": DTYPES["int8"],
    "torch.int32": DTYPES["int32"],
}
_seen_dtypes: dict[Any, np.dtype[Any]] = {}
"""PyTorch's own objects for these, as they come along: their names are slow to make."""
_KINDS = {dlpack.CUDA: "cuda", dlpack.ROCM: "hip"}
"""By DLPack's type of the device, whose memory can be shared."""
_HIP_MODULES = frozenset({"hip", "rocm"})
_ALIGNED = 16
"""Bytes: what kernels take for granted unless they are told otherwise."""


class DeviceTensor:
    """A tensor in device memory, as it was given."""

    __slots__ = (
        "address",
        "array",
        "exported",
        "kind",
        "library",
        "location",
        "ordinal",
        "owner",
        "read_only",
        "spec",
        "stream",
        "value",
    )

    def __init__(
        self,
        value: Any,
        address: int,
        ordinal: int,
        spec: Spec,
        stream: int,
        *,
        kind: str = "cuda",
        owner: object = None,
        read_only: bool = False,
        library: str = "",
        location: tensor_pb2.Location | None = None,
        array: Any = None,
    ) -> None:
        self.value = value
        """The caller's object, which owns the memory."""
        self.owner = owner
        """Objects that must live as long."""
        self.address = address
        self.ordinal = ordinal
        """Ordinal of the device in this process; ``UNKNOWN`` if only the driver can tell."""
        self.spec = spec
        self.kind = kind
        """Kind of the device, as the server calls it: ``cuda``, ``hip``; empty if only the drivers can tell."""
        self.stream = stream
        """Work on this stream sees the tensor's contents."""
        self.read_only = read_only
        self.library = library
        """Library that made it, if it can make more: ``torch``, ``cupy``, or nothing."""
        self.location = location
        """Where it is on the server, if it is the server's memory."""
        self.array = array
        """The ``DeviceArray`` that has that memory: the value itself, or what another library's array is a view of."""
        self.exported: Any = None
        """The allocation that it is in, once the server knows that."""

    @property
    def gpu(self) -> GpuDriver:
        """The driver of its device. Raises ``UnavailableError`` where there is none."""
        if not self.kind:
            self.kind = kind_of_address(self.address)
        return driver_of(self.kind)


def recognise(value: Any, field: str) -> DeviceTensor | None:
    """The device tensor that ``value`` is, or ``None`` for everything that is not in device memory.

    Raises ``InvalidArgumentError`` for one that cannot be used, ``UnsupportedError`` for memory of other kinds of
    devices.
    """
    kind = type(value)
    if kind is DeviceTensor:
        found: DeviceTensor = value
        return found
    if kind in _HOST or isinstance(value, (np.ndarray, np.generic)):
        return None
    torch: Any = sys.modules.get("torch")
    tensors: Any = getattr(torch, "Tensor", ())
    if isinstance(value, tensors):
        tensor: Any = value
        return _of_torch(torch, tensor, field) if tensor.device.type != "cpu" else None
    if hasattr(kind, "_device_tensor"):
        return cast(DeviceTensor, value._device_tensor())
    library = kind.__module__.partition(".")[0]
    library = library if library == "cupy" else ""
    device = _dlpack_device(value)
    if device is None:
        interface = getattr(value, "__cuda_array_interface__", None)
        return _of_interface(value, interface, field, library) if interface is not None else None
    if device[0] == dlpack.CPU:
        return None
    if device[0] not in _KINDS:
        if hasattr(value, "__array_interface__"):  # readable by the host, whatever else it is
            return None
        raise _other_memory(device[0], field)
    return _of_dlpack(value, device[1], _KINDS[device[0]], field, library)


def recognise_output(value: Any, field: str) -> DeviceTensor | None:
    """``recognise``, for what is to be written in place."""
    tensor = recognise(value, field)
    if tensor is not None and tensor.read_only:
        raise InvalidArgumentError(
            f"{field} is read-only",
            field=field,
            value=tensor.spec.shape,
            rule="output_writable",
            fix="pass a writable array, or leave it out",
        )
    return tensor


def alignment(values: Iterable[Any]) -> int | None:
    """The power of two that all addresses of device tensors among ``values`` are multiples of, if it is less than what
    kernels take for granted.
    """
    joint = 0
    for value in values:
        if isinstance(value, DeviceTensor) and value.spec.nbytes:
            joint |= value.address
    least = joint & -joint
    return least if 0 < least < _ALIGNED else None


def busy_streams(tensors: Iterable[DeviceTensor]) -> set[tuple[GpuDriver, int, int]]:
    """(driver, device, stream) of all work that tensors may wait for: where they were ready, and what is current."""
    found = set()
    for tensor in tensors:
        found.add((tensor.gpu, tensor.ordinal, tensor.stream))
        if tensor.library:
            found.add((tensor.gpu, tensor.ordinal, current_stream(tensor.library, tensor.ordinal)))
    return found


def all_recognised(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with every device array in it as a ``DeviceTensor``."""
    return {name: recognise(value, name) or value for name, value in values.items()}


# ---- PyTorch, by its attributes: the only way to say all of its dtypes, and the fastest ----


def _of_torch(torch: Any, tensor: Any, field: str) -> DeviceTensor:
    place = tensor.device
    if place.type != "cuda":  # as builds for ROCm call theirs, too
        raise UnsupportedError(
            f"{field} is on a device of kind {place.type!r}",
            field=field,
            value=str(place),
            rule="device_kind",
            fix="move it to a GPU, or to the CPU",
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgumentError(
            f"{field} requires gradients, which are not computed here",
            field=field,
            value=tuple(tensor.shape),
            rule="autograd",
            fix="call in torch.no_grad(), or pass tensor.detach()",
        )
    if tensor.layout is not torch.strided or tensor.is_neg():
        raise InvalidArgumentError(
            f"{field} is no plain strided tensor",
            field=field,
            value=str(tensor.layout),
            rule="tensor_layout",
            fix="pass tensor.to_dense().resolve_neg()",
        )
    dtype = _seen_dtypes.get(tensor.dtype)
    if dtype is None:
        dtype = _TORCH_DTYPES.get(str(tensor.dtype))
        if dtype is None:
            raise _bad_dtype(str(tensor.dtype), field)
        _seen_dtypes[tensor.dtype] = dtype
    ordinal = place.index
    spec = _spec(tuple(tensor.shape), dtype, tensor.stride(), field)
    stream, kind = current_stream("torch", ordinal), "hip" if getattr(torch.version, "hip", None) else "cuda"
    return DeviceTensor(tensor, tensor.data_ptr(), ordinal, spec, stream, kind=kind, library="torch")


# ---- DLPack ----


def _dlpack_device(value: Any) -> tuple[int, int] | None:
    ask = getattr(value, "__dlpack_device__", None)
    if ask is None or not hasattr(value, "__dlpack__"):
        return None
    try:
        kind, ordinal = ask()
    except Exception:  # spread over devices, without memory yet, ...: NumPy may know what to do
        return None
    return int(kind), int(ordinal)


def _of_dlpack(value: Any, ordinal: int, kind: str, field: str, library: str) -> DeviceTensor:
    stream = current_stream(library, ordinal)
    # The array API standard: of ROCm, 0 is the default stream, and 1 is none.
    named = 0 if kind == "hip" and stream == LEGACY_STREAM else stream
    try:
        try:
            capsule = value.__dlpack__(stream=named, max_version=dlpack.VERSION)
        except TypeError:  # a producer from before versions
            capsule = value.__dlpack__(stream=named)
    except Exception as error:
        raise InvalidArgumentError(
            f"{field} cannot be exported: {error}",
            field=field,
            value=type(value).__name__,
            rule="dlpack_export",
            fix="pass a plain array of one device",
        ) from error
    tensor = dlpack.take(capsule, field)
    if _KINDS.get(tensor.kind) != kind:
        raise _other_memory(tensor.kind, field)
    return DeviceTensor(
        value,
        tensor.address,
        tensor.ordinal,
        _spec(tensor.shape, tensor.dtype, tensor.strides, field),
        stream,
        kind=kind,
        owner=tensor.owner,
        # What is written to a copy is lost.
        read_only=bool(tensor.flags & (dlpack.READ_ONLY | dlpack.COPIED)),
        library=library,
    )


def _other_memory(kind: int, field: str) -> UnsupportedError:
    names = {
        dlpack.CUDA_HOST: "page-locked memory of the host",
        dlpack.CUDA_MANAGED: "managed memory",
        dlpack.ROCM_HOST: "page-locked memory of the host",
    }
    return UnsupportedError(
        f"{field} is in {names.get(kind, f'memory of DLPack device type {kind}')}, which cannot be shared",
        field=field,
        value=kind,
        rule="device_kind",
        fix="copy it to memory of a GPU, or pass a NumPy array",
    )


# ---- the CUDA array interface ----


def _of_interface(value: Any, interface: Mapping[str, Any], field: str, library: str) -> DeviceTensor:
    version = interface.get("version", 0)
    if version not in (2, 3):
        raise _bad_interface(field, f"version {version}", "use a library that offers version 2 or 3")
    if interface.get("mask") is not None:
        raise _bad_interface(field, "a mask", "pass an array without one")
    shape = tuple(interface["shape"])
    try:
        dtype = np.dtype(interface["typestr"])
    except TypeError:
        raise _bad_dtype(interface["typestr"], field) from None
    if dtype.kind == "V":
        raise InvalidArgumentError(
            f"{field} does not say what its elements of {dtype.itemsize} bytes are",
            field=field,
            value=interface["typestr"],
            rule="dtype_known",
            fix="pass an object with __dlpack__, which has names for bfloat16 and float8",
        )
    steps = interface.get("strides")
    if steps is not None:
        if any(step % dtype.itemsize for n, step in zip(shape, steps, strict=True) if n > 1):
            raise _bad_interface(field, f"strides of {tuple(steps)} bytes", "pass a copy")
        steps = [step // dtype.itemsize for step in steps]
    kind = _kind_of(value, library)
    stream = interface.get("stream") if version == 3 else None
    if stream == 0 and kind == "hip":  # the default stream; to CUDA it would say nothing
        stream = LEGACY_STREAM
    if stream is not None and (not isinstance(stream, int) or stream <= 0):
        raise _bad_interface(field, f"stream {stream!r}", "give the legacy default stream as 1, others by their handle")
    address, read_only = interface["data"]
    return DeviceTensor(
        value,
        int(address or 0),
        UNKNOWN,
        _spec(shape, dtype, steps, field),
        stream if stream is not None else current_stream(library, UNKNOWN),
        kind=kind,
        read_only=bool(read_only),
        library=library,
    )


def _kind_of(value: Any, library: str) -> str:
    """Owner of the memory; None if that is unknown."""
    module: Any = sys.modules.get(library) if library else None
    if module is not None:
        return "hip" if getattr(getattr(module.cuda, "runtime", None), "is_hip", False) else "cuda"
    return "hip" if type(value).__module__.partition(".")[0] in _HIP_MODULES else ""


def _bad_interface(field: str, what: str, fix: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{field}.__cuda_array_interface__ has {what}", field=field, value=what, rule="cuda_array_interface", fix=fix
    )


# ---- layouts ----


def _bad_dtype(name: str, field: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{name} is not an element type of Tilewright",
        field=field,
        value=name,
        rule="dtype_known",
        fix="convert it to float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8 or int32",
    )


def _spec(shape: tuple[int, ...], dtype: np.dtype[Any], strides: Sequence[int] | None, field: str) -> Spec:
    """The description of a layout in elements, as of a NumPy array: strides of dimensions of size one never matter."""
    return _checked_spec(shape, dtype, None if strides is None else tuple(strides), field)


@functools.lru_cache(4096)
def _checked_spec(shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None, field: str) -> Spec:
    element_type(dtype, field)
    if len(shape) > MAX_RANK:
        raise InvalidArgumentError(
            f"{field} has {len(shape)} dimensions; at most {MAX_RANK} are supported",
            field=field,
            value=shape,
            rule="tensor_rank",
            fix="reshape it to fewer dimensions",
        )
    if strides is None or 0 in shape:
        return Spec(shape, dtype)
    plain = contiguous_strides(shape)
    steps = tuple(usual if n <= 1 else step for n, step, usual in zip(shape, strides, plain, strict=True))
    if any(step < 0 for step in steps):
        raise InvalidArgumentError(
            f"{field} has negative strides", field=field, value=steps, rule="tensor_strides", fix="pass a copy"
        )
    return Spec(shape, dtype, None if steps == plain else steps)
