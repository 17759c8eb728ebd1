"""Merged groups on CUDA devices: eight neighbouring channels are one block of a matrix instruction, whatever groups of
1, 2, 4 or 8 channels they are; groups of 16 or 32 are whole blocks. The figures are those of
``tilewright/gpu/conv/merged/tile.hpp``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.config.pipelines import BULK
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.vocabulary import Direction, Kind
from tilewright_kit.config.rules import Violation
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Epilogue

__all__ = [
    "BLOCK_CHANNELS",
    "MERGED_PRODUCT",
    "PAIR_CHANNELS",
    "axis_shape",
    "fits_lanes",
    "in_lanes",
    "is_merged",
    "merged_shape",
    "merged_shared_bytes",
    "merged_workgroups",
    "stages_weights",
]

BLOCK_CHANNELS = 8
MERGED_PRODUCT = 64
"""Groups that are merged, times their channels."""
PAIR_CHANNELS = 16
"""Channels of two blocks: of an instruction of the gradient of the weights, and of what lanes store together."""
MOST_LANE_TAPS, MOST_PHASE_TAPS = 9, 4
"""Taps up to which compilers keep to the registers: of larger filters they read more of a row ahead than there are
registers for; the phases of strided gradients
take some of these.
"""
_LEAST_RUN = 8
_LANES, _SUM_BYTES = 32, 4
_DTYPES = (DType.FP16, DType.BF16)


def is_merged(config: ConvConfig) -> bool:
    return config.num_groups_to_merge > 1 and not config.is_matrix


def in_lanes(config: ConvConfig) -> bool:
    """True if merged groups, forward or backward data, multiply taps in pairs, and results leave as what
    one or two lanes have (``tilewright/gpu/conv/merged/lanes.hpp``); else ``merged_conv.hpp`` has the kernel.
    """
    shuffles = config.epilogue is Epilogue.CSHUFFLE and not BULK.makes(config)
    return is_merged(config) and shuffles and not _is_weight(config)


def fits_lanes(config: ConvConfig) -> bool:
    """True if merged groups may be computed in lanes, which is faster where it may be."""
    fits = _channels(config) % PAIR_CHANNELS == 0 and _taps(config) <= _most_lane_taps(config)
    return fits and not _is_weight(config)


def merged_shape(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Without a product: groups are merged on CUDA devices, in fp16 and bf16, of one or two axes with channels last,
    and with the filter, stride and dilation compiled in.
    """
    if not is_merged(config) or arch.kind == "cpu":
        return
    merged, (_, rows, run) = config.num_groups_to_merge, config.pixel_tile
    wanted = (MERGED_PRODUCT,) if config.kind is Kind.DEPTHWISE else (2, 4, 8, 16, 32)
    constants = (config.filter, config.stride, config.dilation)
    reasons = [
        text
        for text, holds in (
            ("only CUDA devices have a template of it", arch.kind != "cuda"),
            ("blocks are multiplied in fp16 and bf16", config.dtype_in not in _DTYPES or config.dtype_wei != ""),
            ("images have one or two axes", config.ndim > 2),
            ("channels lie last", config.channels_first),
            (f"a {config.kind} kernel merges {' or '.join(map(str, wanted))} groups", merged not in wanted),
            ("filter, stride and dilation are compiled in", any(min(sizes) < 1 for sizes in constants)),
            (
                "waves share whole blocks of channels",
                not BULK.makes(config) and config.channel_tile % (BLOCK_CHANNELS * max(config.waves, 1)) != 0,
            ),
            ("a tile of channels holds whole groups", bool(_channels(config) % max(MERGED_PRODUCT // merged, 1))),
            ("blocks are read and written whole", config.vector_sizes[0] != BLOCK_CHANNELS),
            (
                "a wave owns two blocks of the gradient of the weights",
                _is_weight(config) and bool(_channels(config) % PAIR_CHANNELS or config.waves % _pairs(config)),
            ),
            ("lanes store channels of two blocks", in_lanes(config) and bool(_channels(config) % PAIR_CHANNELS)),
            (
                "an instruction computes two rows of eight pixels",
                rows % 2 != 0 or run % _LEAST_RUN != 0 or min(config.pixel_tile) < 0,
            ),
        )
        if holds
    ]
    if not reasons and in_lanes(config) and _taps(config) > (most := _most_lane_taps(config)):
        reasons = [f"taps in pairs are {most} at most"]
    if BULK.makes(config) and not reasons:
        return
    if not reasons and merged_shared_bytes(config) > arch.lds_bytes:
        reasons = [f"the pixels of a tile take {merged_shared_bytes(config)} bytes of {arch.lds_bytes}"]
    if not reasons and (held := _held(config)) > (most := _most_held(config)):
        reasons = [f"a thread would keep {held} registers of weights or of their gradients, and has room for {most}"]
    if reasons:
        reason = f"groups are not merged here: {'; '.join(reasons)}"
        yield Violation("merged_shape", "num_groups_to_merge", merged, reason, {"num_groups_to_merge": 1})


def merged_workgroups(phase: Phase, config: ConvConfig, images: int) -> int:
    """Workgroups of a phase (of the gradient of the weights: for one slice)."""
    channels = phase.batch * MERGED_PRODUCT // config.num_groups_to_merge
    blocks = -(-channels // _channels(config))
    if _is_weight(config):
        return blocks
    repeats, rows, run = _pixels(config)
    tiles = images * -(-phase.axes[1].rows // rows) * -(-phase.axes[2].rows // run)
    return blocks * -(-tiles // repeats)


def merged_shared_bytes(config: ConvConfig) -> int:
    """Pixels of the image that a tile meets: twice, where one tile is copied while another is computed. The gradient of
    the weights adds those of dy, of as many tiles as are on their way beside the one, and the sums that waves exchange.
    Weights that pass through it come on top.
    """
    repeats, rows, run = _pixels(config)
    pixel = (_channels(config) // BLOCK_CHANNELS + 1) * 16
    image = _span(config, 1, rows) * _span(config, 2, run, whole=True) * pixel
    if _is_weight(config):
        return max((repeats + 1) * (image + rows * run * pixel), _sum_bytes(config))
    return image * (2 if repeats > 1 else 1) + _staged_bytes(config)


def stages_weights(config: ConvConfig) -> bool:
    """True if weights always pass through shared memory, as vectors of eight channels. Those of smaller groups do so
    forward, where they lie without gaps.
    """
    return in_lanes(config) and MERGED_PRODUCT // config.num_groups_to_merge >= PAIR_CHANNELS


def _staged_bytes(config: ConvConfig) -> int:
    """Room for the weights of a tile: where they are staged, 16 bytes more for each channel."""
    each = MERGED_PRODUCT // config.num_groups_to_merge
    line = _taps(config) * each * 2
    if stages_weights(config):
        return _channels(config) * (line + 16)
    return _channels(config) * line if in_lanes(config) and config.direction is Direction.FORWARD else 0


def _most_held(config: ConvConfig) -> int:
    return 200 if _is_weight(config) else 100


def _held(config: ConvConfig) -> int:
    """Registers of a thread for the whole loop: sums of the gradient of the weights, or the weights of all taps."""
    depths = _depths(config)
    if _is_weight(config):
        return 8 * depths * _taps(config)
    blocks = max(_channels(config) // BLOCK_CHANNELS, 1)
    own = blocks // math.gcd(config.waves, max(blocks // (2 if blocks % 2 == 0 else 1), 1))
    whole = MERGED_PRODUCT // config.num_groups_to_merge >= PAIR_CHANNELS
    return own * _taps(config) * (2 * depths if whole else 1)


def _is_weight(config: ConvConfig) -> bool:
    return config.direction is Direction.BACKWARD_WEIGHT


def _depths(config: ConvConfig) -> int:
    return max(MERGED_PRODUCT // config.num_groups_to_merge // PAIR_CHANNELS, 1)


def _taps(config: ConvConfig) -> int:
    """Taps of the whole filter; for backward data those of the phase that has most."""
    return math.prod(axis_shape(config, axis)[0] for axis in range(3 - config.ndim, 3))


def _most_lane_taps(config: ConvConfig) -> int:
    in_phases = config.direction is Direction.BACKWARD_DATA and max(config.stride) > 1
    return MOST_PHASE_TAPS if in_phases else MOST_LANE_TAPS


def _sum_bytes(config: ConvConfig) -> int:
    """The gradient of the weights: sums that waves of the same channels hand to one another."""
    pairs = _pairs(config)
    if config.waves == pairs:
        return 0
    return pairs * _depths(config) * _taps(config) * 8 * _LANES * _SUM_BYTES


def _channels(config: ConvConfig) -> int:
    return config.channel_tile or BLOCK_CHANNELS * config.waves


def _pairs(config: ConvConfig) -> int:
    return max(_channels(config) // PAIR_CHANNELS, 1)


def _pixels(config: ConvConfig) -> tuple[int, int, int]:
    repeats, rows, run = config.pixel_tile
    return max(repeats, 1), rows or 8, run or 8


def _span(config: ConvConfig, axis: int, size: int, whole: bool = False) -> int:
    """Pixels of the image that ``size`` pixels of the result meet; ``whole``: filled up to whole strides."""
    taps, stride, dilation = axis_shape(config, axis)
    span = (size - 1) * stride + (taps - 1) * dilation + 1
    return -(-span // stride) * stride if whole and stride else span


def axis_shape(config: ConvConfig, axis: int) -> tuple[int, int, int]:
    """Taps, stride and dilation along an axis; of backward data those of a phase."""
    if axis < 3 - config.ndim:
        return 1, 1, 1
    taps, stride, dilation = config.filter[axis], config.stride[axis], config.dilation[axis]
    if config.direction is not Direction.BACKWARD_DATA:
        return taps, stride, dilation
    common = max(math.gcd(stride, dilation), 1)
    return -(-taps // max(stride // common, 1)), 1, dilation // common
