"""Convolutions for the GPU kernels: problems in guarded memory, ready to launch, and what they should give."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from conv_gpu_config import ConvGpuConfig
from conv_gpu_truth import Shape, convolve, convolve_backward_data, convolve_backward_weight
from native_case import UNARY, UNIT
from native_harness import DTYPES, Guarded, Operand, ProblemArgs, guarded

from tilewright_grouped_conv.launch.fast_divmod import divisor
from tilewright_grouped_conv.problem.implicit_gemm import Axis, Phase, phases_of
from tilewright_grouped_conv.vocabulary import Direction

Array = np.ndarray[Any, Any]

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
    skew: int = 0
    """Elements from an address that is a multiple of 16 bytes to the weights, of what is not their gradient."""
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
        self.w = self._tensor(types["w"], weights, 0) if not self.skew else self._skewed(types["w"], weights)
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

    def _skewed(self, dtype: str | None, shape: tuple[int, ...]) -> Array:
        assert dtype is not None
        count = math.prod(shape)
        flat = self._place(self._random(dtype, count + 2 * self.skew))
        return flat[self.skew : self.skew + count].reshape(shape)

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
