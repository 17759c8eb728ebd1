"""A tensor without its memory: dtype, shape, strides, and the packed format if it has one."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["MAX_ELEMENTS", "MAX_RANK", "TensorDesc", "contiguous_strides", "overlaps"]

MAX_RANK = 8
MAX_ELEMENTS = 2**48
"""Most elements that a tensor may have or span, and its largest stride: bytes then stay exact in int64."""


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class TensorDesc:
    """A strided view. ``strides`` are in elements and never negative; a zero stride broadcasts.

    A tensor in a packed format (``packing`` not empty) has a logical shape, no meaningful strides (they may be left
    empty), and ``packed_bytes`` of storage in an order that only kernels of that format read.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    packing: str = ""
    packed_bytes: int = 0

    @classmethod
    def of(
        cls,
        dtype: DType | str,
        shape: Sequence[SupportsIndex],
        strides: Sequence[SupportsIndex] | None = None,
    ) -> TensorDesc:
        """Checked constructor; without ``strides`` contiguous row-major. Raises ``InvalidArgumentError``."""
        try:
            element = DType(dtype)
        except ValueError:
            raise InvalidArgumentError(
                f"there is no element type {dtype!r}",
                field="tensor.dtype",
                value=dtype,
                rule="tensor_dtype",
                fix=f"use one of: {', '.join(DType)}",
            ) from None
        sizes = _integers("tensor.shape", shape)
        steps = contiguous_strides(sizes) if strides is None else _integers("tensor.strides", strides)
        desc = cls(element, sizes, steps)
        desc.check("tensor")
        return desc

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> TensorDesc:
        """The inverse of ``to_dict``. Raises ``InvalidArgumentError`` on damage."""
        if not isinstance(record, Mapping) or not {"dtype", "shape"} <= set(record):
            raise InvalidArgumentError(
                "a tensor needs dtype and shape", field="tensor", value=record, rule="tensor_record"
            )
        packing, packed_bytes = record.get("packing", ""), record.get("packed_bytes", 0)
        if not isinstance(packing, str) or type(packed_bytes) is not int:
            raise InvalidArgumentError(
                "packing is a word and packed_bytes an integer",
                field="tensor.packing",
                value=packing,
                rule="tensor_record",
            )
        strides = record.get("strides")
        if packing:
            plain = cls.of(record["dtype"], record["shape"])
            own = () if strides is None else _integers("tensor.strides", strides)
            desc = cls(plain.dtype, plain.shape, own, packing, packed_bytes)
        else:
            plain = cls.of(record["dtype"], record["shape"], strides)
            desc = cls(plain.dtype, plain.shape, plain.strides, packing, packed_bytes)
        desc.check("tensor")
        return desc

    def check(self, field: str) -> None:
        """Raise ``InvalidArgumentError`` naming ``field`` unless sizes and strides are within bounds."""
        if len(self.shape) > MAX_RANK:
            raise InvalidArgumentError(
                f"{field} has {len(self.shape)} dimensions; at most {MAX_RANK} are supported",
                field=f"{field}.shape",
                value=self.shape,
                rule="tensor_rank",
                fix="reshape it to fewer dimensions",
            )
        if len(self.strides) != len(self.shape) and not (self.packing and not self.strides):
            raise InvalidArgumentError(
                f"{field} has {len(self.shape)} sizes but {len(self.strides)} strides",
                field=f"{field}.strides",
                value=self.strides,
                rule="tensor_strides",
                fix="give one stride per dimension, or none for a contiguous tensor",
            )
        for part, numbers in (("shape", self.shape), ("strides", self.strides)):
            if any(number < 0 for number in numbers):
                raise InvalidArgumentError(
                    f"{field} has a negative entry in its {part}",
                    field=f"{field}.{part}",
                    value=numbers,
                    rule="tensor_non_negative",
                    fix="use sizes and strides of zero or more (copy a reversed view first)",
                )
        self._check_bounds(field)

    def _check_bounds(self, field: str) -> None:
        # A broadcast tensor spans little but has many elements; an empty one spans nothing but may have huge strides.
        # Both reach kernels as int64 numbers and are multiplied there.
        reach = 0 if self.packing else self.span
        if max(reach, self.size, *self.shape, *self.strides) > MAX_ELEMENTS or self.packed_bytes > 8 * MAX_ELEMENTS:
            raise InvalidArgumentError(
                f"{field} covers more than 2**48 elements",
                field=f"{field}.shape",
                value=self.shape,
                rule="tensor_overflow",
                fix="split the problem, or correct its sizes and strides",
            )
        if self.packed_bytes < 0 or (self.packed_bytes and not self.packing):
            raise InvalidArgumentError(
                f"{field} has {self.packed_bytes} packed bytes and the packing {self.packing!r}",
                field=f"{field}.packed_bytes",
                value=self.packed_bytes,
                rule="tensor_packing",
                fix="give packed_bytes with a packing only, and not below zero",
            )

    @property
    def size(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Elements from the first to one past the last that the view touches (0 for an empty tensor)."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tensor needs behind its first element."""
        return self.packed_bytes if self.packing else self.span * self.dtype.bytes

    @property
    def is_contiguous(self) -> bool:
        """Row-major without gaps (strides of dimensions of size one do not matter); never true of a packed tensor."""
        if self.packing:
            return False
        expected = contiguous_strides(self.shape)
        return all(
            size <= 1 or have == want for size, have, want in zip(self.shape, self.strides, expected, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        record: dict[str, Any] = {"dtype": self.dtype.value, "shape": list(self.shape), "strides": list(self.strides)}
        if self.packing:
            record |= {"packing": self.packing, "packed_bytes": self.packed_bytes}
        return record


def overlaps(desc: TensorDesc) -> bool:
    """True if two elements of a tensor may share memory (stated conservatively: dimensions that interleave in no nested
    order count as overlapping).
    """
    span = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(desc.shape, desc.strides, strict=True) if size > 1
    ):
        if stride < span:
            return True
        span += (size - 1) * stride
    return False


def _integers(field: str, numbers: Any) -> tuple[int, ...]:
    try:
        if isinstance(numbers, (str, bytes)) or any(isinstance(number, bool) for number in numbers):
            raise TypeError
        return tuple(operator.index(number) for number in numbers)
    except TypeError:
        raise InvalidArgumentError(
            f"{field} is not a list of integers", field=field, value=numbers, rule="tensor_integers"
        ) from None
