"""Shapes and strides: how a NumPy array is described to the server. Pure functions."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.errors import InvalidArgumentError
from tilewright.types.dtypes import DTYPES, DTypeLike, element_type, from_wire, wire_dtype
from tilewright_proto.v1 import tensor_pb2

__all__ = [
    "MAX_BYTES",
    "MAX_RANK",
    "Array",
    "Spec",
    "as_array",
    "checked_sizes",
    "contiguous_strides",
    "dense",
    "element_strides",
    "fresh",
    "same_places",
    "span_bytes",
    "strided",
    "too_large",
    "torch_bits",
]

Array = npt.NDArray[Any]
MAX_RANK = 8
_TORCH_ONLY = {"torch.bfloat16": "bf16", "torch.float8_e4m3fn": "fp8", "torch.float8_e5m2": "bf8"}
"""Types of PyTorch that NumPy has not."""
_BYTE = np.dtype(np.uint8)
MAX_BYTES = 1 << 50
"""Most bytes that a tensor may span, and the largest size and stride: far beyond any machine, far below overflow."""


@dataclass(frozen=True)
class Spec:
    """A tensor without memory: what ``plan`` takes in place of an array.

    ``strides`` are in elements and never negative; ``None`` means contiguous. ``packing`` names the packed format of
    a ``PackedTensor``.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...] | None = None
    packing: str = ""
    packed_bytes: int = 0

    @classmethod
    def of(cls, shape: Sequence[int], dtype: DTypeLike, strides: Sequence[int] | None = None) -> Spec:
        """From plain values, checked: ``Spec.of((64, 128), "bf16")``."""
        sizes = checked_sizes(shape, "shape")
        steps = None if strides is None else checked_sizes(strides, "strides")
        if steps is not None and len(steps) != len(sizes):
            raise InvalidArgumentError(
                f"{len(sizes)} sizes but {len(steps)} strides",
                field="strides",
                value=steps,
                rule="tensor_strides",
                fix="give one stride for each dimension, or none for a contiguous tensor",
            )
        if steps == contiguous_strides(sizes):
            steps = None
        spec = cls(sizes, element_type(dtype), steps)
        if spec.nbytes > MAX_BYTES:
            raise too_large("shape", sizes)
        return spec

    @classmethod
    def of_array(cls, array: Array, field: str) -> Spec:
        """Description of an array; negative or odd strides, which only a copy can mend, are described as that
        copy's."""
        element_type(array.dtype, field)
        if array.flags.c_contiguous:
            return cls(array.shape, array.dtype)
        strides = element_strides(array)
        return cls(array.shape, array.dtype, dense(array)[1] if strides is None else strides)

    @classmethod
    def of_wire(cls, message: tensor_pb2.TensorSpec) -> Spec:
        shape, strides = tuple(message.shape), tuple(message.strides)
        plain = not strides or strides == contiguous_strides(shape)
        return cls(shape, from_wire(message.dtype), None if plain else strides, message.packing, message.packed_bytes)

    def to_wire(self, field: str) -> tensor_pb2.TensorSpec:
        try:
            return tensor_pb2.TensorSpec(
                dtype=wire_dtype(self.dtype, field),  # type: ignore[arg-type]
                shape=self.shape,
                strides=self.strides or (),
                packing=self.packing,
                packed_bytes=self.packed_bytes,
            )
        except (TypeError, ValueError):
            # Made by hand, without the checks of `of`.
            raise InvalidArgumentError(
                f"{field} has sizes or strides that cannot be sent: {self.shape}, {self.strides}",
                field=field,
                value=self.shape,
                rule="tensor_overflow",
                fix="make it with Spec.of, from integers of zero or more",
            ) from None

    @property
    def nbytes(self) -> int:
        """Bytes of memory from the first element to the end of the last."""
        if self.packing:
            return self.packed_bytes
        strides = contiguous_strides(self.shape) if self.strides is None else self.strides
        if 0 in self.shape:
            return 0
        return (1 + sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True))) * self.dtype.itemsize


def checked_sizes(values: Iterable[Any], field: str) -> tuple[int, ...]:
    """Sizes or strides as integers. Raises ``InvalidArgumentError`` for what is no integer, negative, or too large for
    any memory.
    """
    try:
        sizes = tuple(operator.index(value) for value in values)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise InvalidArgumentError(
            f"{field}: integers that are not negative are needed",
            field=field,
            value=values,
            rule="tensor_non_negative",
            fix="give integers of zero or more",
        )
    if any(size > MAX_BYTES for size in sizes):
        raise too_large(field, sizes)
    return sizes


def too_large(field: str, value: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{field} {value} is beyond what a tensor may span, {MAX_BYTES} bytes",
        field=field,
        value=value,
        rule="tensor_overflow",
        fix="correct the sizes and strides, or work in parts",
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def element_strides(array: Array) -> tuple[int, ...] | None:
    """Strides in elements, or ``None`` if the protocol cannot say them: negative, or not a whole number of elements.

    Strides of dimensions of size one never matter, so they do not stand in the way.
    """
    size = array.dtype.itemsize
    plain = contiguous_strides(array.shape)
    strides = []
    for extent, step, usual in zip(array.shape, array.strides, plain, strict=True):
        if extent <= 1:
            strides.append(usual)
        elif step < 0 or step % size:
            return None
        else:
            strides.append(step // size)
    return tuple(strides)


def same_places(array: Array, strides: tuple[int, ...] | None) -> bool:
    """True if the elements of ``array`` lie where ``strides`` (``None``: contiguous) say, dimensions of size one
    aside.
    """
    if strides is None:
        return bool(array.flags.c_contiguous)
    size = array.dtype.itemsize
    return all(n <= 1 or have == want * size for n, have, want in zip(array.shape, array.strides, strides, strict=True))


def span_bytes(array: Array) -> int:
    """Bytes from the first element to the end of the last, for strides that are not negative."""
    if array.size == 0:
        return 0
    reach = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    return int(reach) + int(array.dtype.itemsize)


def strided(memory: Array, spec: Spec) -> Array:
    """The tensor that ``spec`` describes, in ``memory``, an array of bytes."""
    steps = contiguous_strides(spec.shape) if spec.strides is None else spec.strides
    size = spec.dtype.itemsize
    view: Array = np.ndarray(spec.shape, spec.dtype, memory.data, 0, tuple(step * size for step in steps))
    return view


def fresh(make: Callable[[tuple[int, ...], np.dtype[Any]], Array], spec: Spec) -> Array:
    """An array whose elements lie as ``spec`` says, in memory of ``make(shape, dtype)``."""
    if spec.strides is None or not spec.nbytes:
        return make(spec.shape, spec.dtype)
    return strided(make((spec.nbytes,), _BYTE), spec)


def dense(array: Array) -> tuple[Array, tuple[int, ...]]:
    """How to copy ``array`` without gaps: a view whose bytes in C order are the copy, and the strides (in elements)
    of ``array.shape`` in that copy.

    The order of dimensions stays as it was, so a transposed matrix stays transposed, and broadcast dimensions stay
    broadcast (stride 0).
    """
    pairs = list(zip(array.shape, array.strides, strict=True))
    core = array[tuple(slice(0, 1) if n > 1 and s == 0 else slice(None) for n, s in pairs)]
    order = sorted(range(core.ndim), key=lambda axis: (-abs(core.strides[axis]), axis))
    source = core.transpose(order)
    strides = [0] * core.ndim
    for axis, stride in zip(order, contiguous_strides(source.shape), strict=True):
        n, s = pairs[axis]
        strides[axis] = 0 if n > 1 and s == 0 else stride
    return source, tuple(strides)


def torch_bits(value: Any) -> Array | None:
    """A tensor of PyTorch on the host, of a type that PyTorch does not give to NumPy, as it lies; else None."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return None
    name = _TORCH_ONLY.get(str(value.dtype))
    if name is None:
        return None
    kind = DTYPES[name]
    found: Array = value.view(torch.int16 if kind.itemsize == 2 else torch.int8).numpy().view(kind)
    return found


def as_array(value: Any, field: str) -> Array:
    """An array of anything that NumPy can read without guessing. Raises ``InvalidArgumentError`` for objects, text
    and unknown element types.
    """
    if type(value) is np.ndarray:
        array = value
    else:
        try:
            array = np.asarray(value) if (bits := torch_bits(value)) is None else bits
            if array.dtype == np.float64 and isinstance(value, (float, list, tuple)):
                array = array.astype(np.float32)  # Python's numbers have no element type of their own
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgumentError(
                f"{field} cannot be read as an array: {error}",
                field=field,
                value=type(value).__name__,
                rule="array_like",
                fix="pass a numpy.ndarray, or an object that numpy.asarray takes",
            ) from None
    wire_dtype(array.dtype, field)
    if array.ndim > MAX_RANK:
        raise InvalidArgumentError(
            f"{field} has {array.ndim} dimensions; at most {MAX_RANK} are supported",
            field=field,
            value=array.shape,
            rule="tensor_rank",
            fix="reshape it to fewer dimensions",
        )
    return array
