"""Kernel sets of grouped convolution."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_grouped_conv.config import CONFIGS, ConvConfig
from tilewright_grouped_conv.words import Direction
from tilewright_kit.declare import KernelSet, declare
from tilewright_kit.words import Epilogue

__all__ = ["KERNEL_SETS"]

KERNEL_SETS: Mapping[Direction, Mapping[str, KernelSet[ConvConfig]]] = {
    direction: {
        "default": KernelSet(
            "default",
            "One kernel of every direction",
            (
                declare(
                    config,
                    dtype_in="fp32",
                    pipeline="compv3",
                    epilogue=Epilogue.DEFAULT,
                    tile=(168, 2048, 512),
                    wave=(1, 1, 1),
                    warp_tile=(14, 32, 1),
                ).on("x86*"),
            ),
        )
    }
    for direction, config in CONFIGS.items()
}
