"""The truth, in NumPy: float64 throughout, exact integers for int8 with int32 results.

Readable rather than fast: a loop over taps, a product over channels. The three directions are written each for itself,
not as adjoints of one another, so that comparing them by the adjoint identity tests something.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_grouped_conv.problem.problem import ConvProblem, TransformProblem
from tilewright_grouped_conv.problem.sizes import ConvGeometry, Triple
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.numerics.elementwise import apply_unary
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Binary

__all__ = ["reference_conv", "reference_transform"]

Array = npt.NDArray[Any]


def reference_conv(problem: ConvProblem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The output by name, unrounded float64 (int64 for int32 results, wrapped as int32 sums wrap)."""
    geometry = problem.geometry
    exact: Any = np.int64 if problem.dtype_in == DType.INT8 else np.float64
    given = {name: np.asarray(array).astype(exact) for name, array in inputs.items() if name in ("x", "w", "dy")}
    if problem.direction is Direction.FORWARD:
        sums, name = _forward(geometry, _grouped(given["x"], geometry), _weights(given["w"], geometry)), "y"
    elif problem.direction is Direction.BACKWARD_DATA:
        sums, name = _backward_data(geometry, _grouped(given["dy"], geometry), _weights(given["w"], geometry)), "dx"
    else:
        sums, name = _backward_weight(geometry, _grouped(given["x"], geometry), _grouped(given["dy"], geometry)), "dw"
    shape = problem.operands[-1].desc.shape
    sums = sums.reshape(shape)
    if problem.dtype_acc == DType.INT32:
        sums = (sums + 2**31) % 2**32 - 2**31  # int32 accumulators wrap around
        if problem.dtype_out == DType.INT32:
            return {name: sums}
    return {name: _epilogue(problem, sums.astype(np.float64), inputs)}


def reference_transform(problem: TransformProblem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    out = np.zeros(problem.sizes, np.float64)
    out[tuple(slice(size) for size in problem.kept)] = np.asarray(inputs["x"]).astype(np.float64)
    return {"out": out}


# ---- the three directions: images [N, G, channels, D, H, W], weights [G, K/G, C/G, Z, Y, X] ----


def _forward(geometry: ConvGeometry, x: Array, w: Array) -> Array:
    y = np.zeros((geometry.n, geometry.groups, geometry.kg, *geometry.output), x.dtype)
    padded = _padded(x, geometry)
    for tap in _taps(geometry):
        seen = padded[_seen(geometry, tap)]
        y += np.einsum("ngcdhw,gkc->ngkdhw", seen, w[_at(tap)])
    return y


def _backward_data(geometry: ConvGeometry, dy: Array, w: Array) -> Array:
    """Every output hands its gradient back to the pixels that it saw."""
    padded = _padded(np.zeros((geometry.n, geometry.groups, geometry.cg, *geometry.input), dy.dtype), geometry)
    for tap in _taps(geometry):
        padded[_seen(geometry, tap)] += np.einsum("ngkdhw,gkc->ngcdhw", dy, w[_at(tap)])
    inside = tuple(slice(begin, begin + size) for begin, size in zip(geometry.pad_begin, geometry.input, strict=True))
    found: Array = padded[_at(inside)]
    return found


def _backward_weight(geometry: ConvGeometry, x: Array, dy: Array) -> Array:
    dw = np.zeros((geometry.groups, geometry.kg, geometry.cg, *geometry.filter), x.dtype)
    padded = _padded(x, geometry)
    for tap in _taps(geometry):
        dw[_at(tap)] = np.einsum("ngkdhw,ngcdhw->gkc", dy, padded[_seen(geometry, tap)])
    return dw


def _taps(geometry: ConvGeometry) -> Iterator[Triple]:
    depth, height, width = (range(size) for size in geometry.filter)
    return itertools.product(depth, height, width)


def _at(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """The index of the last axes, whatever comes before."""
    return (Ellipsis, *index)


def _seen(geometry: ConvGeometry, tap: Triple) -> tuple[Any, ...]:
    """Pixels of the padded image that a tap sees, one pixel for each output."""
    return _at(
        tuple(
            slice(index * dilation, index * dilation + (size - 1) * stride + 1, stride)
            for index, dilation, size, stride in zip(
                tap, geometry.dilation, geometry.output, geometry.stride, strict=True
            )
        )
    )


def _padded(x: Array, geometry: ConvGeometry) -> Array:
    edges = [(0, 0)] * 3 + list(zip(geometry.pad_begin, geometry.pad_end, strict=True))
    return np.pad(x, edges)


def _grouped(image: Array, geometry: ConvGeometry) -> Array:
    n, channels, *spatial = image.shape
    axes = [1] * (3 - len(spatial)) + spatial
    return image.reshape(n, geometry.groups, channels // geometry.groups, *axes)


def _weights(w: Array, geometry: ConvGeometry) -> Array:
    return w.reshape(geometry.groups, geometry.kg, geometry.cg, *geometry.filter)


# ---- what follows the sums ----


def _epilogue(problem: ConvProblem, sums: Array, inputs: Mapping[str, Array]) -> Array:
    channel = (1, -1) + (1,) * problem.ndim
    x = sums * problem.alpha
    if "scale" in inputs:
        x = x * np.asarray(inputs["scale"]).astype(np.float64).reshape(channel)
    if "bias" in inputs:
        x = x + np.asarray(inputs["bias"]).astype(np.float64).reshape(channel)
    for index in range(problem.num_d):
        operand = np.asarray(inputs[f"d[{index}]"]).astype(np.float64)
        x = x * operand if problem.binary in (Binary.MULTIPLY, Binary.MULTI_D_MULTIPLY) else x + operand
    x = apply_unary(problem.unary, x, problem.clamp_lo, problem.clamp_hi)
    if problem.accumulate:
        x = x + np.asarray(inputs["acc"]).astype(np.float64)
    if problem.dtype_out == DType.INT8:
        x = np.clip(x, -128.0, 127.0)
    return x
