"""Candidates whose steps along k keep within a tap (AMD GPUs), before the rules and the cost model."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_grouped_conv.candidates.gpu import splits
from tilewright_grouped_conv.candidates.shapes import VECTOR_BYTES, Shape, shape_fields
from tilewright_grouped_conv.config.config import CONFIGS, TAPS_PIPELINE, ConvConfig
from tilewright_grouped_conv.footprint.taps import tap_join_cycles, tap_step_bound
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.rules.taps import taps_mismatches
from tilewright_grouped_conv.vocabulary import Direction, layout_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.choices import table_key
from tilewright_kit.tiles.cost.units import units_of
from tilewright_kit.types.arithmetic import ceil_div

__all__ = ["TAP_SHAPES", "tap_algorithms"]

_MOST = 8
"""Kernels of a problem, slices counted: those whose busiest unit has the least to do."""

TAP_SHAPES = (
    *(Shape((rows, 128), (1, 4) if rows % 32 else (2, 2), TAPS_PIPELINE) for rows in range(96, 257, 16)),
    *(Shape((rows, 64), (2, 2), TAPS_PIPELINE) for rows in range(128, 417, 32)),
    Shape((64, 128), (2, 2), TAPS_PIPELINE),
    Shape((64, 64), (2, 2), TAPS_PIPELINE),
)
"""Tiles of pixels and channels. Rows come in steps of 16, so that for most images some tile is there of which one, or a
few, for every unit leave none idle. The waves' parts are such that LDS has time for all lines that they read.
"""


def tap_algorithms(problem: ConvProblem, device: DeviceInfo) -> Iterator[ConvConfig]:
    """Configurations with the algorithm set, the signature not."""
    if problem.direction is Direction.BACKWARD_WEIGHT or problem.is_empty:
        return
    arch, phases = device.arch, [item for item in problem.phases(False) if item.m and item.n and item.batch]
    largest = max(phases, key=lambda phase: phase.m * phase.n * phase.k)
    key, width = table_key(problem.dtype_in.value, problem.dtype_wei.value), VECTOR_BYTES // problem.dtype_in.bytes
    base = CONFIGS[problem.direction](dtype_in=problem.dtype_in, layout=layout_of(problem.ndim), ndim=problem.ndim)
    found: list[tuple[float, ConvConfig]] = []
    for shape in TAP_SHAPES:
        fields = shape_fields(shape, problem.dtype_in, arch, key)
        rows, columns = shape.tile
        if fields is None or rows >= 2 * max(largest.m, 16) or columns >= 2 * max(largest.n, 16):
            continue
        plain = base.replace(
            **fields, vector_sizes=(width, width, VECTOR_BYTES // problem.dtype_out.bytes),
            dtype_wei=problem.dtype_wei.value, dtype_out=problem.dtype_out.value,
        )  # fmt: skip
        if any(taps_mismatches(problem, plain)):
            continue
        for split in splits(problem, largest, device, plain.tile):
            config = plain.replace(split_k=split)
            found.append((_busiest(config, phases, device), config))
    yield from (config for _, config in sorted(found, key=lambda item: item[0])[:_MOST])


def _busiest(config: ConvConfig, phases: list[Phase], device: DeviceInfo) -> float:
    """Cycles of the busiest unit at the least: it steps through its tiles, or slices of them that are then added."""
    m, n, k = config.tile
    tiles = [ceil_div(phase.m, m) * ceil_div(phase.n, n) * phase.batch * config.split_k for phase in phases]
    steps = [ceil_div(ceil_div(phase.k, k), config.split_k) for phase in phases]
    work = sum(one * each for one, each in zip(tiles, steps, strict=True))
    rounds = ceil_div(sum(tiles), units_of(device))
    return rounds * work / max(sum(tiles), 1) * tap_step_bound(config, device.arch) + tap_join_cycles(config)
