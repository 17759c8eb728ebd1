"""The sizes of a convolution, the same for all three directions."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["ConvGeometry", "Triple", "extent", "output_size", "text_of"]

Triple = tuple[int, int, int]
"""One number per axis in the order depth, height, width; axes that a convolution lacks have size 1."""


def extent(filter: int, dilation: int) -> int:
    """Pixels from the first to the last tap, both included."""
    return (filter - 1) * dilation + 1


def output_size(size: int, filter: int, stride: int, dilation: int, begin: int, end: int) -> int:
    """Outputs along one axis: ``(size + begin + end - ((filter - 1) * dilation + 1)) // stride + 1``.

    Zero or less if the filter is longer than the padded image.
    """
    return (size + begin + end - extent(filter, dilation)) // stride + 1


@dataclass(frozen=True, slots=True)
class ConvGeometry:
    """Sizes of a convolution of N images: ``c`` and ``k`` are channels over all groups."""

    ndim: int
    n: int
    c: int
    k: int
    groups: int
    input: Triple
    filter: Triple
    output: Triple
    stride: Triple
    dilation: Triple
    pad_begin: Triple
    pad_end: Triple

    @property
    def cg(self) -> int:
        """Input channels of a group."""
        return self.c // self.groups

    @property
    def kg(self) -> int:
        """Output channels of a group."""
        return self.k // self.groups

    @property
    def taps(self) -> int:
        return math.prod(self.filter)

    @property
    def in_pixels(self) -> int:
        """Pixels of one image."""
        return math.prod(self.input)

    @property
    def out_pixels(self) -> int:
        return math.prod(self.output)

    @property
    def flops(self) -> int:
        """FLOP of any direction, a multiply-add counted as two, taps on padding included: 2*N*K*out*Cg*taps."""
        return 2 * self.n * self.k * self.out_pixels * self.cg * self.taps

    @property
    def is_pointwise(self) -> bool:
        """One tap on every pixel's own place, perhaps with a stride."""
        return self.taps == 1 and not any((*self.pad_begin, *self.pad_end))

    @property
    def is_dense_pointwise(self) -> bool:
        """A product of matrices: one tap, no stride, no padding."""
        return self.is_pointwise and self.stride == (1, 1, 1)

    def shape_x(self) -> tuple[int, ...]:
        """[N, C, *spatial]."""
        return (self.n, self.c, *self.input[3 - self.ndim :])

    def shape_w(self) -> tuple[int, ...]:
        """[K, C/G, *filter]."""
        return (self.k, self.cg, *self.filter[3 - self.ndim :])

    def shape_y(self) -> tuple[int, ...]:
        """[N, K, *out]."""
        return (self.n, self.k, *self.output[3 - self.ndim :])


def text_of(numbers: Triple, ndim: int) -> str:
    """``3x3``: the axes that there are."""
    return "x".join(str(number) for number in numbers[3 - ndim :])
