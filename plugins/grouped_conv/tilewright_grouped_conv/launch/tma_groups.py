"""Merged groups whose tensors are moved by a copy engine: problems that they take, and their arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from tilewright_grouped_conv.config.config import DIRECT_PIPELINE, ConvConfig, Triple
from tilewright_grouped_conv.footprint.tma_groups import (
    MOST_BLOCKS,
    bulk_box,
    bulk_grid,
    bulk_pixels,
    bulk_shared_bytes,
    bulk_tiles,
)
from tilewright_grouped_conv.launch.fast_divmod import divisor_row
from tilewright_grouped_conv.launch.gpu import Launch, gpu_stages
from tilewright_grouped_conv.launch.kernel_args import gathered, row_view, spatial_sizes
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.problem.layout import ImageView
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.plan import I64, Arg, Pointer, Struct, TensorMap
from tilewright_kit.types.dtypes import DType

__all__ = ["bulk_mismatches", "bulk_row", "bulk_stages"]


def bulk_mismatches(problem: ConvProblem, config: ConvConfig) -> Iterator[Violation]:
    """Tensors that cannot be described to a copy engine, and launches of too many workgroups."""
    for view in (gathered(problem), row_view(problem)):
        sizes = (*spatial_sizes(problem, view)[::-1], problem.geometry.n)
        steps = (*view.spatial[::-1], view.n)
        if any(size > 1 and step <= 0 for size, step in zip(sizes, steps, strict=True)):
            reason = f"pixels of {view.operand} share memory"
            yield Violation("bulk_strides", "pipeline", config.pipeline, reason, {"pipeline": DIRECT_PIPELINE})
            return
    for phase in problem.phases(config.channels_first):
        _, tiles = bulk_tiles(phase, config, problem.geometry.n)
        if tiles > MOST_BLOCKS and bulk_pixels(config)[0] == 1:
            reason = f"{tiles} tiles are more than {MOST_BLOCKS} workgroups"
            fix = {"pixel_tile": (2, *config.pixel_tile[1:])}
            yield Violation("bulk_grid", "pixel_tile", config.pixel_tile, reason, fix)


class _BulkLaunch(Launch):
    """A launch whose workgroups are blocks of channels, and share the tiles of pixels."""

    def workgroups(self, phase: Phase) -> int:
        return math.prod(bulk_tiles(phase, self.config, self.problem.geometry.n))

    def grid(self) -> Triple:
        return bulk_grid(self.phases[0], self.config, self.problem.geometry.n, self.device)

    def shared_bytes(self) -> int:
        return bulk_shared_bytes(self.config)

    def copies(self, phase: Phase) -> tuple[Struct, ...]:
        return (bulk_row(self.problem, phase, self.config),)


bulk_stages = partial(gpu_stages, kind=_BulkLaunch)
"""The stages of a convolution, and the bytes of its counters: see ``gpu_stages``."""


def bulk_row(problem: ConvProblem, phase: Phase, config: ConvConfig) -> Struct:
    """``ConvBulk`` of ``tilewright/gpu/conv/params.hpp``."""
    _, rows, run = bulk_pixels(config)
    down, across = -(-phase.axes[1].rows // rows), -(-phase.axes[2].rows // run)
    weights, backward = problem.filter, problem.direction is Direction.BACKWARD_DATA
    # Backward, taps run the other way.
    origins = (axis.origin + (axis.taps - 1) * axis.tap_step * backward for axis in phase.axes[1:])
    fields: tuple[Arg, ...] = (
        _map(problem, config, gathered(problem), problem.dtype_in, bulk_box(config)),
        _map(problem, config, row_view(problem), problem.dtype_out, (run, rows)),
        *(I64(value) for value in (bulk_tiles(phase, config, problem.geometry.n)[1], across, down)),
        divisor_row(across),
        divisor_row(down),
        I64(problem.geometry.c),
        *(I64(value) for value in origins),
        Pointer(weights.operand, weights.offset * problem.dtype_wei.bytes),
    )
    return Struct(fields)


def _map(problem: ConvProblem, config: ConvConfig, view: ImageView, dtype: DType, box: tuple[int, int]) -> TensorMap:
    _, height, width = spatial_sizes(problem, view)
    geometry, size = problem.geometry, dtype.bytes
    sizes = (geometry.c, width, height, geometry.n)
    strides: list[int] = []
    for length, step in zip(sizes[1:], (view.spatial[2], view.spatial[1], view.n), strict=True):
        # A single element may have any distance.
        strides.append(step * size if length > 1 else max(strides[-1:] or [geometry.c * size]))
    return TensorMap(
        operand=view.operand,
        offset=view.offset * size,
        dtype=dtype.value,
        sizes=sizes,
        strides=tuple(strides),
        box=(config.channel_tile, *box, 1),
        swizzle=config.channel_tile * size,
    )
