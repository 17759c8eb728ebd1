"""Lists of convolutions by name: the layers of well-known networks, each once, and the shapes that peers are known
for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["NAMED"]

Row = Mapping[str, Any]


def _row(n: int, c: int, k: int, size: str, taps: str, stride: str = "1", padding: str = "0", groups: int = 1) -> Row:
    names = ("n", "c", "k", "size", "filter", "stride", "padding", "groups")
    return dict(zip(names, (n, c, k, size, taps, stride, padding, groups), strict=True))


def _pointwise(n: int, *layers: tuple[int, int, int]) -> tuple[Row, ...]:
    return tuple(_row(n, c, k, f"{size}x{size}", "1") for c, k, size in layers)


def _depthwise(n: int, *layers: tuple[int, int, str]) -> tuple[Row, ...]:
    return tuple(_row(n, c, c, f"{size}x{size}", "3", stride, "1", c) for c, size, stride in layers)


def _three(n: int, groups: int, *layers: tuple[int, int, int, str]) -> tuple[Row, ...]:
    return tuple(_row(n, c, k, f"{size}x{size}", "3", stride, "1", groups) for c, k, size, stride in layers)


_BATCH = 32

NAMED: dict[str, tuple[Row, ...]] = {
    "tiny": (
        _row(2, 6, 8, "9x7", "3", "1", "1"),
        _row(1, 12, 12, "10x11", "3", "2", "1", 12),
        _row(3, 4, 10, "13", "5", "1", "0-2"),
        _row(1, 10, 6, "5x4x6", "2x1x3", "1", "1x0x1", 2),
    ),
    "resnet50": (
        _row(_BATCH, 3, 64, "224x224", "7", "2", "3"),
        *_pointwise(_BATCH, (64, 64, 56), (64, 256, 56), (256, 64, 56), (256, 128, 56), (128, 512, 28), (512, 128, 28)),
        *_pointwise(_BATCH, (512, 256, 28), (256, 1024, 14), (1024, 256, 14), (1024, 512, 14), (512, 2048, 7)),
        *_pointwise(_BATCH, (2048, 512, 7)),
        *(_row(_BATCH, c, 2 * c, f"{s}x{s}", "1", "2") for c, s in ((256, 56), (512, 28), (1024, 14))),
        *_three(_BATCH, 1, (64, 64, 56, "1"), (128, 128, 56, "2"), (128, 128, 28, "1"), (256, 256, 28, "2")),
        *_three(_BATCH, 1, (256, 256, 14, "1"), (512, 512, 14, "2"), (512, 512, 7, "1")),
    ),
    "resnext50": (
        *_three(_BATCH, 32, (128, 128, 56, "1"), (256, 256, 56, "2"), (256, 256, 28, "1"), (512, 512, 28, "2")),
        *_three(_BATCH, 32, (512, 512, 14, "1"), (1024, 1024, 14, "2"), (1024, 1024, 7, "1")),
        *_pointwise(_BATCH, (64, 128, 56), (128, 256, 56), (256, 128, 56), (256, 512, 28), (512, 256, 28)),
        *_pointwise(_BATCH, (512, 1024, 14), (1024, 512, 14), (1024, 2048, 7), (2048, 1024, 7)),
    ),
    "mobilenet_v2": (
        _row(_BATCH, 3, 32, "224x224", "3", "2", "1"),
        *_depthwise(_BATCH, (32, 112, "1"), (96, 112, "2"), (144, 56, "1"), (144, 56, "2"), (192, 28, "1")),
        *_depthwise(_BATCH, (192, 28, "2"), (384, 14, "1"), (576, 14, "1"), (576, 14, "2"), (960, 7, "1")),
        *_pointwise(_BATCH, (32, 16, 112), (16, 96, 112), (96, 24, 56), (24, 144, 56), (144, 24, 56), (144, 32, 28)),
        *_pointwise(_BATCH, (32, 192, 28), (192, 32, 28), (192, 64, 14), (64, 384, 14), (384, 64, 14), (384, 96, 14)),
        *_pointwise(_BATCH, (96, 576, 14), (576, 96, 14), (576, 160, 7), (160, 960, 7), (960, 160, 7), (960, 320, 7)),
        *_pointwise(_BATCH, (320, 1280, 7)),
    ),
    "conv3d": (
        _row(1, 3, 64, "16x112x112", "3", "1", "1"),
        _row(1, 64, 128, "16x56x56", "3", "1", "1"),
        _row(1, 256, 256, "8x28x28", "3", "1", "1"),
        _row(1, 64, 144, "16x56x56", "1x3x3", "1", "0x1x1"),
        _row(1, 144, 64, "16x56x56", "3x1x1", "1", "1x0x0"),
        _row(1, 256, 512, "8x28x28", "1", "2"),
    ),
    "performance": (
        *_three(_BATCH, 1, (64, 64, 56, "1")),
        *_pointwise(_BATCH, (256, 64, 56)),
        *_three(_BATCH, 1, (128, 128, 28, "1"), (256, 256, 14, "1"), (512, 512, 7, "1")),
        _row(_BATCH, 3, 64, "224x224", "7", "2", "3"),
        *_three(128, 1, (128, 128, 28, "1")),
        *_three(_BATCH, 32, (128, 128, 56, "1"), (256, 256, 28, "2")),
        *_depthwise(_BATCH, (96, 56, "1")),
        _row(4, 64, 64, "16x56x56", "3", "1", "1"),
        _row(1, 128, 128, "32x64x64", "3", "1", "1"),
    ),
}
"""Rows by name. Networks stand with a batch of 32."""
