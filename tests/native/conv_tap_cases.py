"""Convolutions whose steps keep within a tap (``gpu/conv/taps.hpp``): channels fill them, and all else is odd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conv_gpu_config import ConvGpuConfig
from conv_gpu_truth import Shape

import tilewright_arch

ARCHS = ("gfx942", "gfx950", "gfx90a")


@dataclass(frozen=True)
class TapConfig(ConvGpuConfig):
    """A kernel of the template, whose loop is that of ``compv4``."""

    wave_size: int = 64
    stages: int = 2
    warp_tile: tuple[int, int, int] = (16, 16, 16)
    turned: bool = False
    """True if the LDS transposes weights as it is read, which that of gfx950 can."""

    @property
    def header(self) -> str:
        return "conv/turned_taps.hpp" if self.turned else "conv/taps.hpp"


DATA: dict[str, Any] = {"direction": "backward_data", "b_col": False}
ONE_SLICE = TapConfig(tile=(48, 32, 32), wave=(1, 2))
"""Rows that are no multiple of the threads' lines."""
TWO_SLICES = TapConfig(tile=(64, 64, 32), wave=(2, 2), warp_tile=(32, 32, 8), epilogue="default")
DEEP = TapConfig(tile=(32, 64, 64), wave=(2, 2), a="bf16", b="bf16", c="bf16")
BYTES: dict[str, Any] = {"tile": (64, 32, 64), "wave": (2, 1), "vectors": (16, 16, 4)}

PLAIN = Shape(n=2, c=64, k=40, size=(1, 9, 7))
LINE = Shape(n=3, c=32, k=33, size=(1, 1, 37), filter=(1, 1, 32), begin=(0, 0, 30), end=(0, 0, 15), ndim=1)
EDGES = Shape(n=1, c=96, k=24, size=(1, 5, 11), filter=(1, 3, 5), begin=(0, 0, 4), end=(0, 3, 0))
"""An odd number of steps."""
STRIDED = Shape(n=2, c=128, k=72, groups=2, stride=(1, 2, 3), dilation=(1, 2, 1), begin=(0, 2, 1), end=(0, 1, 2))
POINT = Shape(n=3, c=32, k=16, size=(1, 5, 7), filter=(1, 1, 1), stride=(1, 2, 1), begin=(0, 0, 0), end=(0, 1, 0))
CUBE = Shape(
    n=1, c=64, k=48, groups=2, size=(5, 4, 6), filter=(3, 2, 3), stride=(2, 1, 2), dilation=(1, 2, 1), begin=(1, 1, 1),
    end=(1, 0, 1), ndim=3,
)  # fmt: skip
BACK = Shape(n=2, c=40, k=64, size=(1, 9, 7))
BACK_STRIDED = Shape(n=2, c=48, k=128, groups=2, stride=(1, 2, 3), dilation=(1, 2, 1), begin=(0, 2, 1), end=(0, 1, 2))
BACK_WIDE = Shape(n=1, c=200, k=32, size=(1, 3, 4))
BACK_CUBE = Shape(
    n=1, c=48, k=64, groups=2, size=(5, 4, 6), filter=(3, 2, 3), begin=(1, 1, 2), end=(1, 0, 1), ndim=3,
)  # fmt: skip

CASES: dict[str, tuple[TapConfig, list[dict[str, Any]]]] = {
    "forward": (
        ONE_SLICE,
        [{"shape": PLAIN}, {"shape": STRIDED, "gap": 8, "alpha": 0.5}, {"shape": EDGES}],
    ),
    "forward_point": (ONE_SLICE, [{"shape": POINT}]),
    "forward_two_slices": (TWO_SLICES, [{"shape": STRIDED}, {"shape": PLAIN, "gap": 16}]),
    "forward_deep": (DEEP, [{"shape": PLAIN}]),
    "forward_line": (ONE_SLICE.replace(ndim=1), [{"shape": LINE}]),
    "forward_cube": (ONE_SLICE.replace(ndim=3, c="fp32", vectors=(8, 8, 4)), [{"shape": CUBE}]),
    "forward_slices_of_k": (ONE_SLICE.replace(split_k=3), [{"shape": PLAIN, "split_k": 3}]),
    "forward_fused": (
        ONE_SLICE.replace(bias="fp32", binary="MultiDAdd", d=("fp16",), unary="Relu", linear_rows=False),
        [{"shape": PLAIN}],
    ),
    "forward_fp32": (
        TapConfig(
            a="fp32", b="fp32", c="fp32", tile=(48, 32, 16), wave=(1, 2), warp_tile=(16, 16, 4), vectors=(4, 4, 4)
        ),
        [{"shape": EDGES}],
    ),
    "forward_int8": (
        TapConfig(a="int8", b="int8", c="int32", warp_tile=(16, 16, 32), **BYTES),
        [{"shape": PLAIN}],
    ),
    "forward_fp8": (
        TapConfig(a="fp8", b="fp8", c="fp32", warp_tile=(16, 16, 32), **BYTES),
        [{"shape": PLAIN}],
    ),
    "forward_bf8": (
        TapConfig(a="bf8", b="bf8", c="fp16", warp_tile=(32, 32, 16), **{**BYTES, "vectors": (16, 16, 8)}),
        [{"shape": PLAIN}],
    ),
    "data": (ONE_SLICE.replace(**DATA), [{"shape": BACK}, {"shape": BACK, "gap": 8}]),
    "data_two_slices": (TWO_SLICES.replace(**DATA, accumulate=True), [{"shape": BACK}]),
    "data_phases": (ONE_SLICE.replace(**DATA, grouped=True, linear_rows=False), [{"shape": BACK_STRIDED}]),
    "data_cube": (ONE_SLICE.replace(**DATA, ndim=3), [{"shape": BACK_CUBE}]),
    "data_fp32": (
        TapConfig(
            a="fp32",
            b="fp32",
            c="fp32",
            tile=(48, 32, 16),
            wave=(1, 2),
            warp_tile=(16, 16, 4),
            vectors=(4, 4, 4),
            **DATA,
        ),
        [{"shape": BACK}],
    ),
    "data_turned": (
        ONE_SLICE.replace(**DATA, turned=True, tile=(48, 64, 32)),
        [{"shape": BACK}, {"shape": BACK, "gap": 8}],
    ),
    "data_turned_phases": (
        DEEP.replace(**DATA, turned=True, tile=(48, 128, 64), wave=(1, 4), grouped=True, linear_rows=False),
        [{"shape": BACK_STRIDED}],
    ),
    "data_turned_wide": (
        ONE_SLICE.replace(**DATA, turned=True, tile=(32, 256, 32), wave=(2, 1)),
        [{"shape": BACK_WIDE}],
    ),
    "data_slices_of_k": (ONE_SLICE.replace(**DATA, split_k=2), [{"shape": BACK, "split_k": 2}]),
}
LARGER = {"gfx950": {("fp16", 16): (16, 16, 32), ("fp16", 32): (32, 32, 16), ("bf16", 16): (16, 16, 32)}}
"""Instructions of twice the depth, by type and rows."""


def config_of(name: str, arch: str) -> TapConfig | None:
    """The case's kernel on an arch; None if the arch has no instruction for it."""
    config = CASES[name][0]
    if config.turned and arch != "gfx950":
        return None
    warp = LARGER.get(arch, {}).get((config.a, config.warp_tile[0]), config.warp_tile)
    key = f"{config.a}_{config.b}_{'int32' if config.a == 'int8' else 'fp32'}"
    offered = tilewright_arch.load(arch).warp_tiles.get(key, ())
    return config.replace(warp_tile=warp) if warp in offered else None  # type: ignore[return-value]
