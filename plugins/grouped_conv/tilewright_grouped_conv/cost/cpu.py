"""A deterministic analytic estimate of a plan's time on a CPU, good enough to rank kernels."""

from __future__ import annotations

from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.footprint.cpu import padded_k
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.strided_copy.copies import Transform
from tilewright_grouped_conv.strided_copy.plan import transform_seconds
from tilewright_grouped_conv.vocabulary import Direction, Kind
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.tiles.cost.cpu import (
    CALL_SECONDS,
    PACK_SECONDS_PER_GROUP,
    TEAM_SECONDS,
    TILE_SECONDS,
    bandwidth,
    blocked,
    clock,
    rate,
    read,
    tile_rate,
)
from tilewright_kit.tiles.footprint.cpu import slices
from tilewright_kit.tiles.footprint.workgroup import lanes
from tilewright_kit.types.dtypes import DType

__all__ = ["predict_cpu"]

_GATHER_SECONDS_PER_GROUP = 1.0 / 1.0e10
"""Copying one 32-bit group of an image whose pixels do not lie at one distance, before it is packed."""
_FOLDED_CHANNELS = 16
_IN_PLACE_GROUPS, _IN_PLACE_TAPS = 4, 64
"""Groups of a tap from which on, and taps up to which images are read where they lie."""
_FEW_ROWS, _IN_PLACE_FEW, _IN_PLACE = 6, 0.93, 1.05
"""Every row then has a pointer of its own, which tiles of few rows have room for."""
_ACROSS = 2.0
"""Packing across the pixels, as the gradient of the weights does, takes so much longer than along channels."""
_LINES_APART = 4.0
"""How much longer that takes of channels-first images, whose channels are gathered one by one."""
_ROW_SECONDS = 3.0e-9
"""Finding one row's pixel for one tap: what decides where groups have few channels."""
_DIRECT_FIRST = {Direction.FORWARD: 1.5, Direction.BACKWARD_DATA: 1.5, Direction.BACKWARD_WEIGHT: 3.0}
"""How much longer loops without register tiles take where channels come first: lines are short."""
_DIRECT_CYCLES = {
    Kind.DEPTHWISE: {Direction.FORWARD: 2.0, Direction.BACKWARD_DATA: 2.6, Direction.BACKWARD_WEIGHT: 3.6},
    Kind.DIRECT: {Direction.FORWARD: 0.9, Direction.BACKWARD_DATA: 0.9, Direction.BACKWARD_WEIGHT: 3.6},
}
"""Cycles of one multiplication of vectors in a loop without register tiles: loads, and sums that are kept, go with
it."""
_ONE_GROUP, _IN_PAIRS = 0.62, 0.38
"""The part of that which remains of forward and backward data where a vector holds channels of one group, whose values
are then spread instead of picked; and if its values are multiplied in pairs as well.
"""
_SPREAD_CHANNELS, _SPREAD_TAPS = 16, 3
_SPREAD = {False: 0.75, True: 0.45}
"""Cycles of that in the gradient of weights of groups whose channels fill whole vectors; and likewise in pairs
(``group_weight.hpp``)."""
_PAIRED = frozenset({DType.BF16, DType.INT8, DType.FP8, DType.BF8})


def predict_cpu(
    problem: ConvProblem, config: ConvConfig, device: DeviceInfo, copies: tuple[Transform, ...]
) -> Prediction:
    """Seconds of all stages, and what they are made of."""
    parts = {"copies": sum(transform_seconds(copy.nbytes, device) for copy in copies)}
    for phase in problem.phases(config.channels_first):
        if phase.m and phase.n and phase.batch:
            for name, value in _phase(problem, phase, config, device).items():
                parts[name] = parts.get(name, 0.0) + value
    launches = 2 if config.split_k > 1 else 1
    parts["launch"] = (CALL_SECONDS + (TEAM_SECONDS if config.waves > 1 else 0.0)) * launches
    return Prediction(sum(parts.values()), parts)


def _phase(problem: ConvProblem, phase: Phase, config: ConvConfig, device: DeviceInfo) -> dict[str, float]:
    if not config.is_matrix:
        parts = _loops(problem, phase, config, device)
    elif problem.direction is Direction.BACKWARD_WEIGHT:
        parts = _weights(phase, config, device)
    else:
        parts = _implicit(problem, phase, config, device)
    drawn = bandwidth(device, config.waves)
    results = phase.batch * phase.m * phase.n
    parts["store"] = results * problem.dtype_out.bytes / drawn
    split = slices(padded_k(phase, config), config.split_k, config.tile[2]) if config.is_matrix else config.split_k
    if split > 1:
        parts["reduce"] = results * 4 * (split + 1) / drawn
    return parts


def _implicit(problem: ConvProblem, phase: Phase, config: ConvConfig, device: DeviceInfo) -> dict[str, float]:
    """Products by the driver of ``tilewright/cpu/conv/implicit_gemm.hpp``: members share each, or take one each."""
    split = slices(padded_k(phase, config), config.split_k, config.tile[2])
    k, count = -(-padded_k(phase, config) // split), phase.batch * split
    team, rounds = config.waves, float(count)
    if team > 1 and count >= 4 * team:
        team, rounds = 1, count / config.waves
    alone = config.replace(wave=(1, 1, 1)) if team == 1 and config.waves > 1 else config
    sizes = (problem.dtype_in.bytes, problem.dtype_wei.bytes)
    _, parts = blocked(phase.m, phase.n, k, alone, device, sizes[::-1] if config.image_is_b else sizes)
    if _in_place(problem, phase, config):
        # The image is read where it lies: only weights are packed.
        weights = -(-phase.n // config.warp_tile[1]) * config.warp_tile[1] * -(-k // config.warp_tile[2])
        parts["packing"] = weights * PACK_SECONDS_PER_GROUP / team
        parts["compute"] *= _IN_PLACE_FEW if config.warp_tile[0] <= _FEW_ROWS else _IN_PLACE
        parts["gather"] = phase.m * phase.taps * _ROW_SECONDS / team
    elif config.kind is Kind.IMPLICIT:
        gathered = (phase.n if config.image_is_b else phase.m) * -(-k // config.warp_tile[2])
        rows = (phase.n if config.image_is_b else phase.m) * _runs(problem, phase)
        if config.channels_first:
            # Pixels of a line are found together, but their channels lie far apart.
            across = 1.0 if problem.geometry.is_pointwise else _LINES_APART
            seconds = gathered * _GATHER_SECONDS_PER_GROUP * across + rows * _ROW_SECONDS / 2
        else:
            seconds = gathered * _GATHER_SECONDS_PER_GROUP * _scattered(problem) + rows * _ROW_SECONDS
        parts["gather"] = seconds / team
    return {name: value * rounds for name, value in parts.items()}


def _runs(problem: ConvProblem, phase: Phase) -> int:
    """Places that are found for one row: taps, or with few channels lines of taps."""
    geometry = problem.geometry
    few = geometry.groups == 1 and geometry.cg <= _FOLDED_CHANNELS and not problem.channels_first
    folded = few and problem.direction is Direction.FORWARD and geometry.dilation[2] == 1
    return phase.taps // phase.axes[2].taps if folded and phase.taps else phase.taps


def _in_place(problem: ConvProblem, phase: Phase, config: ConvConfig) -> bool:
    """True if the kernel reads the image without packing it (``tilewright/cpu/conv/in_place.hpp``)."""
    depth, size = config.warp_tile[2], problem.dtype_in.bytes
    channels = phase.k // max(phase.taps, 1)
    suits = channels % depth == 0 and channels >= _IN_PLACE_GROUPS * depth and 0 < phase.taps <= _IN_PLACE_TAPS
    return suits and size * depth == 4 and config.tile[1] >= config.tile[0] and not config.channels_first


def _scattered(problem: ConvProblem) -> float:
    """Part of the rows whose panels are copied line by line before they are packed: those near an edge, and all of an
    image whose pixels are read at a stride.
    """
    geometry = problem.geometry
    if geometry.is_pointwise:
        return 0.25
    edges = 1.0
    for size, taps, dilation in zip(geometry.output, geometry.filter, geometry.dilation, strict=True):
        edges *= max(0.0, 1.0 - (taps - 1) * dilation / max(size, 1))
    return min(1.0, 0.25 + (1.0 - edges))


def _weights(phase: Phase, config: ConvConfig, device: DeviceInfo) -> dict[str, float]:
    """The gradient of the weights by ``tilewright/cpu/conv/weight.hpp``: long sums over pixels, both operands packed
    across them.
    """
    mr, nr, depth = config.warp_tile
    team = config.waves
    groups = max(-(-phase.k // depth), 1)
    tiles = phase.batch * -(-phase.m // mr) * -(-phase.n // nr)
    busy = max(1.0, min(float(team), tiles * max(config.split_k, 1)))
    speed = rate(config, device) * tile_rate(config, device)
    blocks = -(-phase.k // max(config.tile[2], 1))
    packed = phase.batch * groups * (phase.n + phase.m)
    return {
        "compute": tiles * mr * nr * groups * depth * 2 / speed / busy,
        "tiles": tiles * blocks * TILE_SECONDS / busy,
        "packing": packed * _ACROSS * PACK_SECONDS_PER_GROUP / busy,
        "gather": phase.batch * phase.k * phase.taps * _ROW_SECONDS / busy,
    }


def _spread(problem: ConvProblem) -> bool:
    """True if sums of several channels stay in registers (``GroupWeight::suits``)."""
    geometry = problem.geometry
    whole = geometry.cg >= geometry.kg and geometry.cg % _SPREAD_CHANNELS == 0 and geometry.kg % 8 == 0
    together = geometry.cg == geometry.kg and geometry.cg in (4, 8) and geometry.groups * geometry.cg % 16 == 0
    return (whole or together) and geometry.filter[2] == _SPREAD_TAPS


def _loops(problem: ConvProblem, phase: Phase, config: ConvConfig, device: DeviceInfo) -> dict[str, float]:
    """Kernels without register tiles: a multiplication for each vector of channels (or pixels) and tap, or memory."""
    team = max(config.waves, 1)
    vectors = (
        phase.batch
        * phase.m
        * phase.n
        * phase.k
        / lanes(device.arch)
        * (_DIRECT_FIRST[problem.direction] if config.channels_first else 1.0)
    )
    moved = sum(item.desc.size * item.desc.dtype.bytes for item in problem.operands)
    cycles = _DIRECT_CYCLES[config.kind][problem.direction]
    products = config.kind is Kind.DIRECT and problem.direction is not Direction.BACKWARD_WEIGHT
    if products and 2 * phase.n > lanes(device.arch):
        cycles *= _IN_PAIRS if problem.dtype_in in _PAIRED else _ONE_GROUP
    if config.kind is Kind.DIRECT and not products and _spread(problem):
        cycles = _SPREAD[problem.dtype_in is DType.BF16]
    return {
        "compute": vectors * cycles / clock(device) / team,
        "memory": read(moved, device, team) / max(len(problem.phases(config.channels_first)), 1),
    }
