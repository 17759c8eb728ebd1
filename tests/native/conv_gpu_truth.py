"""Sizes of convolutions, and their results by NumPy: every direction on its own, tap by tap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright_grouped_conv.problem.sizes import ConvGeometry, output_size

Array = np.ndarray[Any, Any]
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Shape:
    """Sizes of a convolution; two-dimensional unless said otherwise, triples are (D, H, W)."""

    n: int = 2
    c: int = 16
    k: int = 24
    groups: int = 1
    size: Triple = (1, 9, 7)
    filter: Triple = (1, 3, 3)
    stride: Triple = (1, 1, 1)
    dilation: Triple = (1, 1, 1)
    begin: Triple = (0, 1, 1)
    end: Triple = (0, 1, 1)
    ndim: int = 2

    def geometry(self) -> ConvGeometry:
        output = tuple(
            output_size(*each)
            for each in zip(self.size, self.filter, self.stride, self.dilation, self.begin, self.end, strict=True)
        )
        assert min(output) > 0, self
        return ConvGeometry(
            self.ndim, self.n, self.c, self.k, self.groups, self.size, self.filter, output, self.stride, self.dilation,
            self.begin, self.end,
        )  # type: ignore[arg-type]  # fmt: skip


def convolve(shape: Shape, x: Array, w: Array) -> Array:
    """y[n, d, h, w, k] of x[n, d, h, w, c] and w[k, d, h, w, c / groups], in the type of the operands."""
    g = shape.geometry()
    y = np.zeros((g.n, *g.output, g.groups, g.kg), x.dtype)
    padded = np.pad(x, ((0, 0), *zip(shape.begin, shape.end, strict=True), (0, 0)))
    weights = w.reshape(g.groups, g.kg, *g.filter, g.cg)
    for tap in np.ndindex(*g.filter):
        part = padded[(slice(None), *_reach(g, tap))].reshape(g.n, *g.output, g.groups, g.cg)
        y += np.einsum("ndhwgc,gkc->ndhwgk", part, weights[:, :, tap[0], tap[1], tap[2]])
    return y.reshape(g.n, *g.output, g.k)


def convolve_backward_data(shape: Shape, dy: Array, w: Array) -> Array:
    g = shape.geometry()
    sizes = [s + b + e for s, b, e in zip(shape.size, shape.begin, shape.end, strict=True)]
    dx = np.zeros((g.n, *sizes, g.c), dy.dtype)
    weights, dys = w.reshape(g.groups, g.kg, *g.filter, g.cg), dy.reshape(g.n, *g.output, g.groups, g.kg)
    for tap in np.ndindex(*g.filter):
        part = np.einsum("ndhwgk,gkc->ndhwgc", dys, weights[:, :, tap[0], tap[1], tap[2]])
        dx[(slice(None), *_reach(g, tap))] += part.reshape(g.n, *g.output, g.c)
    inner = tuple(slice(b, b + s) for b, s in zip(shape.begin, shape.size, strict=True))
    return dx[(slice(None), *inner)]


def convolve_backward_weight(shape: Shape, x: Array, dy: Array) -> Array:
    g = shape.geometry()
    padded = np.pad(x, ((0, 0), *zip(shape.begin, shape.end, strict=True), (0, 0)))
    dys = dy.reshape(g.n, *g.output, g.groups, g.kg)
    dw = np.zeros((g.groups, g.kg, *g.filter, g.cg), x.dtype)
    for tap in np.ndindex(*g.filter):
        part = padded[(slice(None), *_reach(g, tap))].reshape(g.n, *g.output, g.groups, g.cg)
        dw[:, :, tap[0], tap[1], tap[2]] = np.einsum("ndhwgk,ndhwgc->gkc", dys, part)
    return dw.reshape(g.k, *g.filter, g.cg)


def _reach(g: ConvGeometry, tap: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(
        slice(t * dilation, t * dilation + (out - 1) * stride + 1, stride)
        for t, dilation, out, stride in zip(tap, g.dilation, g.output, g.stride, strict=True)
    )
