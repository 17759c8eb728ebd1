"""Scratch memory of a CPU launch: the Python mirror of the formulas in ``conv.hpp``, ``depthwise.hpp``,
``conv_weight.hpp`` and ``direct_plan.hpp`` of ``tilewright/cpu``.

Every kernel exports its own figure (role ``workspace``); a test compares the two over many configurations and problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright_grouped_conv.config import ConvConfig
from tilewright_grouped_conv.direct_workspace import direct_workspace
from tilewright_grouped_conv.phases import Phase
from tilewright_grouped_conv.problem import ConvProblem
from tilewright_grouped_conv.words import Direction, Kind, Scale
from tilewright_kit.dtypes import DType
from tilewright_kit.words import Binary, Unary

__all__ = ["padded_k", "slice_length", "slices", "weight_split", "workspace_bytes"]

_GROUP_BYTES = 4
_SHARED_BYTES = 16 << 20
"""What the team's shared packed operand may fill (``kSharedBytes``); a deeper reduction makes its tile narrower."""
_CHUNK_BYTES = 2 << 20
"""Accumulators that one member builds up at a time (``kChunkBytes``)."""
_MARGIN = 128
_WIDEST_LANES = 16
_RUN = 128
_LINE_BYTES = 384 << 10
_MOST_BLOCKS = 64
"""Of loops without a product: pixels of a line, bytes of all lines, and vectors of channels that are held at a time
(``kRun``, ``kLineBytes``, ``kMostBlocks``)."""
_TILE_PIXELS, _LINE_PIXELS = 7, 1024
"""Pixels of a line that depthwise kernels hold, channels-last and channels-first (``depthwise.hpp``)."""
_LEAST_BLOCKS = 4
_MOST_PARTIAL_BYTES = 8 << 20


def slice_length(k: int, split: int, tile_k: int) -> int:
    """k covered by one slice: a multiple of tile_k."""
    return k if split <= 1 else _up(-(-k // split), tile_k)


def slices(k: int, split: int, tile_k: int) -> int:
    """Slices that are not empty: at most ``split``, fewer if k is short."""
    return -(-k // slice_length(k, split, tile_k)) if k and split > 1 else 1


def padded_k(phase: Phase, config: ConvConfig) -> int:
    """The reduction as a CPU kernel runs it: forward and backward data fill the channels of every tap up to whole
    groups.
    """
    if config.direction is Direction.BACKWARD_WEIGHT or not phase.taps or config.kind is not Kind.IMPLICIT:
        return phase.k
    return phase.taps * _up(phase.k // phase.taps, config.warp_tile[2])


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
    block = _up(config.tile[2], depth)
    groups = block // depth
    wide = max(nr, _up(mr, _WIDEST_LANES))
    count = max(split, 1)
    row_tiles, col_tiles = -(-phase.m // mr), -(-phase.n // nr)
    wanted, has = 4 * team, max(phase.batch * count, 1)
    parts = 1 if team == 1 or has >= wanted else -(-wanted // has)
    fitting = max(_CHUNK_BYTES // max(row_tiles * mr * nr * 4, 1), 1)
    chunk = max(min(-(-col_tiles // parts), fitting), 1)
    tile_bytes = mr * nr * 4
    partial = _up(phase.batch * count * row_tiles * col_tiles * tile_bytes, 64) if count > 1 else 0
    channels = phase.n // phase.taps
    member = (
        _up(row_tiles * mr * groups * _GROUP_BYTES + _MARGIN, 64)
        + _up(nr * groups * _GROUP_BYTES + _MARGIN, 64)
        + 2 * _up(block * (wide * size + 16) + _MARGIN, 64)
        + 2 * _up((block + depth) * 8, 64)
        + _up(max(channels, phase.m, nr) * size + _MARGIN, 64)
        + (0 if count > 1 else _up(row_tiles * chunk * tile_bytes, 64))
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
    dy_line = _up(run, lanes) if across else run * (narrow if x_is_wide else 1) * lanes
    partial = blocks * max(split, 1) * phase.taps * narrow * lanes * 4
    fair = -(-blocks // (2 * config.waves)) if config.waves > 1 and split <= 1 else blocks
    chunk = 1 if across else max(min(fair, max(_LINE_BYTES // max(kept * x_line * 4, 1), 1), _MOST_BLOCKS), 1)
    member = chunk * (_up(kept * x_line * 4, 64) + _up(dy_line * 4, 64)) + _up(kept * 8, 64) + narrow * lanes * 4
    return partial + config.waves * member


# ---- forward and backward data ----


def _depthwise(config: ConvConfig, phases: Sequence[Phase]) -> int:
    """``DepthwiseConv::workspace`` of ``depthwise.hpp``."""
    weights = member = 0
    for phase in phases:
        depth, height, width = phase.axes
        pixels = min(width.rows, _LINE_PIXELS) if config.channels_first else _TILE_PIXELS
        reach = (max(pixels, 1) - 1) * width.row_step + max(width.taps - 1, 0) * abs(width.tap_step) + 1
        if config.channels_first:
            span = (height.taps - 1) * abs(height.tap_step) + 1 if height.taps else 0
            own = 4 * depth.taps * span * (width.row_step * (-(-reach // width.row_step) + 64) + 2)
        else:
            own = 8 * depth.taps * height.taps * (reach + 1)
        weights += 4 * phase.taps * _up(phase.batch, 16)
        member = max(member, _up(own, 64))
    return weights + config.waves * member


def _implicit(config: ConvConfig, phases: Sequence[Phase], split: int) -> int:
    """``ImplicitConv::workspace`` of ``conv.hpp``."""
    shared = member = partial = 0
    sizes = [0, 0, 0, 0]
    for phase in phases:
        k = slice_length(padded_k(phase, config), split, config.tile[2])
        if split > 1:
            partial += phase.batch * split * phase.m * phase.n * _GROUP_BYTES
        sizes = [max(pair) for pair in zip(sizes, _blocked(config, phase.m, phase.n, k), strict=True)]
    shared, member = sizes[0], sum(sizes[1:])
    return _up(partial, 64) + config.waves * (shared + member)


def _blocked(config: ConvConfig, m: int, n: int, k: int) -> tuple[int, int, int, int]:
    """``Blocking::sizes``: bytes of the shared packed operand, and of one member's slab, column sums and unfinished
    tiles.
    """
    mr, nr, depth = config.warp_tile
    shares_b = config.tile[1] >= config.tile[0]
    shared_r, slab_r = (nr, mr) if shares_b else (mr, nr)
    extent, tile = (n, config.tile[1]) if shares_b else (m, config.tile[0])
    slab_extent, slab_tile = (m, config.tile[0]) if shares_b else (n, config.tile[1])
    groups, block = -(-k // depth), -(-config.tile[2] // depth)
    fitting = max(_SHARED_BYTES // (4 * max(groups, 1)) // shared_r, 1) * shared_r
    length = min(_up(extent, shared_r), max(tile, shared_r) // shared_r * shared_r, fitting)
    slab = min(_up(slab_extent, slab_r), _up(slab_tile, slab_r))
    offset_a = config.a == "int8" and depth == 4
    of_team = _packed_bytes(length, k, shared_r, depth, shares_b and offset_a)
    own = _up(slab * min(groups, block) * _GROUP_BYTES, 64)
    sums = _up(slab * _GROUP_BYTES, 64) if not shares_b and offset_a else 0
    unfinished = _up(slab * length * _GROUP_BYTES, 64) if not _accumulates_in_c(config) and groups > block else 0
    return of_team, own, sums, unfinished


def _packed_bytes(extent: int, k: int, rows: int, depth: int, with_sums: bool) -> int:
    groups = -(-k // depth) + with_sums
    return _up(-(-extent // rows) * rows * _GROUP_BYTES * groups, 64)


def _accumulates_in_c(config: ConvConfig) -> bool:
    """Whether C can hold partial sums: it has the accumulator's type, and nothing but alpha follows."""
    plain = (
        not config.bias
        and not config.num_d_tensors
        and config.scale is Scale.NONE
        and config.unary is Unary.PASS
        and config.binary is Binary.PASS
        and not config.mapped_rows
        and not config.accumulate
    )
    return plain and config.c == config.acc


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
