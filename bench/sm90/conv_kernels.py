"""Convolutions, and the Hopper kernels that are tried for them: what conv.py compiles, checks and times."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sm90.config import Config, source_of, with_fields

__all__ = ["LAYOUTS", "UNITS", "Case", "Kernel", "kernels_for", "sizes_of", "source"]

LAYOUTS = {"forward": "rcr", "backward_data": "rrr", "backward_weight": "crr"}
UNITS = 132


@dataclass(frozen=True)
class Case:
    """One dense convolution, channels last."""

    n: int
    c: int
    k: int
    size: tuple[int, ...]
    filter: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @classmethod
    def of(cls, text: str) -> Case:
        """N,C,K,HxW,R[xS],stride,pad[,dilation[,groups]]"""
        n, c, k, size, *rest = text.split(",")
        sizes = tuple(map(int, size.split("x")))

        def axes(index: int, default: str) -> tuple[int, ...]:
            found = tuple(map(int, (rest[index] if index < len(rest) else default).split("x")))
            return found * len(sizes) if len(found) == 1 else found

        groups = int(rest[4]) if len(rest) > 4 else 1
        return cls(int(n), int(c), int(k), sizes, axes(0, "1"), axes(1, "1"), axes(2, "0"), axes(3, "1"), groups)

    @property
    def out(self) -> tuple[int, ...]:
        return tuple(
            (size + 2 * pad - (taps - 1) * dilation - 1) // stride + 1
            for size, taps, stride, pad, dilation in zip(
                self.size, self.filter, self.stride, self.pad, self.dilation, strict=True
            )
        )

    @property
    def taps(self) -> int:
        return math.prod(self.filter)

    @property
    def flops(self) -> float:
        return 2.0 * self.n * math.prod(self.out) * self.k * (self.c // self.groups) * self.taps

    @property
    def label(self) -> str:
        text = f"{self.n},{self.c},{self.k},{'x'.join(map(str, self.size))},{'x'.join(map(str, self.filter))}"
        text += f",s{self.stride[-1]},p{self.pad[-1]}"
        return (
            text
            + (f",d{self.dilation[-1]}" if max(self.dilation) > 1 else "")
            + (f",g{self.groups}" if self.groups > 1 else "")
        )


@dataclass(frozen=True)
class Kernel:
    direction: str
    ndim: int
    config: Config
    slices: int = 1
    """Slices of the reduction, where the kernel splits it."""

    @property
    def label(self) -> str:
        return self.config.label + (f".s{self.slices}" if self.slices > 1 else "")


def source(kernel: Kernel) -> str:
    config = with_fields(kernel.config, layout=LAYOUTS[kernel.direction])
    text = source_of(config).replace("sm90/gemm/gemm.hpp", "sm90/conv/conv.hpp")
    more = f"static constexpr tw::Direction direction = tw::Direction::{kernel.direction};"
    more += f"\n  static constexpr int ndim = {kernel.ndim};"
    return text.replace("struct Config {", "struct Config {\n  " + more).replace("TW_GEMM_KERNEL", "TW_CONV_KERNEL")


def tiles(tile: tuple[int, int, int], wave: tuple[int, int] = (1, 1), **more: Any) -> Config:
    if wave == (1, 1) and "scheduler" not in more:
        more["scheduler"] = "pingpong"
    return Config(tile=tile, wave=wave, **more)


ROWS = (
    tiles((128, 128, 64)),
    tiles((128, 128, 64), cluster=(2, 1)),
    tiles((128, 128, 64), cluster=(1, 2)),
    tiles((128, 192, 64)),
    tiles((64, 256, 64)),
    tiles((128, 64, 64)),
    tiles((64, 128, 64)),
    tiles((64, 64, 64)),
    tiles((192, 64, 64)),
    tiles((128, 256, 64), (2, 1)),
    tiles((128, 256, 64), (2, 1), cluster=(2, 1)),
    tiles((256, 128, 64), (2, 1)),
    tiles((256, 128, 64), (2, 1), cluster=(2, 1)),
    tiles((256, 64, 64), (2, 1)),
    tiles((192, 192, 64), (3, 1)),
    tiles((64, 128, 64), (1, 2), persistent=False),
)
SPLITS = (tiles((128, 128, 64), split_k=2), tiles((64, 128, 64), split_k=2))
COLUMNS = (
    tiles((128, 128, 64), (2, 1), stream=True),
    tiles((64, 192, 64), (1, 1), scheduler="cooperative", stream=True),
    tiles((128, 64, 64), (2, 1), stream=True),
    tiles((128, 128, 128), (2, 1), stream=True),
    tiles((256, 64, 64), (2, 1), stream=True),
)
COLUMN_SPLITS = (
    tiles((128, 128, 64), split_k=2),
    tiles((128, 192, 64), split_k=2),
    tiles((128, 64, 64), split_k=2),
    tiles((64, 192, 64), split_k=2),
    tiles((64, 256, 64), split_k=2),
    tiles((64, 64, 64), split_k=2),
    tiles((128, 256, 64), (2, 1), split_k=2),
    tiles((256, 128, 64), (2, 1), split_k=2),
    tiles((128, 128, 64), (2, 1), split_k=2),
    tiles((128, 192, 64), (2, 1), split_k=2),
    tiles((64, 192, 64), (1, 1), scheduler="cooperative", split_k=2),
    tiles((64, 256, 64), (1, 1), scheduler="cooperative", split_k=2),
    tiles((192, 192, 64), (3, 1), split_k=2),
)


def sizes_of(direction: str, case: Case) -> tuple[int, int, int, int]:
    """m, n, steps of k (in 64) and items of the product."""
    cg, kg = case.c // case.groups, case.k // case.groups
    pixels = case.n * math.prod(case.out)
    if direction == "forward":
        return pixels, kg, case.taps * -(-cg // 64), case.groups
    if direction == "backward_data":
        return case.n * math.prod(case.size), cg, case.taps * -(-kg // 64), case.groups
    linear = cg % 64 == 0
    return kg, case.taps * cg if linear else cg, -(-pixels // 64), case.groups if linear else case.taps


def kernels_for(direction: str, case: Case) -> list[Kernel]:
    m, n, steps, items = sizes_of(direction, case)
    found = []
    whole, split = (COLUMNS, COLUMN_SPLITS) if direction == "backward_weight" else (ROWS, SPLITS)
    for config in (*whole, *split):
        if config.tile[1] >= 2 * max(n, 64) or config.tile[0] >= 2 * max(m, 64):
            continue
        area = -(-m // config.tile[0]) * -(-n // config.tile[1]) * items
        here = steps if direction != "backward_weight" else -(-steps * 64 // config.tile[2])
        if config.split_k == 1:
            found.append(Kernel(direction, len(case.size), config))
            continue
        waves = 2 if config.scheduler == "pingpong" else 1
        for turns in (0, 1, 2, 3):
            slices = max(min(turns * waves * UNITS // area, here // 4, 132), 1)
            slices = -(-here // -(-here // slices))
            if slices > 1 or direction == "backward_weight":
                found.append(Kernel(direction, len(case.size), config, slices))
    return list(dict.fromkeys(found))
