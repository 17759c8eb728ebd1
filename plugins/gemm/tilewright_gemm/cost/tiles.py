"""The work of a problem, counted in tiles."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_kit.types.arithmetic import ceil_div

__all__ = ["busiest_of", "is_unaligned", "shapes_of", "slices_of"]

_SHAPES = 64
"""Distinct sizes of a grouped problem that are looked at."""


@lru_cache(maxsize=256)
def shapes_of(problem: GemmProblem) -> tuple[tuple[int, int, int, float], ...]:
    """(m, n, k, count) of the products, batches counted; of very many kinds a sample that stands for all."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for product in problem.products:
        if not product.is_empty:
            counts[product.m, product.n, product.k] += product.batch
    kinds = sorted(counts.items())
    every = -(-len(kinds) // _SHAPES)
    weight = len(kinds) / max(len(kinds[::every]), 1) if every else 1.0
    return tuple((m, n, k, count * weight) for (m, n, k), count in kinds[:: every or 1])


def slices_of(config: GemmConfig, shapes: tuple[tuple[int, int, int, float], ...]) -> tuple[float, float]:
    """Tiles times slices of K, and steps along k of one of them on average."""
    tiles = work = 0.0
    along_m, along_n = config.tile[0] * config.cluster[0], config.tile[1] * config.cluster[1]
    for m, n, k, count in shapes:
        own = ceil_div(m, along_m) * ceil_div(n, along_n) * config.cluster[0] * config.cluster[1] * count
        tiles += own
        work += own * ceil_div(ceil_div(k, config.tile[2]), config.split_k)
    return tiles * config.split_k, work / max(tiles, 1.0)


def busiest_of(config: GemmConfig, slices: float, places: int) -> float:
    """Tiles that the busiest place gets."""
    size = math.prod(config.cluster)
    return math.ceil(slices / size / max(places // size, 1))


def is_unaligned(problem: GemmProblem) -> bool:
    """True if threads cannot load whole vectors of 16 bytes of A and B."""
    largest = problem.largest
    strides = (largest.a.row_stride + largest.a.col_stride - 1, largest.b.row_stride + largest.b.col_stride - 1)
    return problem.alignment < 16 or any(stride * problem.dtype_a.bytes % 16 for stride in strides if stride > 0)
