"""Which GPU kernels without a product are worth considering: those of depthwise filters, of small groups, and of groups
that are merged into blocks of eight channels for the matrix unit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from tilewright_grouped_conv.candidates.applicability.gpu import VECTOR_BYTES
from tilewright_grouped_conv.candidates.shapes import DEPTHWISE_STEPS, depthwise_fields
from tilewright_grouped_conv.config.config import BULK_PIPELINE, CONFIGS, DIRECT_PIPELINE, ConvConfig, Triple
from tilewright_grouped_conv.footprint.group_merging import MERGED_PRODUCT, fits_lanes
from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction, Specialization, layout_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.cost.units import units_of
from tilewright_kit.types.arithmetic import ceil_div
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["MERGED_CHANNELS", "loop_algorithms"]

FEW_CHANNELS = 8
"""Channels of a group up to which a product would mostly multiply zeros."""
MERGED_CHANNELS = 8
"""Channels of a block: groups of 1, 2, 4 or 8 channels fill it."""
_MERGED_GROUPS = (1, 2, 4, 8, 16, 32)
_UNROLLED_TAPS = 49
_LONGEST = 16
_GROUP_STEPS = (
    (4, 32, (1, 2, 4), 4),
    (4, 64, (2, 2, 4), 4),
    (4, 128, (2, 2, 4), 4),
    (8, 64, (1, 2, 2), 4),
    (4, 64, (1, 1, 4), 4),
)
"""Elements of an access, channels of a step, pixels of a thread, waves."""
_LARGE_IMAGES: tuple[Triple, ...] = ((4, 8, 8), (2, 8, 8), (2, 8, 16), (4, 4, 16), (1, 4, 16), (1, 14, 16), (1, 4, 8))
_SMALL_IMAGES: tuple[Triple, ...] = ((1, 8, 8), (2, 8, 8), (1, 14, 8), (2, 4, 16), (1, 4, 8), (1, 14, 16), (1, 8, 16))
"""Merged groups: tiles that a workgroup computes, rows and columns of one."""
_WEIGHT_TILES: tuple[Triple, ...] = ((1, 8, 8), (1, 14, 8), (1, 16, 16), (1, 4, 16))
_SMALL_WEIGHT_TILES: tuple[Triple, ...] = ((1, 8, 8), (1, 14, 8), (3, 8, 8), (1, 16, 16))
"""Tiles for the gradient of the weights, where the first number is that of tiles on their way; of images of few
pixels."""
_FEW_PIXELS = 256
_MERGED_STEPS = ((64, 4), (32, 2), (96, 6), (48, 3), (128, 8), (32, 4), (16, 1), (16, 2))
"""Channels and waves of a workgroup."""
_BULK_STEPS = ((32, 2), (64, 4))
_BULK_TILES: tuple[Triple, ...] = ((4, 8, 8), (1, 8, 8), (3, 14, 8), (2, 4, 8), (1, 14, 8))
"""Where a copy engine moves the tensors: channels and waves of a workgroup; stages, rows and columns of a tile."""
_BULK_CHANNELS = 16
"""Channels of a group, at most: of more, weights take the registers that pixels would need."""
_MOST_STEPS = 4
_WIDE = 32
_ROUNDS = (2, 4)
"""Workgroups that every unit gets, of the gradient of the weights, whose pixels are cut."""


def loop_algorithms(problem: ConvProblem, device: DeviceInfo) -> Iterator[ConvConfig]:
    """Configurations with the algorithm set, the signature not."""
    geometry = problem.geometry
    if geometry.groups == 1:
        return
    if device.arch.kind == "cuda" and _may_merge(problem):
        yield from _merged(problem, device)
    if geometry.cg == geometry.kg == 1:
        yield from _depthwise(problem, device)
    elif max(geometry.cg, geometry.kg) <= FEW_CHANNELS:
        yield from _small_groups(problem, device)


def _base(problem: ConvProblem, first: bool = False) -> ConvConfig:
    return CONFIGS[problem.direction](
        dtype_in=problem.dtype_in,
        layout=layout_of(problem.ndim, first),
        ndim=problem.ndim,
        pipeline=DIRECT_PIPELINE,
        epilogue=Epilogue.DEFAULT,
        scheduler="default",
        tile=(1, 1, 1),
        warp_tile=(1, 1, 1),
    )


def _sliced(problem: ConvProblem, config: ConvConfig, device: DeviceInfo, blocks: int) -> Iterator[ConvConfig]:
    """With as many slices of the pixels as give every unit some workgroups, for the gradient of the weights."""
    if problem.direction is not Direction.BACKWARD_WEIGHT:
        yield config
        return
    units = units_of(device)
    for rounds in _ROUNDS if not problem.split_k else (0,):
        yield config.replace(split_k=problem.split_k or min(max(rounds * units // max(blocks, 1), 1), 255))


def _compiled_in(problem: ConvProblem, phases: bool) -> dict[str, Triple]:
    """Filter, stride and dilation where they are small; ``phases``: also of several products."""
    geometry = problem.geometry
    small = geometry.taps <= _UNROLLED_TAPS and max(*geometry.filter, *geometry.stride, *geometry.dilation) <= _LONGEST
    if not small or (not phases and len(problem.phases(False)) > 1):
        return {}
    return {"filter": geometry.filter, "stride": geometry.stride, "dilation": geometry.dilation}


def _vectors(problem: ConvProblem, width: int) -> Triple:
    return width, width, min(width, VECTOR_BYTES // problem.dtype_out.bytes)


def _depthwise(problem: ConvProblem, device: DeviceInfo) -> Iterator[ConvConfig]:
    geometry = problem.geometry
    most = min(VECTOR_BYTES, problem.alignment) // problem.dtype_in.bytes
    width = max(math.gcd(most, geometry.groups), 1)
    fixed = _compiled_in(problem, phases=False)
    for step in DEPTHWISE_STEPS:
        fields = depthwise_fields(step, problem.dtype_in, problem.dtype_out, problem.ndim)
        fields["pixel_tile"] = _fewer_pixels(problem, fields["pixel_tile"])
        for vector in dict.fromkeys((width, 1)):
            channels = step.vectors * vector
            own = {**fields, "vector_sizes": _vectors(problem, vector), "channel_tile": channels}
            blocks = ceil_div(geometry.groups, channels or MERGED_CHANNELS * vector)
            yield from _sliced(problem, _base(problem).replace(**own, **fixed), device, blocks)
        if Order.FIRST in problem.image_orders and Order.FIRST in problem.own_pixel_orders and not problem.num_d:
            own = {**fields, "vector_sizes": (1, 1, 1), "channel_tile": 0}
            yield from _sliced(problem, _base(problem, first=True).replace(**own, **fixed), device, geometry.groups)


def _fewer_pixels(problem: ConvProblem, pixels: Triple) -> Triple:
    """Fewer pixels than would fill the registers: one row where a stride keeps rows apart, short runs beside sums
    of all taps."""
    repeats, rows, run = pixels
    if max(problem.geometry.stride) > 1 and problem.direction is not Direction.BACKWARD_DATA:
        rows = min(rows, 1)
    if problem.direction is Direction.BACKWARD_WEIGHT:
        run = min(run, 4)
    return repeats, rows, run


def _small_groups(problem: ConvProblem, device: DeviceInfo) -> Iterator[ConvConfig]:
    geometry = problem.geometry
    fixed = _compiled_in(problem, phases=False)
    most = min(VECTOR_BYTES, problem.alignment) // problem.dtype_in.bytes
    weight = problem.direction is Direction.BACKWARD_WEIGHT
    for wanted, channels, pixels, waves in _GROUP_STEPS:
        vector = math.gcd(min(wanted, most), geometry.cg, geometry.kg)
        if weight and vector > MERGED_CHANNELS // 2:
            continue
        config = _base(problem).replace(
            wave=(waves, 1, 1),
            vector_sizes=_vectors(problem, vector),
            specialization=Specialization.DIRECT,
            channel_tile=max(channels * vector // wanted, vector),
            pixel_tile=_pixels(problem, pixels),
            **fixed,
        )
        blocks = geometry.taps * geometry.groups * ceil_div(geometry.kg, vector) * ceil_div(geometry.cg, vector)
        yield from _sliced(problem, config, device, ceil_div(blocks, max(channels // wanted, 1)))


def _pixels(problem: ConvProblem, pixels: Triple) -> Triple:
    return (pixels[0], 1, pixels[2]) if problem.ndim == 1 else pixels


# ---- merged groups ----


def _may_merge(problem: ConvProblem) -> bool:
    geometry = problem.geometry
    return (
        geometry.cg == geometry.kg
        and geometry.cg in _MERGED_GROUPS
        and geometry.c % MERGED_CHANNELS == 0
        and problem.ndim <= 2
        and problem.dtype_in.bytes == 2
        and problem.dtype_wei == problem.dtype_in
        and problem.alignment >= VECTOR_BYTES
        and bool(_compiled_in(problem, phases=True))
    )


def _merged(problem: ConvProblem, device: DeviceInfo) -> Iterator[ConvConfig]:
    geometry = problem.geometry
    tiles = _LARGE_IMAGES if problem.largest.axes[2].rows > _WIDE else _SMALL_IMAGES
    if problem.direction is Direction.BACKWARD_WEIGHT:
        small = problem.geometry.input[1] * problem.geometry.input[2] <= _FEW_PIXELS
        tiles = _SMALL_WEIGHT_TILES if small else _WEIGHT_TILES
    steps = [(channels, waves) for channels, waves in _MERGED_STEPS if channels % geometry.cg == 0]
    steps = ([step for step in steps if geometry.c % step[0] == 0] or steps[:1])[:_MOST_STEPS]
    constants: dict[str, Any] = _compiled_in(problem, phases=True)
    for (channels, waves), pixels in itertools.product(steps, dict.fromkeys(tiles)):
        config = _blocks(problem, channels, waves, pixels).replace(**constants)
        if fits_lanes(config):
            config = config.replace(epilogue=Epilogue.CSHUFFLE)
        yield from _sliced(problem, config, device, ceil_div(geometry.c, channels))


def _blocks(problem: ConvProblem, channels: int, waves: int, pixels: Triple) -> ConvConfig:
    repeats, rows, run = pixels
    groups = problem.geometry.cg
    return _base(problem).replace(
        wave=(waves, 1, 1),
        vector_sizes=_vectors(problem, MERGED_CHANNELS),
        specialization=Specialization.DEPTHWISE if groups == 1 else Specialization.DIRECT,
        num_groups_to_merge=MERGED_PRODUCT // groups,
        channel_tile=channels,
        pixel_tile=(repeats, 2 if problem.ndim == 1 else rows, run),
    )


def bulk_algorithms(problem: ConvProblem, device: DeviceInfo) -> Iterator[ConvConfig]:  # noqa: ARG001
    """Merged groups whose tensors a copy engine moves, in boxes of few columns, of which a unit holds many: with the
    algorithm set, the signature not.
    """
    if problem.geometry.groups == 1 or not _may_merge(problem):
        return
    channels = problem.geometry.cg
    constants: dict[str, Any] = _compiled_in(problem, phases=False)
    sizes = {problem.dtype_in.bytes, problem.dtype_out.bytes}
    if problem.direction is Direction.BACKWARD_WEIGHT or len(sizes) > 1 or channels > _BULK_CHANNELS or not constants:
        return
    for (tile, waves), pixels in itertools.product(_BULK_STEPS, _BULK_TILES):
        config = _blocks(problem, tile, waves, pixels).replace(**constants)
        yield config.replace(pipeline=BULK_PIPELINE, epilogue=Epilogue.CSHUFFLE)
    if channels == _BULK_CHANNELS:
        config = _blocks(problem, channels, 2, (1, 14, 16)).replace(**constants)
        yield config.replace(pipeline=BULK_PIPELINE, epilogue=Epilogue.CSHUFFLE)
