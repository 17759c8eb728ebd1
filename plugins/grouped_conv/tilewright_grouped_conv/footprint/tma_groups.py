"""Merged groups whose tensors are moved by a copy engine: boxes of pixels, workgroups, shared memory. The figures are
those of ``tilewright/gpu/conv/merged/bulk.hpp``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import DIRECT_PIPELINE, ConvConfig, Triple
from tilewright_grouped_conv.config.pipelines import BULK
from tilewright_grouped_conv.footprint.group_merging import (
    MERGED_PRODUCT,
    PAIR_CHANNELS,
    axis_shape,
    is_merged,
)
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.cost.units import units_of
from tilewright_kit.types.dtypes import DType

__all__ = ["bulk_box", "bulk_grid", "bulk_pixels", "bulk_shape", "bulk_shared_bytes", "bulk_tiles"]

MOST_TAPS = 9
"""Taps whose weights a wave keeps, and the rows of the image that a pair of rows meets."""
MOST_WAITING = 4
"""Pairs of rows whose sums stay in registers."""
_CHANNELS = (16, 32, 64)
"""Channels of a tile: a pixel is as long as a swizzle of the engine."""
_PATTERN, _BARRIER, _RESERVED = 1024, 8, 1024
"""Bytes: of what a swizzle repeats after, of a barrier, of what a workgroup takes besides."""
_MOST_THREADS, MOST_BLOCKS = 2048, 65535
"""Threads of a unit; largest second number of a grid."""
_REGISTERS = ((32, 128, 168), (16, 96, 128), (0, 72, 104))
"""Registers of a thread, by channels of a group: of most kernels, and beside operands of an epilogue or taps that
lie apart."""


def bulk_shape(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """A copy engine moves the tensors of merged groups: forward, or backward data without a stride, with results of 16
    bits, in boxes of a few channels of many pixels.
    """
    if not BULK.makes(config) or config.is_matrix:
        return
    reasons = [
        text
        for text, holds in (
            (f"{arch.id} has no engine that copies boxes of tensors", arch.bulk_copy is None),
            ("only merged groups have a template of it", not is_merged(config)),
            ("gradients of weights have none", config.direction is Direction.BACKWARD_WEIGHT),
            (
                "of the image's gradient only one product has",
                config.direction is Direction.BACKWARD_DATA and (max(config.stride) > 1 or config.mapped_rows),
            ),
            ("results are stored as 16 bits", DType(config.c).bytes != 2),
            (f"a tile has {', '.join(map(str, _CHANNELS))} channels", config.channel_tile not in _CHANNELS),
            (
                "waves have two blocks of channels each",
                config.waves % max(config.channel_tile // PAIR_CHANNELS, 1) != 0,
            ),
        )
        if holds
    ]
    if not reasons and _taps(config) > MOST_TAPS:
        reasons = [f"taps are {MOST_TAPS} at most"]
    if not reasons and (waiting := _waiting(config)) > MOST_WAITING:
        reasons = [f"{waiting} pairs of rows would wait for their last tap, and there are registers for {MOST_WAITING}"]
    if not reasons and arch.bulk_copy and max(bulk_box(config)) > arch.bulk_copy.max_box:
        reasons = [f"a box has {max(bulk_box(config))} rows or columns, and may have {arch.bulk_copy.max_box}"]
    if not reasons and bulk_shared_bytes(config) > arch.lds_bytes:
        reasons = [f"the pixels of a tile take {bulk_shared_bytes(config)} bytes of {arch.lds_bytes}"]
    if reasons:
        reason = f"tensors are not moved in boxes here: {'; '.join(reasons)}"
        yield Violation("bulk_shape", "pipeline", config.pipeline, reason, {"pipeline": DIRECT_PIPELINE})


def bulk_tiles(phase: Phase, config: ConvConfig, images: int) -> tuple[int, int]:
    """Blocks of channels, and tiles of pixels."""
    channels = phase.batch * MERGED_PRODUCT // config.num_groups_to_merge
    _, rows, run = bulk_pixels(config)
    tiles = images * -(-phase.axes[1].rows // rows) * -(-phase.axes[2].rows // run)
    return -(-channels // config.channel_tile), tiles


def bulk_grid(phase: Phase, config: ConvConfig, images: int, device: DeviceInfo) -> Triple:
    """Workgroups: blocks of channels, and those that share the tiles of pixels: as many as the device holds at once, or
    of a single stage one for each tile.
    """
    blocks, tiles = bulk_tiles(phase, config, images)
    if bulk_pixels(config)[0] == 1:
        return blocks, tiles, 1
    return blocks, min(max(units_of(device) * _resident(config, device.arch) // blocks, 1), tiles), 1


def bulk_shared_bytes(config: ConvConfig) -> int:
    """Pixels of the image for every stage, those of one or two results, each to whole patterns; a barrier for every
    stage.
    """
    stages, rows, run = bulk_pixels(config)
    pixel = config.channel_tile * 2
    columns, span = bulk_box(config)
    image, result = (-(-part // _PATTERN) * _PATTERN for part in (span * columns * pixel, rows * run * pixel))
    return stages * image + min(stages, 2) * result + stages * _BARRIER


def _resident(config: ConvConfig, arch: ArchSpec) -> int:
    """Workgroups that a unit holds: as many as its shared memory, threads and registers allow."""
    threads = config.waves * arch.wave_size
    shared = (arch.lds_bytes + _RESERVED) // (bulk_shared_bytes(config) + _RESERVED)
    channels, roomy = MERGED_PRODUCT // config.num_groups_to_merge, config.fused or axis_shape(config, 1)[2] > 1
    registers = next(more if roomy else few for each, few, more in _REGISTERS if channels >= each)
    return max(min(shared, _MOST_THREADS // threads, arch.register_file // (threads * registers)), 1)


def bulk_box(config: ConvConfig) -> tuple[int, int]:
    """Columns and rows of the image that a tile meets."""
    _, rows, run = bulk_pixels(config)
    (taps_h, step_h, apart_h), (taps_w, step_w, apart_w) = (axis_shape(config, axis) for axis in (1, 2))
    return (run - 1) * step_w + (taps_w - 1) * apart_w + 1, (rows - 1) * step_h + (taps_h - 1) * apart_h + 1


def _waiting(config: ConvConfig) -> int:
    taps, stride, dilation = axis_shape(config, 1)
    return min(bulk_pixels(config)[1] // 2, (taps - 1) * dilation // max(stride, 1) + 1)


def _taps(config: ConvConfig) -> int:
    return math.prod(axis_shape(config, axis)[0] for axis in range(3 - config.ndim, 3))


def bulk_pixels(config: ConvConfig) -> Triple:
    """Stages, rows of a tile, columns."""
    stages, rows, run = config.pixel_tile
    return max(stages, 1), rows or 8, run or 8
