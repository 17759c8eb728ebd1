"""Candidates of a GPU for a problem, before the rules and the cost model.

Shapes are those of ``gpu_shapes``; the problem decides how many elements an access has, and how often its reduction is
cut. The rules drop kernels that exceed the device, the cost model ranks the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.candidates.applicability.gpu import VECTOR_BYTES, channel_vectors, strict_vectors
from tilewright_grouped_conv.candidates.shapes import gpu_shapes
from tilewright_grouped_conv.config.config import CONFIGS, ConvConfig, Triple
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction, Specialization, layout_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.choices import table_key
from tilewright_kit.tiles.cost.units import units_of
from tilewright_kit.types.arithmetic import ceil_div
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["product_algorithms", "splits"]

_LEAST_STEPS = 4
"""Steps along k below which a slice is not worth its partial tile."""
_MOST_SLICES, _FEW_SLICES = 64, 16
_FULL = 0.85
"""Part of the device from which on tiles need not be split."""


def _base(problem: ConvProblem, first: bool = False) -> ConvConfig:
    layout = layout_of(problem.ndim, first)
    return CONFIGS[problem.direction](dtype_in=problem.dtype_in, layout=layout, ndim=problem.ndim)


def product_algorithms(problem: ConvProblem, device: DeviceInfo) -> Iterator[ConvConfig]:
    """Configurations of products with the algorithm set, the signature not; the most general last."""
    arch, base = device.arch, _base(problem)
    weight = problem.direction is Direction.BACKWARD_WEIGHT
    phase = max(problem.phases(False), key=lambda phase: phase.m * phase.n * phase.k)
    pair = (problem.dtype_in.value, problem.dtype_wei.value)
    key = table_key(*(pair[::-1] if weight else pair))
    explicit = problem.geometry.is_dense_pointwise and not weight
    for matrix in (True, False) if explicit else (False,):
        special = Specialization.FILTER1X1_STRIDE1_PAD0 if matrix else Specialization.DEFAULT
        for fields in _suited(list(gpu_shapes(arch, problem.dtype_in, key, problem.direction)), phase):
            offer = arch.pipeline(fields["pipeline"])
            for wanted in _vector_choices(problem):
                vectors = _whole(problem, wanted, fields, arch)
                config = base.replace(
                    **fields,
                    scheduler=offer.schedulers[0],
                    epilogue=Epilogue(offer.epilogues[0]),
                    vector_sizes=vectors,
                    explicit_gemm=matrix,
                    specialization=special,
                )
                for split in splits(problem, phase, device, config.tile):
                    yield from _in_slices(problem, config, split)


def _suited(shapes: list[dict[str, Any]], phase: Phase) -> list[dict[str, Any]]:
    """A tile twice as tall or as wide as the product wastes half its work; the last shape is for every problem."""
    rows, columns = 2 * max(phase.m, 16), 2 * max(phase.n, 16)
    return [
        fields
        for index, fields in enumerate(shapes)
        if index == len(shapes) - 1 or (fields["tile"][0] < rows and fields["tile"][1] < columns)
    ]


def _vector_choices(problem: ConvProblem) -> tuple[Triple, ...]:
    """Accesses to A, B and C: what tensors allow as they lie, what copies allow, and (forward) what filling up the
    channels allows.
    """
    found = [strict_vectors(problem), channel_vectors(problem)]
    width = VECTOR_BYTES // problem.dtype_in.bytes
    if problem.direction is Direction.FORWARD and found[-1][0] < width:
        found.append((width, width, found[-1][2]))
    return tuple(dict.fromkeys(found[::-1]))


def _whole(problem: ConvProblem, vectors: Triple, fields: dict[str, Any], arch: ArchSpec) -> Triple:
    """AMD, backward data: every thread has a whole vector of both tiles."""
    if problem.direction is not Direction.BACKWARD_DATA or arch.kind != "hip":
        return vectors
    (m, n, k), threads = fields["tile"], math.prod(fields["wave"]) * arch.wave_size
    most = [1 << (max(size * k // threads, 1).bit_length() - 1) for size in (m, n)]
    return min(vectors[0], most[0]), min(vectors[1], most[1]), vectors[2]


def _in_slices(problem: ConvProblem, config: ConvConfig, split: int) -> Iterator[ConvConfig]:
    yield config.replace(split_k=split)
    if split > 1 and problem.direction is Direction.BACKWARD_WEIGHT:
        yield config.replace(split_k=split, two_stage=True)


def splits(problem: ConvProblem, phase: Phase, device: DeviceInfo, tile: Triple) -> tuple[int, ...]:
    """Slices of the reduction to consider: what the caller asked for; else none, and as many as fill the device once
    and twice. The phases of a strided gradient differ too much for one number.
    """
    weight = problem.direction is Direction.BACKWARD_WEIGHT
    if problem.split_k:
        return (problem.split_k,)
    units = units_of(device)
    tiles = ceil_div(phase.m, tile[0]) * ceil_div(phase.n, tile[1]) * phase.batch
    steps = ceil_div(phase.k, tile[2])
    if not tiles or tiles >= 2 * units * _FULL or (not weight and len(problem.phases(False)) > 1):
        return (1,)
    most = min(steps // _LEAST_STEPS, _MOST_SLICES if weight else _FEW_SLICES)
    found = {min(turns * units // tiles, most) for turns in (1, 2)}
    return tuple(sorted({1, *(split for split in found if split > 1)}))
