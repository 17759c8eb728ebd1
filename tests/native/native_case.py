"""One GEMM call with random operands in guarded memory, and the truth to compare it with."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from native_harness import DTYPES, Config, GemmArgs, Guarded, Library, Operand, ProblemArgs, Runtime, guarded

Array = np.ndarray[Any, Any]

UNARY = {
    "PassThrough": lambda x: x,
    "Relu": lambda x: np.where(x < 0, 0.0, x),
    "Gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))),
    "FastGelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "Silu": lambda x: x * 0.5 * (1 + np.tanh(x / 2)),
    "Sigmoid": lambda x: 0.5 * (1 + np.tanh(x / 2)),
    "Tanh": np.tanh,
    "HardSwish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "Clamp": lambda x: np.clip(x, -0.5, 0.75),
    # The lower bound of Clamp is the factor below zero.
    "LeakyRelu": lambda x: np.where(x < 0, -0.5 * x, x),
    "Elu": lambda x: np.where(x < 0, -0.5 * np.expm1(np.minimum(x, 0)), x),
    "Softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "Mish": lambda x: x * np.tanh(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))),
}


@dataclass
class Sizes:
    """One problem of a call; the paddings widen the leading dimensions beyond the tightest ones."""

    m: int
    n: int
    k: int
    batch: int = 1
    pad_a: int = 0
    pad_b: int = 0
    pad_c: int = 0
    broadcast_a: bool = False
    broadcast_b: bool = False


@dataclass
class Call:
    """Operands of every problem, in guarded memory, ready to launch."""

    config: Config
    sizes: list[Sizes]
    rng: np.random.Generator
    alpha: float = 1.0
    split_k: int = 1
    at_end: bool = True
    d_layout: str = "full"
    keep: list[Any] = field(default_factory=list)
    views: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = (ProblemArgs * len(self.sizes))()
        for args, sizes in zip(self.table, self.sizes, strict=True):
            self._fill(args, sizes)
        self.args = GemmArgs(self.table, len(self.sizes), None, 0, self.split_k)

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

    def matrix(
        self, dtype: str, rows: int, cols: int, col_major: bool, pad: int, batch: int
    ) -> tuple[Array, int, int, int]:
        """[batch, rows, cols] view, leading dimension, batch stride and address."""
        lines, length = (cols, rows) if col_major else (rows, cols)
        ld = length + pad
        stride = max((lines - 1) * ld + length, 0) if length and lines else 0
        flat = self.place(self.random(dtype, stride * batch))
        item = flat.dtype.itemsize
        steps = (item, ld * item) if col_major else (ld * item, item)
        bits = flat.view(f"u{item}")  # NumPy cannot stride the extension types themselves
        view = np.lib.stride_tricks.as_strided(bits, (batch, rows, cols), (stride * item, *steps))
        return view.view(flat.dtype), ld, stride, flat.ctypes.data

    def operand(self, dtype: str, shape: tuple[int, int, int], layout: str) -> tuple[Array, Operand]:
        """An element-wise operand broadcast to `shape` = (batch, rows, cols)."""
        batch, rows, cols = shape
        extent = {
            "full": (batch, rows, cols),
            "row": (1, 1, cols),
            "column": (1, rows, 1),
            "scalar": (1, 1, 1),
            "transposed": (batch, cols, rows),
            "row_batch": (batch, 1, cols),
        }[layout]
        flat = self.place(self.random(dtype, math.prod(extent)))
        array = flat.reshape(extent)
        if layout == "transposed":
            array = array.transpose(0, 2, 1)
        strides = [s // flat.dtype.itemsize if e > 1 else 0 for s, e in zip(array.strides, array.shape, strict=True)]
        if layout in ("full", "row", "row_batch"):
            strides[2] = 1
        return np.broadcast_to(array, shape), Operand(flat.ctypes.data, strides[1], strides[2], strides[0])

    def _fill(self, args: ProblemArgs, s: Sizes) -> None:
        config, shape = self.config, (s.batch, s.m, s.n)
        a, args.lda, args.stride_a, args.a = self.matrix(
            config.a, s.m, s.k, config.a_col, s.pad_a, 1 if s.broadcast_a else s.batch
        )
        b, args.ldb, args.stride_b, args.b = self.matrix(
            config.b, s.k, s.n, config.b_col, s.pad_b, 1 if s.broadcast_b else s.batch
        )
        args.stride_a, args.stride_b = (0 if s.broadcast_a else args.stride_a), (0 if s.broadcast_b else args.stride_b)
        c, args.ldc, args.stride_c, args.c = self.matrix(config.c, s.m, s.n, False, s.pad_c, s.batch)
        poison(c)
        args.m, args.n, args.k, args.batch = s.m, s.n, s.k, s.batch
        args.alpha, args.clamp_lo, args.clamp_hi = self.alpha, -0.5, 0.75
        view: dict[str, Any] = {"a": a, "b": b, "c": c}
        if config.scale_a != "none":
            view["scale_a"], args.scale_a = self.operand(
                "fp32", shape, "column" if config.scale_a == "row" else "scalar"
            )
        if config.scale_b != "none":
            view["scale_b"], args.scale_b = self.operand(
                "fp32", shape, "row" if config.scale_b == "column" else "scalar"
            )
        if config.bias:
            view["bias"], args.bias = self.operand(config.bias, shape, "row")
        ds = [self.operand(dtype, shape, self.d_layout) for dtype in config.d]
        view["d"] = [array for array, _ in ds]
        operands = (Operand * max(len(ds), 1))(*(operand for _, operand in ds))
        self.keep.append(operands)
        args.d = operands
        self.views.append(view)

    def truth(self, index: int) -> tuple[Array, Array]:
        """The exact result in float64, and what the accumulators' rounding is relative to (sum of magnitudes)."""
        view, config = self.views[index], self.config
        a, b = view["a"].astype(np.float64), view["b"].astype(np.float64)
        x, bound = np.matmul(a, b) * self.alpha, np.matmul(np.abs(a), np.abs(b)) * abs(self.alpha)
        for name in ("scale_a", "scale_b"):
            if name in view:
                x, bound = x * view[name].astype(np.float64), bound * np.abs(view[name].astype(np.float64))
        if "bias" in view:
            x = x + view["bias"].astype(np.float64)
        for d in view["d"]:
            x = x * d.astype(np.float64) if "Multiply" in config.binary else x + d.astype(np.float64)
        sizes = self.sizes[index]
        shape = (sizes.batch, sizes.m, sizes.n)
        return UNARY[config.unary](np.broadcast_to(x, shape)), np.broadcast_to(bound, shape)

    def pre_shuffle(self, library: Library, runtime: Runtime, team: int) -> None:
        """Replaces B of every problem by its packed form."""
        size = library.entry(self.config, "_packed_b")
        for args, sizes in zip(self.table, self.sizes, strict=True):
            bytes_ = size(ctypes.c_int64(args.n), ctypes.c_int64(args.k))
            items = 1 if sizes.broadcast_b else sizes.batch
            packed = Guarded(bytes_ * items, 64)
            packed.array(np.dtype(np.uint8), bytes_ * items)[:] = 0xFF
            one = ProblemArgs.from_buffer_copy(args)
            one.c, one.batch = packed.address, items
            table = (ProblemArgs * 1)(one)
            runtime.launch(library.entry(self.config, "_pack_b"), GemmArgs(table, 1, None, 0, 1), team)
            args.b, args.ldb, args.stride_b = packed.address, 0, (0 if sizes.broadcast_b else bytes_)
            self.keep.append(packed)

    def launch(self, library: Library, runtime: Runtime, team: int | None = None, pool: int | None = None) -> None:
        team = team or self.config.team
        if self.config.preshuffle:
            self.pre_shuffle(library, runtime, team)
        bytes_ = library.entry(self.config, "_workspace")(ctypes.byref(self.args))
        workspace = Guarded(bytes_, 64)
        workspace.array(np.dtype(np.uint8), bytes_)[:] = 0xFF  # NaN in every float type
        self.args.workspace, self.args.workspace_bytes = workspace.address, bytes_
        if self.split_k > 1:
            runtime.launch(library.entry(self.config, "_partial"), self.args, team, pool)
            runtime.launch(library.entry(self.config, "_reduce"), self.args, team, pool)
        else:
            runtime.launch(library.entry(self.config), self.args, team, pool)
        self.args.workspace = None  # it goes out of scope here

    def check(self) -> None:
        for index in range(len(self.sizes)):
            compare(self.config, self.views[index]["c"], *self.truth(index), self.sizes[index], self.alpha)


def poison(c: Array) -> None:
    c[...] = np.array(-123456789).astype(c.dtype) if c.dtype.kind == "i" else np.array(np.nan).astype(c.dtype)


def is_exact(config: Config, alpha: float) -> bool:
    plain = (
        config.bias is None
        and not config.d
        and config.scale_a == config.scale_b == "none"
        and config.unary == "PassThrough"
    )
    return config.c == "int32" and plain and alpha == 1.0


UNIT = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8, "int32": 2.0**-24}  # half a last place, relative


def compare(config: Config, got: Array, want: Array, magnitude: Array, sizes: Sizes, alpha: float) -> None:
    """int8 to int32 exactly; else every element within the output's rounding plus that of the fp32 accumulation.

    The Frobenius norm is bounded closer: one output rounding plus 1e-6 sqrt(k).
    """
    if got.size == 0:
        return
    if is_exact(config, alpha):
        np.testing.assert_array_equal(got, want.astype(np.int64))
        return
    unit, wide = UNIT[config.c], got.astype(np.float64)
    assert np.all(np.isfinite(wide)), (config, sizes)
    error, size = np.abs(wide - want), np.abs(want)
    allowed = 2 * unit * size + 2.0**-20 * (magnitude + size + 1)
    if "Multiply" in config.binary:  # D values beyond 1 enlarge what went before
        allowed += 2.0**-13 * (magnitude + 1)
    if config.c == "int32":
        allowed += 0.5
    worst = np.unravel_index(np.argmax(error - allowed), error.shape)
    assert np.all(error <= allowed), (
        config,
        sizes,
        "error",
        error[worst],
        "allowed",
        allowed[worst],
        "of",
        size[worst],
    )
    norm = np.linalg.norm(size)
    if norm > 0 and config.c != "int32":
        simple = config.binary == config.unary == "PassThrough"
        bound = unit + 1e-6 * math.sqrt(max(sizes.k, 16)) if simple else 1.5 * unit + 2e-5
        # Where an activation is next to zero it is a difference of numbers of order one, rounded to fp32.
        slack = 0.0 if simple else 2.0**-23 * math.sqrt(size.size)
        relative = np.linalg.norm(error) / norm
        assert relative <= bound + slack / norm, (config, sizes, "relative Frobenius error", relative, "bound", bound)
