"""Scratch memory of kernels without a product, forward and backward data: the Python mirror of the formula in
``direct/conv.hpp`` of ``tilewright/cpu/conv``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_kit.types.arithmetic import padded
from tilewright_kit.types.dtypes import DType

__all__ = ["direct_workspace"]

_DIRECT_PIXELS, _OVERHANG = 252, 14
"""Pixels of a line that are held at a time, and what the widest tile may reach beyond them."""


def direct_workspace(config: ConvConfig, phases: Sequence[Phase], lanes: int) -> int:
    """``DirectConv::workspace``, on vectors of so many 32-bit lanes."""
    depth = 2 if all(item == "bf16" or DType(item).bytes == 1 for item in (config.a, config.b)) else 1
    weights = member = 0
    for phase in phases:
        depth_axis, height, width = phase.axes
        channels = phase.k // phase.taps if phase.taps else 0
        words = -(-channels // depth)
        together = lanes // max(phase.n, words, 1)
        vectors = 1 if together > 1 or phase.n < 2 * lanes else 2 if phase.n < 4 * lanes else 4
        pixel = lanes * 4 if together > 1 else channels * 4 // depth
        span = (height.taps - 1) * abs(height.tap_step) + 1 if height.taps else 0
        kept = depth_axis.taps * span if phase.taps else 0
        pixels = max(min(width.rows, _DIRECT_PIXELS), 1) + _OVERHANG
        reach = (pixels - 1) * width.row_step + max(width.taps - 1, 0) * abs(width.tap_step) + 1
        weights += padded(4 * phase.taps * words * phase.batch * padded(phase.n, vectors * lanes), 64)
        member = max(member, padded(8 * kept, 64) + kept * padded(reach * pixel, 64))
    return weights + config.waves * member
