"""Candidates of a CPU for a problem, before the rules and the cost model."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_grouped_conv.config.config import CONFIGS, DIRECT_PIPELINE, ConvConfig, Triple
from tilewright_grouped_conv.footprint.cpu import weight_split
from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction, Specialization, layout_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.selection.candidates import teams_for
from tilewright_kit.tiles.choices import cpu_tiles, cpu_warp_tiles, table_key
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["cpu_loop_algorithms", "cpu_product_algorithms"]

_FEW_CHANNELS, _FEW_SUMMED, _FIRST_CHANNELS = 32, 32, 4
"""Channels of a group (where pixels are summed: the second), and of an image that has no groups, up to which kernels
without a product are considered.
"""
_ONE: Triple = (1, 1, 1)


def cpu_loop_algorithms(problem: ConvProblem, device: DeviceInfo) -> Iterator[ConvConfig]:
    """Kernels without a product, with the algorithm set, the signature not."""
    for first in (True, False) if problem.order is not Order.LAST else (False,):
        for team in teams_for(problem, device):
            yield from _cpu_loops(problem, first, team)


def cpu_product_algorithms(problem: ConvProblem, device: DeviceInfo) -> Iterator[ConvConfig]:
    """Products with the algorithm set, the signature not; the most general last."""
    for first in _cpu_orders(problem):
        for team in teams_for(problem, device):
            yield from _cpu_products(problem, device, first, team)


def _cpu_orders(problem: ConvProblem) -> tuple[bool, ...]:
    """Orders of a kernel worth considering, the most general last: channels first where images lie so."""
    direct = problem.direction is Direction.FORWARD or (
        problem.direction is Direction.BACKWARD_DATA and problem.geometry.stride == (1, 1, 1)
    )
    if direct and problem.order is not Order.LAST:
        return (True, False)
    return (False,)


def _cpu_loops(problem: ConvProblem, first: bool, team: int) -> Iterator[ConvConfig]:
    """Kernels without a product, for groups of so few channels that packing them would take most of the time."""
    geometry = problem.geometry
    few = _FEW_SUMMED if problem.direction is Direction.BACKWARD_WEIGHT else _FEW_CHANNELS
    if geometry.cg == geometry.kg == 1:
        special = Specialization.DEPTHWISE
    elif max(geometry.cg, geometry.kg) <= few if geometry.groups > 1 else geometry.cg <= _FIRST_CHANNELS:
        special = Specialization.DIRECT
    else:
        return
    config = CONFIGS[problem.direction](
        dtype_in=problem.dtype_in,
        layout=layout_of(problem.ndim, first),
        ndim=problem.ndim,
        pipeline=DIRECT_PIPELINE,
        epilogue=Epilogue.DEFAULT,
        scheduler="default",
        tile=_ONE,
        wave=(team, 1, 1),
        warp_tile=_ONE,
        specialization=special,
    )
    yield _shared(problem, config, team)


def _shared(problem: ConvProblem, config: ConvConfig, team: int) -> ConvConfig:
    """With as many slices of the pixels as the gradient of the weights needs to keep a team busy."""
    if problem.direction is not Direction.BACKWARD_WEIGHT:
        return config
    return config.replace(split_k=weight_split(problem, config, team))


def _cpu_products(problem: ConvProblem, device: DeviceInfo, first: bool, team: int) -> Iterator[ConvConfig]:
    """Implicit products, packed and blocked as GEMM's are."""
    arch, key = device.arch, table_key(problem.dtype_in.value, problem.dtype_wei.value)
    make = CONFIGS[problem.direction]
    phase = max(problem.phases(first), key=lambda phase: phase.m * phase.n * phase.k)
    explicit = problem.geometry.is_dense_pointwise and problem.direction is not Direction.BACKWARD_WEIGHT
    for matrix in (True, False) if explicit else (False,):
        for warp_tile in cpu_warp_tiles(arch, key, "compv3", 4):
            cuts = cpu_tiles(arch, "compv3", warp_tile, team)
            wide = phase.n > 2 * phase.m
            square = not wide and phase.m < 2 * phase.n and problem.direction is not Direction.BACKWARD_WEIGHT
            for tile, wave in cuts if square else cuts[1:] if wide else cuts[:1]:
                config = make(
                    dtype_in=problem.dtype_in,
                    layout=layout_of(problem.ndim, first),
                    ndim=problem.ndim,
                    pipeline="compv3",
                    epilogue=Epilogue.DEFAULT,
                    scheduler="intrawave",
                    tile=tile,
                    wave=wave,
                    warp_tile=warp_tile,
                    explicit_gemm=matrix,
                    specialization=Specialization.FILTER1X1_STRIDE1_PAD0 if matrix else Specialization.DEFAULT,
                )
                yield _shared(problem, config, team)
