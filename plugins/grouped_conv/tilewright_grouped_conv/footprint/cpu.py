"""Scratch memory of a CPU launch: the Python mirror of the formulas in ``conv.hpp``, ``depthwise.hpp``,
``conv_weight.hpp`` and ``direct_plan.hpp`` of ``tilewright/cpu``.

Every kernel exports its own figure (role ``workspace``); a test compares the two over many configurations and problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.footprint.direct import direct_workspace
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction, Kind
from tilewright_kit.tiles.footprint.cpu import block_bytes, slice_length, sums_in_c
from tilewright_kit.tiles.tiled import GROUP_BYTES
from tilewright_kit.types.arithmetic import padded
from tilewright_kit.types.dtypes import DType

__all__ = ["padded_k", "weight_split", "workspace_bytes"]

_CHUNK_BYTES = 2 << 20
"""Accumulators that one member builds up at a time (``kChunkBytes``)."""
_MARGIN = 128
_WIDEST_LANES = 16
_RUN = 128
_LINE_BYTES = 384 << 10
_MOST_BLOCKS = 64
"""Limits of loops without a product: pixels of a line, bytes of all lines, and vectors of channels that are held at
a time
(``kRun``, ``kLineBytes``, ``kMostBlocks``)."""
_LINE_PIXELS, _LINE_TABLE_BYTES = 1024, 48
"""Pixels of a line that depthwise kernels hold channels-first, and what they note channels-last of one line of taps
(``depthwise_view.hpp``)."""
_LEAST_BLOCKS = 4
_MOST_PARTIAL_BYTES = 8 << 20


def padded_k(phase: Phase, config: ConvConfig) -> int:
    """The reduction as a CPU kernel runs it: forward and backward data fill the channels of every tap up to whole
    groups.
    """
    if config.direction is Direction.BACKWARD_WEIGHT or not phase.taps or config.kind is not Kind.IMPLICIT:
        return phase.k
    return phase.taps * padded(phase.k // phase.taps, config.warp_tile[2])


def weight_split(problem: ConvProblem, config: ConvConfig, waves: int) -> int:
    """Slices of the pixels that are worth having for the gradient of the weights: enough pieces for every member of the
    team, none shorter than a few blocks, and sums that stay in caches. 1: none.
    """
    geometry = problem.geometry
    pixels = geometry.n * geometry.out_pixels
    wanted = -(-4 * waves // geometry.groups) if config.is_matrix else 4 * waves
    if waves == 1 or wanted <= 1:
        return 1
    longest = (
        pixels // (_LEAST_BLOCKS * config.tile[2]) if config.is_matrix else geometry.n * math.prod(geometry.output[:2])
    )
    fitting = _MOST_PARTIAL_BYTES // max(4 * geometry.k * geometry.cg * geometry.taps, 1)
    return max(min(wanted, longest, fitting, 255), 1)


def workspace_bytes(config: ConvConfig, phases: Sequence[Phase], split: int, lanes: int) -> int:
    """Bytes that a launch of ``config`` on ``phases`` needs, in ``split`` slices of the reduction, on an arch whose
    vectors have so many 32-bit lanes.
    """
    if not phases:
        return 0
    if config.direction is Direction.BACKWARD_WEIGHT:
        if config.is_matrix:
            return max(_weight(config, phase, split) for phase in phases)
        return max(_direct_weight(config, phase, split, lanes) for phase in phases)
    if config.kind is Kind.DEPTHWISE:
        return _depthwise(config, phases)
    if config.kind is Kind.DIRECT:
        return direct_workspace(config, phases, lanes)
    return _implicit(config, phases, split)


# ---- the gradient of the weights ----


def _weight(config: ConvConfig, phase: Phase, split: int) -> int:
    """``weight_workspace`` of ``weight_plan.hpp``."""
    mr, nr, depth = config.warp_tile
    team = config.waves
    size = DType(config.a).bytes
    block = padded(config.tile[2], depth)
    groups = block // depth
    wide = max(nr, padded(mr, _WIDEST_LANES))
    count = max(split, 1)
    row_tiles, col_tiles = -(-phase.m // mr), -(-phase.n // nr)
    wanted, has = 4 * team, max(phase.batch * count, 1)
    parts = 1 if team == 1 or has >= wanted else -(-wanted // has)
    fitting = max(_CHUNK_BYTES // max(row_tiles * mr * nr * 4, 1), 1)
    chunk = max(min(-(-col_tiles // parts), fitting), 1)
    tile_bytes = mr * nr * 4
    partial = padded(phase.batch * count * row_tiles * col_tiles * tile_bytes, 64) if count > 1 else 0
    channels = phase.n // phase.taps
    member = (
        padded(row_tiles * mr * groups * GROUP_BYTES + _MARGIN, 64)
        + padded(nr * groups * GROUP_BYTES + _MARGIN, 64)
        + 2 * padded(block * (wide * size + 16) + _MARGIN, 64)
        + 2 * padded((block + depth) * 8, 64)
        + padded(max(channels, phase.m, nr) * size + _MARGIN, 64)
        + (0 if count > 1 else padded(row_tiles * chunk * tile_bytes, 64))
    )
    return partial + team * member


def _direct_weight(config: ConvConfig, phase: Phase, split: int, lanes: int) -> int:
    """``DirectPlan`` of ``direct_plan.hpp``."""
    axes = phase.axes
    across = config.channels_first
    dy_channels, x_channels = phase.m, phase.n // phase.taps
    x_is_wide = config.kind is Kind.DIRECT and x_channels >= dy_channels
    wide, narrow = (x_channels, dy_channels) if x_is_wide else (dy_channels, x_channels)
    together = 1 if across else lanes // wide
    blocks = -(-phase.batch // together) if together else phase.batch * -(-wide // lanes)
    run = max(min(axes[2].rows, _RUN), 1)
    step = axes[2].row_step
    pixels = (run - 1) * step + (axes[2].taps - 1) * axes[2].tap_step + 1
    kept = axes[0].taps * axes[1].taps
    x_line = step * (-(-pixels // step) + 2 * lanes) if across else pixels * (1 if x_is_wide else narrow) * lanes
    dy_line = padded(run, lanes) if across else run * (narrow if x_is_wide else 1) * lanes
    partial = blocks * max(split, 1) * phase.taps * narrow * lanes * 4
    fair = -(-blocks // (2 * config.waves)) if config.waves > 1 and split <= 1 else blocks
    chunk = 1 if across else max(min(fair, max(_LINE_BYTES // max(kept * x_line * 4, 1), 1), _MOST_BLOCKS), 1)
    lines = padded(kept * x_line * 4, 64) + padded(dy_line * 4, 64)
    fresh = phase.taps * narrow * lanes * 4 if config.a == "fp32" else 0
    member = chunk * (lines + fresh) + padded(kept * 8, 64) + narrow * lanes * 4
    return partial + config.waves * member


# ---- forward and backward data ----


def _depthwise(config: ConvConfig, phases: Sequence[Phase]) -> int:
    """``DepthwiseConv::workspace`` of ``depthwise.hpp``."""
    weights = member = 0
    for phase in phases:
        depth, height, width = phase.axes
        reach = (
            (max(min(width.rows, _LINE_PIXELS), 1) - 1) * width.row_step
            + max(width.taps - 1, 0) * abs(width.tap_step)
            + 1
        )
        if config.channels_first:
            span = (height.taps - 1) * abs(height.tap_step) + 1 if height.taps else 0
            own = 4 * depth.taps * span * (width.row_step * (-(-reach // width.row_step) + 64) + 2)
        else:
            own = _LINE_TABLE_BYTES * depth.taps * height.taps
        weights += 4 * phase.taps * padded(phase.batch, 16)
        member = max(member, padded(own, 64))
    return weights + config.waves * member


def _implicit(config: ConvConfig, phases: Sequence[Phase], split: int) -> int:
    """``ImplicitConv::workspace`` of ``conv.hpp``."""
    shared = member = partial = 0
    sizes = [0, 0, 0, 0]
    in_c = sums_in_c(config) and not config.mapped_rows
    for phase in phases:
        k = slice_length(padded_k(phase, config), split, config.tile[2])
        if split > 1:
            partial += phase.batch * split * phase.m * phase.n * GROUP_BYTES
        sizes = [max(pair) for pair in zip(sizes, block_bytes(config, phase.m, phase.n, k, in_c), strict=True)]
    shared, member = sizes[0], sum(sizes[1:])
    return padded(partial, 64) + config.waves * (shared + member)
