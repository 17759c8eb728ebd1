"""Numbers of slices of K to consider."""

from __future__ import annotations

from tilewright_gemm.config.config import Triple
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.cost.units import units_of
from tilewright_kit.types.arithmetic import ceil_div

__all__ = ["FULL", "splits", "tile_count"]

_LEAST_STEPS = 4
"""Steps along k below which a slice is not worth its partial tile."""
_MOST_SLICES = 32
FULL = 0.85
"""Part of the device from which on tiles need not be split."""


def splits(problem: GemmProblem, device: DeviceInfo, tile: Triple, cluster: int, resident: int = 1) -> tuple[int, ...]:
    """Slices of K to consider: what the caller asked for; else none and as many as fill the device, with ``resident``
    workgroups on each of its units.
    """
    if problem.grouped:
        return (1,)
    if problem.split_k:
        return (problem.split_k,)
    units, tiles = units_of(device) * resident, tile_count(problem, tile)
    steps = ceil_div(problem.k, tile[2])
    if not tiles or tiles * cluster >= units * FULL:
        return (1,)
    most = min(units // tiles, steps // _LEAST_STEPS, _MOST_SLICES)
    return (1, most) if most > 1 else (1,)


def tile_count(problem: GemmProblem, tile: Triple) -> int:
    return sum(ceil_div(item.m, tile[0]) * ceil_div(item.n, tile[1]) * item.batch for item in problem.products)
