"""What a tensor is, without its memory: dtype, shape, strides, and the packed format if it has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright_kit.dtypes import DType
from tilewright_kit.errors import InvalidArgumentError

__all__ = ["MAX_ELEMENTS", "MAX_RANK", "TensorDesc", "contiguous_strides"]

MAX_RANK = 8
MAX_ELEMENTS = 2**48
"""Largest number of elements that a span may cover: products of sizes and strides below this stay exact in int64 for every element type."""


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class TensorDesc:
    """A strided view. ``strides`` are in elements and never negative; a zero stride broadcasts.

    A tensor in a packed format (``packing`` not empty) has a logical shape, no meaningful strides, and ``packed_bytes`` of storage in an order that
    only kernels of that format read.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    packing: str = ""
    packed_bytes: int = 0

    @classmethod
    def of(
        cls, dtype: DType | str, shape: tuple[int, ...] | list[int], strides: tuple[int, ...] | list[int] | None = None
    ) -> TensorDesc:
        """Checked constructor; without ``strides`` the tensor is contiguous row-major. Raises ``InvalidArgumentError``."""
        sizes = tuple(shape)
        desc = cls(DType(dtype), sizes, contiguous_strides(sizes) if strides is None else tuple(strides))
        desc.check("tensor")
        return desc

    def check(self, field: str) -> None:
        """Raise ``InvalidArgumentError`` naming ``field`` if sizes are negative, too many, or reach past ``MAX_ELEMENTS``."""
        if len(self.shape) > MAX_RANK:
            raise InvalidArgumentError(
                f"{field} has {len(self.shape)} dimensions; at most {MAX_RANK} are supported",
                field=f"{field}.shape",
                value=self.shape,
                rule="tensor_rank",
                fix="reshape it to fewer dimensions",
            )
        if len(self.strides) != len(self.shape):
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
        if self.span > MAX_ELEMENTS or any(size > MAX_ELEMENTS for size in self.shape):
            raise InvalidArgumentError(
                f"{field} covers more than 2**48 elements",
                field=f"{field}.shape",
                value=self.shape,
                rule="tensor_overflow",
                fix="split the problem, or correct its sizes and strides",
            )

    @property
    def size(self) -> int:
        """Number of logical elements."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product

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
        """Row-major without gaps (strides of dimensions of size one do not matter)."""
        expected = contiguous_strides(self.shape)
        return all(
            size <= 1 or have == want for size, have, want in zip(self.shape, self.strides, expected, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        record: dict[str, Any] = {"dtype": self.dtype.value, "shape": list(self.shape), "strides": list(self.strides)}
        if self.packing:
            record |= {"packing": self.packing, "packed_bytes": self.packed_bytes}
        return record
