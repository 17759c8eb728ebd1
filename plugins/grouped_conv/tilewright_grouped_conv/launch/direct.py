"""Launches of GPU kernels without a product (depthwise filters and small groups): workgroups and shared memory.

The figures are those of ``tilewright/gpu/conv/depthwise/tile.hpp``: a thread computes ``outputs`` channels of
``rows`` x ``run`` pixels; ``lanes`` threads beside one another share a tile's channels, the others its pixels.
"""

from __future__ import annotations

import math

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.footprint.group_merging import is_merged, merged_shared_bytes, merged_workgroups
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.vocabulary import Direction, Kind
from tilewright_kit.types.dtypes import DType

__all__ = ["loop_shared_bytes", "loop_slices", "loop_threads", "loop_workgroups"]

_VECTOR_BYTES = 16
_SUM_BYTES = 4
_LANES = 8
_WEIGHT_LANES = 32
"""Threads beside one another where a configuration leaves it open; likewise for the weights of small groups."""


def loop_threads(config: ConvConfig, arch: ArchSpec) -> int:
    """Threads of a workgroup."""
    return config.waves * arch.wave_size


def loop_slices(phase: Phase, config: ConvConfig) -> int:
    """Slices of the pixels: more than there are pixels would be empty."""
    return max(min(config.split_k, phase.k), 1) if config.direction is Direction.BACKWARD_WEIGHT else 1


def loop_workgroups(phase: Phase, config: ConvConfig, images: int, arch: ArchSpec) -> int:
    """Workgroups of a product's phase (of the gradient of the weights: for one slice)."""
    if is_merged(config):
        return merged_workgroups(phase, config, images)
    lanes = _lanes(config)
    if config.direction is Direction.BACKWARD_WEIGHT:
        return -(-_weight_units(phase, config) // lanes)
    depth, height, width = (axis.rows for axis in phase.axes)
    rows, run, repeats = _pixels(config)
    pixels = images * depth * -(-height // rows) * -(-width // run)
    beside = loop_threads(config, arch) // lanes * repeats
    units = phase.batch * -(-phase.n // _outputs(config)) if config.kind is Kind.DIRECT else 0
    if config.kind is Kind.DEPTHWISE:
        groups = phase.batch // images if config.channels_first else phase.batch
        units = -(-groups // _vector(config))
    return -(-units // lanes) * -(-pixels // beside)


def loop_shared_bytes(phase: Phase, config: ConvConfig, arch: ArchSpec) -> int:
    """Shared memory of one workgroup: the weights of a tile in fp32, or the sums of all threads."""
    if is_merged(config):
        return merged_shared_bytes(config)
    if config.direction is Direction.BACKWARD_WEIGHT:
        return loop_threads(config, arch) * max(config.vector_sizes[:2]) * _SUM_BYTES
    taps = max(phase.taps, 1)
    channels = phase.k // taps if config.kind is Kind.DIRECT else 1
    return taps * channels * _lanes(config) * _outputs(config) * _SUM_BYTES


def _weight_units(phase: Phase, config: ConvConfig) -> int:
    """Work of threads of different channels: vectors of channels; of small groups a block of both sides' channels and
    one row of taps.
    """
    if config.kind is Kind.DEPTHWISE:
        return -(-phase.batch // _vector(config))
    tall, wide, _ = config.vector_sizes
    taps = [axis.taps for axis in phase.axes]
    rows = math.prod(taps[:2] if _fixed(config) else taps)
    channels = phase.n // phase.taps
    return rows * -(-phase.m // tall) * (channels // wide) * phase.batch


def _lanes(config: ConvConfig) -> int:
    """Neighbouring threads that take neighbouring channels."""
    if config.channels_first:
        return 1
    if config.direction is Direction.BACKWARD_WEIGHT and config.kind is Kind.DIRECT:
        return config.channel_tile // config.vector_sizes[1] if config.channel_tile else _WEIGHT_LANES
    return config.channel_tile // _outputs(config) if config.channel_tile else _LANES


def _outputs(config: ConvConfig) -> int:
    """Channels of the result that a thread computes."""
    if config.kind is Kind.DIRECT and config.direction is not Direction.BACKWARD_WEIGHT:
        return config.vector_sizes[2]
    return _vector(config)


def _vector(config: ConvConfig) -> int:
    """Channels that a thread reads at a time."""
    if config.channels_first:
        return 1
    return min(config.vector_sizes[0], _VECTOR_BYTES // DType(config.image_dtype).bytes)


def _pixels(config: ConvConfig) -> tuple[int, int, int]:
    """Rows and columns of pixels of a thread, and how many such tiles it computes."""
    repeats, rows, run = config.pixel_tile
    weight, data = (config.direction is each for each in (Direction.BACKWARD_WEIGHT, Direction.BACKWARD_DATA))
    two = _fixed(config) and config.kind is Kind.DEPTHWISE and not weight and (data or config.stride[1] in (0, 1))
    return rows or (2 if two else 1), run or 4, max(repeats, 1)


def _fixed(config: ConvConfig) -> bool:
    """True if the filter is compiled in."""
    if config.mapped_rows and config.direction is Direction.BACKWARD_DATA:
        return False
    axes = range(max(3 - config.ndim, 1), 3)
    return all(min(config.filter[axis], config.stride[axis], config.dilation[axis]) > 0 for axis in axes)
