"""Convolutions for the GPU kernels: configurations, problems in guarded memory, and the truth in float64."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gpu_config import GpuConfig
from native_case import UNARY, UNIT
from native_harness import DTYPES, Guarded, Operand, ProblemArgs, guarded

from tilewright_grouped_conv.divide import divisor
from tilewright_grouped_conv.geometry import ConvGeometry, output_size
from tilewright_grouped_conv.phases import Axis, Phase, phases_of
from tilewright_grouped_conv.words import Direction

Array = np.ndarray[Any, Any]
Triple = tuple[int, int, int]

DIRECTIONS = {
    "forward": Direction.FORWARD,
    "backward_data": Direction.BACKWARD_DATA,
    "backward_weight": Direction.BACKWARD_WEIGHT,
}


class AxisArgs(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "rows", "size", "taps", "row_step", "tap_step", "origin", "image_stride", "row_stride", "tap_stride",
            "rows_multiplier", "rows_shift", "taps_multiplier", "taps_shift",
        )
    ]  # fmt: skip


class ConvArgs(ctypes.Structure):
    """``tw_conv_problem``."""

    _fields_ = [
        ("gemm", ProblemArgs),
        ("axes", AxisArgs * 3),
        *(
            (name, ctypes.c_int64)
            for name in (
                "images", "groups", "channels", "image_n", "image_g", "image_c", "row_n", "row_g", "row_c",
                "weight_g", "weight_n", "weight_c", "channels_multiplier", "channels_shift", "groups_multiplier",
                "groups_shift",
            )
        ),
        ("acc", ctypes.c_void_p),
    ]  # fmt: skip


@dataclass(frozen=True)
class ConvGpuConfig(GpuConfig):
    """One kernel; ``kind`` depthwise and direct have no product (``tile`` is idle)."""

    direction: str = "forward"
    kind: str = "implicit"
    ndim: int = 2
    accumulate: bool = False
    linear_rows: bool = True
    two_stage: bool = False
    vectors: Triple = (8, 8, 8)
    groups_merged: int = 1
    channel_tile: int = 0
    pixel_tile: Triple = (0, 0, 0)
    filter: Triple = (0, 0, 0)
    stride: Triple = (0, 0, 0)
    dilation: Triple = (0, 0, 0)
    channels_first: bool = False

    @property
    def is_matrix(self) -> bool:
        return self.kind in ("implicit", "pointwise")

    @property
    def header(self) -> str:
        weight = self.direction == "backward_weight"
        if self.is_matrix:
            return "conv_weight.hpp" if weight else "conv.hpp"
        return "direct_weight.hpp" if weight else "depthwise.hpp" if self.kind == "depthwise" else "direct_conv.hpp"

    @property
    def image_vector(self) -> int:
        """Elements of one access to the image."""
        return self.vectors[1] if self.direction == "backward_weight" else self.vectors[0]

    @property
    def converts(self) -> bool:
        """Whether a second kernel adds the slices."""
        return self.direction == "backward_weight" and (self.two_stage or not self.is_matrix)

    @property
    def shared_bytes(self) -> int:
        if not self.is_matrix:
            return 98304  # as much as any of these kernels asks for
        return super().shared_bytes

    @property
    def threads_across(self) -> int:
        """Without a product: threads that compute different channels (of the weights, or units) of the same pixels."""
        if self.channels_first:
            return 1
        vector = self.vectors[2] if self.kind == "direct" and self.direction != "backward_weight" else self.vectors[0]
        if self.kind == "direct" and self.direction == "backward_weight":
            return self.channel_tile // vector if self.channel_tile else 32
        return (self.channel_tile or 8 * vector) // vector

    @property
    def merged(self) -> bool:
        """Whether blocks of eight channels are multiplied by matrix instructions, whatever groups they are."""
        return not self.is_matrix and self.groups_merged > 1

    @property
    def merged_bytes(self) -> int:
        """Shared memory of a kernel of merged groups."""
        channels = self.channel_tile or 8 * self.team
        _, rows, run = self.pixels
        spans, backward = [], self.direction == "backward_data"
        for axis, size in ((1, rows), (2, run)):
            absent = axis < 3 - self.ndim
            taps, stride, dilation = (
                1 if absent else values[axis] for values in (self.filter, self.stride, self.dilation)
            )
            if backward:
                common = math.gcd(stride, dilation)
                taps, stride, dilation = -(-taps // (stride // common)), 1, dilation // common
            spans.append((size - 1) * stride + (taps - 1) * dilation + 1)
        pixel = channels * 2 + 16
        image = spans[0] * spans[1] * pixel
        if self.direction == "backward_weight":
            return 2 * (image + rows * run * pixel)
        return image * (2 if self.pixels[0] > 1 else 1)

    @property
    def is_fixed(self) -> bool:
        """Without a product: whether the filter is compiled in."""
        axes = range(max(3 - self.ndim, 1), 3)
        return not self.grouped and all(self.filter[i] and self.stride[i] and self.dilation[i] for i in axes)

    @property
    def pixels(self) -> Triple:
        """Without a product: tiles of a thread, rows and places along a row of a tile."""
        repeats, rows, run = self.pixel_tile
        if self.merged:
            return repeats or 1, rows or 8, run or 8
        tall = self.is_fixed and self.kind == "depthwise" and self.direction != "backward_weight"
        return repeats or 1, rows or (2 if tall else 1), run or 4

    def text(self, name: str) -> str:
        def flag(value: bool) -> str:
            return "true" if value else "false"

        def triple(values: Triple) -> str:
            return f"{{{', '.join(map(str, values))}}}"

        more = [
            f"static constexpr tw::Direction direction = tw::Direction::{self.direction};",
            f"static constexpr tw::ConvKind kind = tw::ConvKind::{self.kind};",
            f"static constexpr int ndim = {self.ndim}, groups_merged = {self.groups_merged}, blocks_per_unit = 0;",
            f"static constexpr int vector_a = {self.vectors[0]}, vector_b = {self.vectors[1]};",
            f"static constexpr int vector_c = {self.vectors[2]}, channel_tile = {self.channel_tile};",
            f"static constexpr bool channels_first = {flag(self.channels_first)}, bias_rows = channels_first;",
            f"static constexpr bool accumulate = {flag(self.accumulate)}, linear_rows = {flag(self.linear_rows)};",
            f"static constexpr bool two_stage = {flag(self.two_stage)};",
            f"static constexpr int pixel_tile[3] = {triple(self.pixel_tile)}, filter[3] = {triple(self.filter)};",
            f"static constexpr int stride[3] = {triple(self.stride)}, dilation[3] = {triple(self.dilation)};",
        ]
        ends = f"TW_CONV_KERNEL({name}, Config_{name})\n"
        if self.converts:
            ends += f"TW_CONV_CONVERT({name}_convert, Config_{name})\n"
        before, after = super().text(name).split("\n};\nTW_GEMM_KERNEL", 1)
        return before + "\n  " + "\n  ".join(more) + "\n};\n" + ends + after.split("\n", 1)[1]

    def unit(self, name: str) -> str:
        return f'#include "tilewright/gpu/{self.header}"\n{self.text(name)}'


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


@dataclass
class ConvCase:
    """One convolution: operands in guarded memory, and its products ready to launch.

    ``gap``: elements between the channels of one pixel and the next, of all images.
    """

    config: ConvGpuConfig
    shape: Shape
    rng: np.random.Generator
    alpha: float = 1.0
    split_k: int = 1
    at_end: bool = True
    gap: int = 0
    result_gap: int | None = None
    """The gap of what has the result's layout; None: as ``gap``."""
    keep: list[Any] = field(default_factory=list)
    whole: dict[int, Array] = field(default_factory=dict)
    """By address: tensors with the gaps between their pixels."""

    def __post_init__(self) -> None:
        config, g = self.config, self.shape.geometry()
        self.geometry = g
        image, other = (config.b, config.a) if config.direction == "backward_weight" else (config.a, config.b)
        pixels_in, pixels_out, weights = (g.n, *g.input, g.c), (g.n, *g.output, g.k), (g.k, *g.filter, g.cg)
        backward_data, backward_weight = (config.direction == f"backward_{what}" for what in ("data", "weight"))
        types = {
            "x": config.c if backward_data else image,
            "y": image if backward_data else other if backward_weight else config.c,
            "w": config.c if backward_weight else other,
        }
        own = self.gap if self.result_gap is None else self.result_gap
        self.x = self._tensor(types["x"], pixels_in, own if backward_data else self.gap)
        self.y = self._tensor(types["y"], pixels_out, self.gap if backward_data or backward_weight else own)
        self.w = self._tensor(types["w"], weights, 0)
        self.result = self.x if backward_data else self.w if backward_weight else self.y
        self.before = self._tensor(config.c, self.result.shape, 0 if backward_weight else own)
        self.bias = self._tensor(config.bias, (self.result.shape[-1],), 0) if config.bias else None
        self.d = [self._tensor(dtype, self.result.shape, own) for dtype in config.d]
        self._poison()
        self.phases = phases_of(g, DIRECTIONS[config.direction], False)
        self.table = (ConvArgs * len(self.phases))()
        for args, phase in zip(self.table, self.phases, strict=True):
            self._fill(args, phase)

    # ---- memory ----

    def _tensor(self, dtype: str | None, shape: tuple[int, ...], gap: int) -> Array:
        assert dtype is not None
        *outer, inner = shape
        flat = self._place(self._random(dtype, math.prod(outer) * (inner + gap)))
        whole = flat.reshape(*outer, inner + gap)
        self.whole[flat.ctypes.data] = whole
        return whole[..., :inner]

    def _random(self, dtype: str, count: int) -> Array:
        if dtype == "int8":
            return self.rng.integers(-128, 128, count).astype(np.int8)
        if dtype == "int32":
            return self.rng.integers(-1000, 1000, count).astype(np.int32)
        return self.rng.standard_normal(count).astype(np.float32).astype(DTYPES[dtype])

    def _place(self, values: Array) -> Array:
        memory, array = guarded(values, self.at_end)
        self.keep.append(memory)
        return array

    def _poison(self) -> None:
        result = self.whole[self.result.ctypes.data]
        result[...] = -123456789 if result.dtype.kind == "i" else np.nan

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    # ---- the products ----

    def _fill(self, args: ConvArgs, phase: Phase) -> None:
        g, config, gemm = self.geometry, self.config, args.gemm
        item = self.result.dtype.itemsize
        weight_strides = _strides(self.w)[1:4]
        first = sum(axis.first_row * step for axis, step in zip(phase.axes, _strides(self.x)[1:4], strict=True))
        tap = sum(axis.first_tap * step for axis, step in zip(phase.axes, weight_strides, strict=True))
        x, y, w = (self.address(array) for array in (self.x, self.y, self.w))
        direction = config.direction
        pixel_x, pixel_y = self.x.strides[3] // self.x.itemsize, self.y.strides[3] // self.y.itemsize
        per_weight = g.taps * g.cg
        if direction == "forward":
            gemm.a, gemm.b, gemm.c = x, w, y
            leads, items = (pixel_x, per_weight, pixel_y), (g.cg, g.kg * per_weight, g.kg)
            image, rows = self.x, self.y
        elif direction == "backward_data":
            gemm.a, gemm.b, gemm.c = y, w + tap * self.w.itemsize, x + first * item
            leads, items = (pixel_y, per_weight, pixel_x), (g.kg, g.kg * per_weight, g.cg)
            image, rows = self.y, self.x
        else:
            gemm.a, gemm.b, gemm.c = y, x, w
            leads, items = (pixel_y, pixel_x, per_weight), (g.kg, g.cg, g.kg * per_weight)
            image, rows = self.x, self.y
        gemm.lda, gemm.ldb, gemm.ldc = leads
        gemm.stride_a, gemm.stride_b, gemm.stride_c = items
        gemm.m, gemm.n, gemm.k, gemm.batch = phase.m, phase.n, phase.k, phase.batch
        gemm.alpha, gemm.clamp_lo, gemm.clamp_hi = self.alpha, -0.5, 0.75
        own = phase.n
        if self.bias is not None:
            gemm.bias = Operand(self.address(self.bias), 0, 1, own)
        backward = direction == "backward_data"
        args.images, args.groups = g.n, g.groups
        args.channels = g.kg if backward else g.cg
        args.channels_multiplier, args.channels_shift = divisor(args.channels)
        args.groups_multiplier, args.groups_shift = divisor(g.groups)
        args.image_n, args.image_g, args.image_c = _strides(image)[0], args.channels, 1
        args.row_n, args.row_g, args.row_c = _strides(rows)[0], rows.shape[-1] // g.groups, 1
        weights = (g.kg * per_weight, 1, per_weight) if backward else (g.kg * per_weight, per_weight, 1)
        args.weight_g, args.weight_n, args.weight_c = weights
        if config.accumulate:
            args.acc = self.address(self.before) + (first * item if backward else 0)
        operands = (Operand * max(len(self.d), 1))()
        for place, array in zip(operands, self.d, strict=False):
            place.ptr, place.row_stride, place.col_stride = self.address(array), array.strides[3] // array.itemsize, 1
            place.batch_stride = own
        self.keep.append(operands)
        gemm.d = operands
        for i, axis in enumerate(phase.axes):
            self._axis(args.axes[i], axis, _strides(image)[1 + i], _strides(rows)[1 + i], weight_strides[i])

    def _axis(self, args: AxisArgs, axis: Axis, image: int, rows: int, weights: int) -> None:
        for name in ("rows", "size", "taps", "row_step", "tap_step", "origin"):
            setattr(args, name, getattr(axis, name))
        args.image_stride, args.row_stride = image, rows * axis.row_every
        args.tap_stride = weights * axis.tap_every
        args.rows_multiplier, args.rows_shift = divisor(axis.rows)
        args.taps_multiplier, args.taps_shift = divisor(axis.taps) if axis.taps else (0, 0)

    # ---- the truth ----

    def truth(self) -> tuple[Array, Array]:
        """The exact result, and the sum of the products' magnitudes."""
        x, y, w = (array.astype(np.float64) for array in (self.x, self.y, self.w))
        shape, direction = self.shape, self.config.direction

        def apply(change: Any) -> Array:
            if direction == "forward":
                return convolve(shape, change(x), change(w))
            if direction == "backward_data":
                return convolve_backward_data(shape, change(y), change(w))
            return convolve_backward_weight(shape, change(x), change(y))

        want = apply(lambda array: array) * self.alpha
        bound = apply(np.abs) * abs(self.alpha)
        if self.bias is not None:
            want = want + self.bias.astype(np.float64)
        for d in self.d:
            want = want + d.astype(np.float64) if "Add" in self.config.binary else want * d.astype(np.float64)
        if self.config.accumulate:
            want = want + self.before.astype(np.float64)
        return UNARY[self.config.unary](want), bound

    def check(self) -> None:
        want, magnitude = self.truth()
        got = self.result
        if self.config.c == "int32" and self.bias is None and not self.d and self.alpha == 1.0:
            np.testing.assert_array_equal(got, want.astype(np.int64))
            return
        wide, unit = got.astype(np.float64), UNIT.get(self.config.c, 0.5)
        assert np.all(np.isfinite(wide)), (self.config, self.shape, np.argwhere(~np.isfinite(wide))[:4])
        error, size = np.abs(wide - want), np.abs(want)
        allowed = 2 * unit * size + 2.0**-20 * (magnitude + size + 1)
        if "Multiply" in self.config.binary:
            allowed += 2.0**-13 * (magnitude + 1)
        worst = np.unravel_index(np.argmax(error - allowed), error.shape)
        assert np.all(error <= allowed), (
            self.config, self.shape, "at", worst, "got", wide[worst], "want", want[worst], int((error > allowed).sum()),
        )  # fmt: skip
        if self.whole[self.result.ctypes.data].shape != self.result.shape:
            between = self.whole[self.result.ctypes.data][..., self.result.shape[-1] :].astype(np.float64)
            assert np.all(np.isnan(between) | (between == -123456789)), "wrote between pixels"

    # ---- what a launch needs ----

    def tiles(self) -> list[int]:
        """Output tiles of every product; of depthwise kernels, workgroups."""
        if not self.config.is_matrix:
            repeats, rows, run = self.config.pixels
            lanes = (1 if self.config.merged else self.config.threads // self.config.threads_across) * repeats
            return [
                self._blocks(args)
                * -(
                    -(
                        int(args.images)
                        * args.axes[0].rows
                        * -(-args.axes[1].rows // rows)
                        * -(-args.axes[2].rows // run)
                    )
                    // lanes
                )
                for args in self.table
            ]
        m, n, _ = self.config.tile
        return [-(-int(a.gemm.m) // m) * -(-int(a.gemm.n) // n) * int(a.gemm.batch) for a in self.table]

    def _blocks(self, args: ConvArgs) -> int:
        """Without a product: workgroups along channels, or units."""
        config, g = self.config, self.geometry
        if config.merged:
            return -(-g.c // (config.channel_tile or 8 * config.team))
        if config.kind == "depthwise":
            units = -(-g.groups // (1 if config.channels_first else config.vectors[0]))
        elif config.direction == "backward_weight":
            taps = g.filter[0] * g.filter[1] * (1 if config.is_fixed else g.filter[2])
            units = taps * -(-g.kg // config.vectors[0]) * (g.cg // config.vectors[1]) * g.groups
        else:
            units = g.groups * -(-int(args.gemm.n) // config.vectors[2])
        return -(-units // config.threads_across)

    def grid(self) -> int:
        """Workgroups of the launch."""
        if self.config.direction == "backward_weight" and not self.config.is_matrix:
            return self._blocks(self.table[0]) * self.split_k
        return sum(self.tiles()) * (self.split_k if self.config.is_matrix else 1)

    def tasks(self) -> bytes:
        """``ConvTask``s, one after the other."""
        found, first = b"", 0
        for args, tiles in zip(self.table, self.tiles(), strict=True):
            plain = ConvArgs.from_buffer_copy(args)
            plain.gemm.d = None
            count = len(self.config.d)
            operands = bytes(ctypes.string_at(args.gemm.d, 32 * count)) if count else b""
            found += bytes(plain) + first.to_bytes(8, "little") + operands
            first += tiles
        return found

    def workspace(self) -> int:
        """Bytes of partial sums."""
        if self.config.converts:
            # [slice][item][m][n]
            return self.split_k * self.w.size * 4
        return (
            sum(self.tiles()) * self.split_k * self.config.tile[0] * self.config.tile[1] * 4 if self.split_k > 1 else 0
        )

    def shared_bytes(self) -> int:
        """Of a workgroup."""
        config = self.config
        if config.merged:
            return config.merged_bytes
        if not config.is_matrix and config.direction == "backward_weight":
            return config.threads * config.vectors[0] * 4
        if not config.is_matrix:
            gathered = int(self.table[0].channels) if config.kind == "direct" else 1
            own = config.vectors[2] if config.kind == "direct" else 1 if config.channels_first else config.vectors[0]
            return self.geometry.taps * gathered * config.threads_across * own * 4
        return config.shared_bytes

    def guards(self) -> list[Guarded]:
        return [memory for memory in self.keep if isinstance(memory, Guarded)]


def _strides(array: Array) -> list[int]:
    """In elements; 0 of sizes of 1."""
    pairs = zip(array.strides, array.shape, strict=True)
    return [stride // array.itemsize if size > 1 else 0 for stride, size in pairs]
