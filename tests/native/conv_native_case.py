"""One convolution call with random operands in guarded memory, its products, and the truth to compare it with.

Everything is worked out here once more, from the definition of a convolution: nothing comes from the plugin.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from native_case import UNARY, Array, Sizes, compare, poison
from native_harness import DTYPES, Config, Guarded, Library, Operand, ProblemArgs, Runtime, guarded

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class ConvConfig(Config):
    """One kernel configuration, as a generated source unit states it."""

    direction: str = "forward"
    kind: str = "implicit"
    channels_first: bool = False
    accumulate: bool = False
    linear_rows: bool = True
    split_k: int = 1
    channel_tile: int = 0
    pixel_tile: Triple = (0, 0, 0)
    filter: Triple = (0, 0, 0)
    stride: Triple = (0, 0, 0)
    dilation: Triple = (0, 0, 0)

    @property
    def split(self) -> bool:
        return self.split_k > 1

    def source(self, name: str) -> str:
        lines = self.lines()
        constants: dict[str, object] = {
            "tw::Direction direction": f"tw::Direction::{self.direction}",
            "tw::ConvKind kind": f"tw::ConvKind::{self.kind}",
            "int ndim": 3,
            "int wave_k": 1,
            "int split_k": self.split_k,
            "int channel_tile": self.channel_tile,
            "bool grouped": "false",
            "bool unpadded": "false",
        }
        for key in ("channels_first", "accumulate", "linear_rows"):
            constants[f"bool {key}"] = str(getattr(self, key)).lower()
        constants["bool bias_rows"] = constants["bool channels_first"]
        for key in ("pixel_tile", "filter", "stride", "dilation"):
            constants[f"int {key}[3]"] = "{" + ", ".join(map(str, getattr(self, key))) + "}"
        lines += [f"static constexpr {key} = {value};" for key, value in constants.items()]
        body = "\n  ".join(lines)
        exports = "TW_CONV_SPLIT" if self.split else "TW_CONV_MAIN"
        return (
            f"namespace {{ struct Config_{name} {{\n  {body}\n}}; }}\n"
            f"{exports}({name}, Config_{name})\nTW_CONV_WORKSPACE({name}, Config_{name})\n"
        )


# ---- the argument structs of core/args/conv.h ----


class Divisor(ctypes.Structure):
    _fields_ = [("multiplier", ctypes.c_int64), ("shift", ctypes.c_int64)]


class AxisArgs(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "rows", "size", "taps", "row_step", "tap_step", "origin", "image_stride", "row_stride", "tap_stride",
            )
        ),
        *((name, Divisor) for name in ("by_rows", "by_taps")),
    ]  # fmt: skip


class ConvProblemArgs(ctypes.Structure):
    _fields_ = [
        ("gemm", ProblemArgs),
        ("axes", AxisArgs * 3),
        *(
            (name, ctypes.c_int64)
            for name in (
                "images", "groups", "channels", "image_n", "image_g", "image_c", "row_n", "row_g", "row_c",
                "weight_g", "weight_n", "weight_c",
            )
        ),
        *((name, Divisor) for name in ("by_channels", "by_groups")),
        ("acc", ctypes.c_void_p),
    ]  # fmt: skip


class ConvArgs(ctypes.Structure):
    _fields_ = [
        ("problems", ctypes.POINTER(ConvProblemArgs)),
        ("count", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("split_k", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class Shape:
    """What is convolved; sizes in the order D, H, W."""

    n: int = 2
    groups: int = 1
    cg: int = 8
    kg: int = 8
    size: Triple = (1, 7, 9)
    filter: Triple = (1, 3, 3)
    stride: Triple = (1, 1, 1)
    dilation: Triple = (1, 1, 1)
    begin: Triple = (0, 1, 1)
    end: Triple = (0, 1, 1)

    @property
    def out(self) -> Triple:
        sizes = [
            (size + begin + end - dilation * (taps - 1) - 1) // stride + 1
            for size, taps, stride, dilation, begin, end in zip(
                self.size, self.filter, self.stride, self.dilation, self.begin, self.end, strict=True
            )
        ]
        return sizes[0], sizes[1], sizes[2]

    @property
    def flops(self) -> int:
        outputs = self.n * self.groups * self.kg * math.prod(self.out)
        return 2 * outputs * self.cg * math.prod(self.filter)


def forward(shape: Shape, x: Array, w: Array) -> Array:
    """[N, G, Cg, D, H, W] with [G, Kg, Cg, taps] gives [N, G, Kg, out]."""
    y = np.zeros((shape.n, shape.groups, shape.kg, *shape.out))
    for taps in itertools.product(*(range(count) for count in shape.filter)):
        inside, spots = zip(*(_meeting(shape, axis, tap) for axis, tap in enumerate(taps)), strict=True)
        if all(part.size for part in inside):
            window = x[(slice(None),) * 3 + np.ix_(*spots)]
            y[(slice(None),) * 3 + np.ix_(*inside)] += np.einsum(
                "ngcdhw,gkc->ngkdhw", window, w[:, :, :, taps[0], taps[1], taps[2]], optimize=True
            )
    return y


def backward_data(shape: Shape, dy: Array, w: Array) -> Array:
    dx = np.zeros((shape.n, shape.groups, shape.cg, *shape.size))
    for taps in itertools.product(*(range(count) for count in shape.filter)):
        inside, spots = zip(*(_meeting(shape, axis, tap) for axis, tap in enumerate(taps)), strict=True)
        if all(part.size for part in inside):
            window = dy[(slice(None),) * 3 + np.ix_(*inside)]
            dx[(slice(None),) * 3 + np.ix_(*spots)] += np.einsum(
                "ngkdhw,gkc->ngcdhw", window, w[:, :, :, taps[0], taps[1], taps[2]], optimize=True
            )
    return dx


def backward_weight(shape: Shape, x: Array, dy: Array) -> Array:
    dw = np.zeros((shape.groups, shape.kg, shape.cg, *shape.filter))
    for taps in itertools.product(*(range(count) for count in shape.filter)):
        inside, spots = zip(*(_meeting(shape, axis, tap) for axis, tap in enumerate(taps)), strict=True)
        if all(part.size for part in inside):
            there, here = x[(slice(None),) * 3 + np.ix_(*spots)], dy[(slice(None),) * 3 + np.ix_(*inside)]
            dw[:, :, :, taps[0], taps[1], taps[2]] = np.einsum("ngcdhw,ngkdhw->gkc", there, here, optimize=True)
    return dw


def _meeting(shape: Shape, axis: int, tap: int) -> tuple[Array, Array]:
    """The pixels of the result that this tap takes into the image, and the coordinates that it meets there."""
    pixels = np.arange(shape.out[axis])
    spots = pixels * shape.stride[axis] + tap * shape.dilation[axis] - shape.begin[axis]
    inside = (spots >= 0) & (spots < shape.size[axis])
    return pixels[inside], spots[inside]


@dataclass
class Tensor:
    """A logical array over flat guarded memory; strides in elements."""

    flat: Array
    view: Array
    strides: tuple[int, ...]

    @property
    def address(self) -> int:
        return int(self.view.ctypes.data)


@dataclass
class ConvCall:
    """Operands in guarded memory, ready to launch. ``gap`` widens the distance of pixels beyond the tightest one."""

    config: ConvConfig
    shape: Shape
    rng: np.random.Generator
    alpha: float = 1.0
    at_end: bool = True
    gap: int = 0
    filter_order: str = "gkyxc"
    keep: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        s, config = self.shape, self.config
        first = "w" if config.channels_first else "x"
        image_type = config.b if config.channels_first or config.direction == "backward_weight" else config.a
        other_type = config.a if first == "w" or config.direction == "backward_weight" else config.b
        self.types = {"image": image_type, "other": other_type}
        self.x = self._image("x", s.cg, s.size)
        self.y = self._image("y", s.kg, s.out)
        self.w = self._filter()
        self.result = {"forward": self.y, "backward_data": self.x, "backward_weight": self.w}[config.direction]
        self.before = np.array(self.result.view, copy=True) if config.accumulate else None
        if not config.accumulate:
            poison(self.result.view)
        self.untouched = self.result.flat.view(np.uint8).copy()
        self._operands()
        problems = self.products()
        self.table = (ConvProblemArgs * max(len(problems), 1))(*problems)
        self.args = ConvArgs(self.table, len(problems), None, 0, config.split_k)

    # ---- operands ----

    def dtype_of(self, name: str) -> str:
        direction, config = self.config.direction, self.config
        roles = {
            "forward": {"x": self.types["image"], "w": self.types["other"], "y": config.c},
            "backward_data": {"y": self.types["image"], "w": self.types["other"], "x": config.c},
            "backward_weight": {"x": self.types["image"], "y": self.types["other"], "w": config.c},
        }
        return roles[direction][name]

    def random(self, dtype: str, count: int) -> Array:
        if dtype == "int8":
            return self.rng.integers(-128, 128, count).astype(np.int8)
        if dtype == "int32":
            return self.rng.integers(-1000, 1000, count).astype(np.int32)
        return self.rng.standard_normal(count).astype(np.float32).astype(DTYPES[dtype])

    def place(self, values: Array) -> Array:
        memory, array = guarded(values, self.at_end)
        self.keep.append(memory)
        return array

    def tensor(self, dtype: str, sizes: tuple[int, ...], order: tuple[int, ...], gap_after: int) -> Tensor:
        """Axes from the outermost in memory to the innermost are ``order``; ``gap`` elements follow each run of the
        axes behind the first ``gap_after`` of them.
        """
        strides, step = [0] * len(sizes), 1
        for position, axis in reversed(list(enumerate(order))):
            strides[axis] = step
            step *= sizes[axis]
            if position == gap_after:
                step += self.gap
        span = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1 if all(sizes) else 0
        flat = self.place(self.random(dtype, span))
        item = flat.dtype.itemsize
        bits = flat.view(f"u{item}")
        view = np.lib.stride_tricks.as_strided(bits, sizes, [stride * item for stride in strides]).view(flat.dtype)
        return Tensor(flat, view, tuple(strides))

    def _image(self, name: str, channels: int, size: Triple) -> Tensor:
        sizes = (self.shape.n, self.shape.groups, channels, *size)
        order = (0, 1, 2, 3, 4, 5) if self.config.channels_first else (0, 3, 4, 5, 1, 2)
        return self.tensor(self.dtype_of(name), sizes, order, 2 if self.config.channels_first else 4)

    def _filter(self) -> Tensor:
        s = self.shape
        sizes = (s.groups, s.kg, s.cg, *s.filter)
        order = {"gkyxc": (0, 1, 3, 4, 5, 2), "gkcyx": (0, 1, 2, 3, 4, 5)}[self.filter_order]
        return self.tensor(self.dtype_of("w"), sizes, order, 2)

    def _operands(self) -> None:
        """Bias, scales and D operands: what enters the epilogue, as arrays of the result's shape."""
        config, result = self.config, self.result.view
        channels = result.shape[2] if config.direction != "backward_weight" else 1
        groups = self.shape.groups
        self.extra: dict[str, Any] = {"d": []}
        self.operands: dict[str, Operand] = {}

        def vector(dtype: str) -> tuple[Array, Operand]:
            flat = self.place(self.random(dtype, groups * channels))
            rows, columns = (1, 0) if config.channels_first else (0, 1)
            operand = Operand(flat.ctypes.data, rows, columns, channels)
            return flat.astype(np.float64).reshape(1, groups, channels, 1, 1, 1), operand

        if config.bias:
            self.extra["bias"], self.operands["bias"] = vector(config.bias)
        for name in ("scale_a", "scale_b"):
            kind = getattr(config, name)
            if kind == "tensor":
                flat = self.place(self.random("fp32", 1))
                self.extra[name], self.operands[name] = flat.astype(np.float64), Operand(flat.ctypes.data, 0, 0, 0)
            elif kind != "none":
                self.extra[name], self.operands[name] = vector("fp32")
        table = []
        for dtype in config.d:
            order = (0, 1, 2, 3, 4, 5) if config.channels_first else (0, 3, 4, 5, 1, 2)
            d = self.tensor(dtype, result.shape, order, 2 if config.channels_first else 4)
            self.extra["d"].append(d.view.astype(np.float64))
            pixel, channel = d.strides[5], d.strides[2]
            if config.channels_first:  # one distance from item to item
                table.append(Operand(d.address, channel, pixel, d.strides[1] if groups > 1 else d.strides[0]))
            else:
                table.append(Operand(d.address, pixel, channel, d.strides[1]))
        self.d_table = (Operand * max(len(table), 1))(*table)

    # ---- products ----

    def products(self) -> list[ConvProblemArgs]:
        s, config = self.shape, self.config
        if config.direction != "backward_data":
            axes = [
                (s.out[i], s.size[i], s.filter[i], s.stride[i], s.dilation[i], -s.begin[i], 0, 1, 0, 1)
                for i in range(3)
            ]
            return [self._product(axes)]
        return [
            self._product([self._phase(axis, phase) for axis, phase in enumerate(phases)])
            for phases in itertools.product(*(range(min(s.stride[i], s.size[i])) for i in range(3)))
        ]

    def _phase(self, axis: int, phase: int) -> tuple[int, ...]:
        """The pixels phase, phase + stride, ... of dx along one axis, and the taps that reach them."""
        s = self.shape
        size, taps, stride, dilation, pad = (
            s.size[axis], s.filter[axis], s.stride[axis], s.dilation[axis], s.begin[axis],
        )  # fmt: skip
        rows = len(range(phase, size, stride))
        every = stride // math.gcd(stride, dilation)
        meeting = [tap for tap in range(taps) if (phase + pad - tap * dilation) % stride == 0]
        if not meeting:
            return rows, s.out[axis], 0, 1, 0, 0, phase, stride, 0, every
        first = meeting[0]
        assert meeting == list(range(first, taps, every))
        origin = (phase + pad - first * dilation) // stride
        return (
            rows, s.out[axis], len(meeting), 1, -(dilation // math.gcd(stride, dilation)), origin, phase, stride,
            first, every,
        )  # fmt: skip

    def _product(self, axes: list[tuple[int, ...]]) -> ConvProblemArgs:
        s, config, args = self.shape, self.config, ConvProblemArgs()
        backward, weight = config.direction == "backward_data", config.direction == "backward_weight"
        image, rows = (self.y, self.x) if backward else (self.x, self.y)
        own, gathered = (s.cg, s.kg) if backward else (s.kg, s.cg)
        row_at = tap_at = 0
        for i, (args_axis, axis) in enumerate(zip(args.axes, axes, strict=True)):
            count, size, taps, row_step, tap_step, origin, first_row, row_every, first_tap, tap_every = axis
            args_axis.rows, args_axis.size, args_axis.taps = count, size, taps
            args_axis.row_step, args_axis.tap_step, args_axis.origin = row_step, tap_step, origin
            args_axis.image_stride = image.strides[3 + i]
            args_axis.row_stride = rows.strides[3 + i] * row_every
            args_axis.tap_stride = self.w.strides[3 + i] * tap_every
            row_at += rows.strides[3 + i] * first_row
            tap_at += self.w.strides[3 + i] * first_tap
        pixels, taps_all = (math.prod(axis[which] for axis in axes) for which in (0, 2))
        args.images, args.groups, args.channels = s.n, s.groups, gathered
        args.image_n, args.image_g, args.image_c = image.strides[:3]
        args.row_n, args.row_g, args.row_c = rows.strides[:3]
        own_stride, gathered_stride = self.w.strides[1:3]
        if backward:
            own_stride, gathered_stride = gathered_stride, own_stride
        args.weight_g, args.weight_n, args.weight_c = self.w.strides[0], own_stride, gathered_stride
        gemm = args.gemm
        item = self.result.flat.dtype.itemsize
        result_at = self.result.address + (0 if weight else row_at * item)
        other_at = self.w.address + tap_at * self.w.flat.dtype.itemsize
        gemm.c = result_at
        if weight:
            gemm.a, gemm.b = rows.address, image.address
            gemm.m, gemm.n, gemm.k, gemm.batch = s.kg, taps_all * s.cg, s.n * pixels, s.groups
            gemm.ldc, gemm.stride_c = self.w.strides[1], self.w.strides[0]
            gemm.stride_a, gemm.stride_b = rows.strides[1], image.strides[1]
        elif config.channels_first:
            gemm.a, gemm.b = other_at, image.address
            gemm.m, gemm.n, gemm.k, gemm.batch = own, pixels, taps_all * gathered, s.n * s.groups
            gemm.ldc, gemm.stride_c = rows.strides[2], rows.strides[1]
        else:
            gemm.a, gemm.b = image.address, other_at
            gemm.m, gemm.n, gemm.k, gemm.batch = s.n * pixels, own, taps_all * gathered, s.groups
            gemm.lda, gemm.ldc, gemm.stride_c = image.strides[5], args.axes[2].row_stride, rows.strides[1]
        gemm.alpha, gemm.clamp_lo, gemm.clamp_hi = self.alpha, -0.5, 0.75
        for name, operand in self.operands.items():
            setattr(gemm, name, operand)
        gemm.d = self.d_table
        args.acc = result_at if config.accumulate else None
        return args

    # ---- the call and its check ----

    def truth(self) -> tuple[Array, Array]:
        """The exact result in float64, and what the accumulators' rounding is relative to (sum of magnitudes)."""
        operands = {
            "forward": (forward, self.x, self.w),
            "backward_data": (backward_data, self.y, self.w),
            "backward_weight": (backward_weight, self.x, self.y),
        }
        function, one, other = operands[self.config.direction]
        a, b = one.view.astype(np.float64), other.view.astype(np.float64)
        x, bound = function(self.shape, a, b), function(self.shape, np.abs(a), np.abs(b))
        x, bound = x * self.alpha, bound * abs(self.alpha)
        for name in ("scale_a", "scale_b"):
            if name in self.extra:
                x, bound = x * self.extra[name], bound * np.abs(self.extra[name])
        if "bias" in self.extra:
            x = x + self.extra["bias"]
        if self.before is not None:
            x = x + self.before.astype(np.float64)
        for d in self.extra["d"]:
            x = x * d if "Multiply" in self.config.binary else x + d
        return UNARY[self.config.unary](x), bound

    def launch(self, library: Library, runtime: Runtime, team: int | None = None) -> None:
        bytes_ = library.entry(self.config, "_workspace")(ctypes.byref(self.args))
        workspace = Guarded(bytes_, 64)
        workspace.array(np.dtype(np.uint8), bytes_)[:] = 0xFF  # NaN in every float type
        self.args.workspace, self.args.workspace_bytes = workspace.address, bytes_
        team = team or self.config.team
        for suffix in ("_partial", "_reduce") if self.config.split else ("",):
            runtime.launch(library.entry(self.config, suffix), self.args, team)
        self.args.workspace = None  # it goes out of scope here

    def check(self) -> None:
        sizes = Sizes(0, 0, int(self.table[0].gemm.k))
        compare(self.config, np.array(self.result.view), *self.truth(), sizes, self.alpha)
        inside = np.zeros(self.result.flat.shape, bool)
        np.lib.stride_tricks.as_strided(inside, self.result.view.shape, self.result.strides)[...] = True
        bytes_now = self.result.flat.view(np.uint8)
        outside = np.repeat(~inside, self.result.flat.dtype.itemsize)
        assert np.array_equal(bytes_now[outside], self.untouched[outside]), ("written beside the result", self.shape)
