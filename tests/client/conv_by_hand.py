"""Convolution as its definition says it, in float64: slow, and nothing that the library or its plugins use."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

Sizes = int | Sequence[int]


def each(value: Sizes, count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value)


def geometry(x: np.ndarray, w_shape: Sequence[int], stride: Sizes, padding: Sizes, dilation: Sizes):
    """(steps, gaps, begins, outputs) of the axes."""
    count = x.ndim - 2
    steps, gaps = each(stride, count), each(dilation, count)
    pads = each(padding, count)
    begins, ends = (pads[:count], pads[count:]) if len(pads) == 2 * count else (pads, pads)
    outputs = [
        (x.shape[axis + 2] + begins[axis] + ends[axis] - ((w_shape[axis + 2] - 1) * gaps[axis] + 1)) // steps[axis] + 1
        for axis in range(count)
    ]
    return steps, gaps, begins, outputs


def taps(x: np.ndarray, w_shape: Sequence[int], stride: Sizes, padding: Sizes, dilation: Sizes):
    """For every output pixel and tap that meets the image: (pixel, tap, place in x)."""
    steps, gaps, begins, outputs = geometry(x, w_shape, stride, padding, dilation)
    for pixel in itertools.product(*map(range, outputs)):
        for tap in itertools.product(*map(range, w_shape[2:])):
            place = tuple(p * s + t * g - b for p, s, t, g, b in zip(pixel, steps, tap, gaps, begins, strict=True))
            if all(0 <= at < size for at, size in zip(place, x.shape[2:], strict=True)):
                yield pixel, tap, place


def forward(x, w, stride=1, padding=0, dilation=1, groups=1):
    x, w = x.astype(np.float64), w.astype(np.float64)
    outputs = geometry(x, w.shape, stride, padding, dilation)[3]
    y = np.zeros((x.shape[0], w.shape[0], *outputs))
    cg, kg = w.shape[1], w.shape[0] // groups
    for pixel, tap, place in taps(x, w.shape, stride, padding, dilation):
        for group in range(groups):
            image, out = slice(group * cg, (group + 1) * cg), slice(group * kg, (group + 1) * kg)
            y[(slice(None), out, *pixel)] += x[(slice(None), image, *place)] @ w[(out, slice(None), *tap)].T
    return y


def backward_data(dy, w, x_shape, stride=1, padding=0, dilation=1, groups=1):
    dy, w = dy.astype(np.float64), w.astype(np.float64)
    dx = np.zeros(x_shape)
    cg, kg = w.shape[1], w.shape[0] // groups
    for pixel, tap, place in taps(dx, w.shape, stride, padding, dilation):
        for group in range(groups):
            image, out = slice(group * cg, (group + 1) * cg), slice(group * kg, (group + 1) * kg)
            dx[(slice(None), image, *place)] += dy[(slice(None), out, *pixel)] @ w[(out, slice(None), *tap)]
    return dx


def backward_weight(x, dy, w_shape, stride=1, padding=0, dilation=1, groups=1):
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    dw = np.zeros(w_shape)
    cg, kg = w_shape[1], w_shape[0] // groups
    for pixel, tap, place in taps(x, w_shape, stride, padding, dilation):
        for group in range(groups):
            image, out = slice(group * cg, (group + 1) * cg), slice(group * kg, (group + 1) * kg)
            dw[(out, slice(None), *tap)] += dy[(slice(None), out, *pixel)].T @ x[(slice(None), image, *place)]
    return dw
