"""The wide space of the warp-specialised pipeline: every tile, cluster, ring and division of K that is valid.

It is enumerated once for each class of problems (types, layout, arch) and holds no sizes; which of its kernels suit a
problem is told by arrays of their traits, for all of them at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from tilewright_arch import ArchSpec
from tilewright_gemm.candidates.warp_specialised import PIPELINE, ROW_BYTES, SIDE, Shape
from tilewright_gemm.config.choices import table_key
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.vocabulary import Epilogue, Reduction
from tilewright_kit.config.rules import RuleBook
from tilewright_kit.tiles.footprint.workgroup import shared_bytes, stages_of
from tilewright_kit.types.dtypes import DType

__all__ = ["SPLITS", "SpaceClass", "wide_configs", "wide_shapes"]

SPLITS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Slices of K: few enough that kernels are shared by many problems."""
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2))
_WIDTHS = (32, 64, 96, 128, 160, 192, 224, 256)
_NARROW = (8, 16, 24, 32, 40, 48, 64)
_ROWS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256)
_SMALL_TILE = 128 * 128
"""Elements up to which a tile may have two rows of the swizzle along k, and share its unit with another."""


class SpaceClass(NamedTuple):
    """All that validity depends on, of a problem; kernels of fused steps are judged when they are taken."""

    dtype_a: DType
    dtype_b: str
    dtype_c: str
    layout: str
    promoted: bool
    """Sums of 8-bit floats are kept in fp32."""
    stored: bool
    """The copy engine reaches C."""


def wide_shapes(arch: ArchSpec, key: str) -> Iterator[Shape]:
    """Every shape that may be valid, whatever the problem."""
    flexible = {tile[0] if tile[1] == SIDE else tile[1] for tile in arch.warp_tiles_for(key, PIPELINE)}
    for cluster, width in itertools.product(_CLUSTERS, _WIDTHS):
        for rows, waves, pingpong in (
            (64, (1, 1), False), (64, (1, 1), True), (128, (2, 1), False), (128, (1, 1), True), (256, (2, 1), False),
            (64, (1, 2), False),
        ):  # fmt: skip
            if width // waves[1] in flexible and rows * width <= 128 * 256:
                yield from _depths(Shape((rows, width), waves, cluster, pingpong))
    for width, count in itertools.product(_NARROW, (1, 2)):
        if width in flexible:
            yield from _depths(Shape((SIDE * count, width), (count, 1)))
    for height, (columns, count), cluster in itertools.product(
        _ROWS, ((64, 1), (128, 1), (128, 2), (256, 2)), ((1, 1), (1, 2), (2, 1))
    ):
        if height in flexible and height * columns <= 256 * 128:
            yield from _depths(Shape((height, columns), (1, count), cluster, swapped=True))


def _depths(shape: Shape) -> Iterator[Shape]:
    yield shape
    if shape.tile[0] * shape.tile[1] <= _SMALL_TILE:
        yield shape._replace(k_rows=2)


@lru_cache(maxsize=16)
def wide_configs(kind: SpaceClass, arch: ArchSpec, rules: RuleBook[GemmConfig]) -> tuple[GemmConfig, ...]:
    """Valid kernels of the class without epilogue steps, in a fixed order."""
    return tuple(dict.fromkeys(_valid(kind, arch, rules)))


def _valid(kind: SpaceClass, arch: ArchSpec, rules: RuleBook[GemmConfig]) -> Iterator[GemmConfig]:
    for shape in wide_shapes(arch, table_key(kind.dtype_a.value, kind.dtype_b or kind.dtype_a.value)):
        base = _config(kind, shape)
        if not rules.allows(base, arch):
            continue
        yield base
        for ring in (base, _shared_unit(base, arch)):
            if ring is None:
                continue
            claimed = ring is base
            alone = ring if shape.pingpong else ring.replace(persistent=False)
            if not shape.pingpong and rules.allows(alone, arch):
                yield alone
            if rules.allows(alone.replace(split_k=2), arch):
                yield from (alone.replace(split_k=slices) for slices in SPLITS)
            if claimed and not shape.pingpong and rules.allows(base.replace(split_k=2), arch):
                yield from (base.replace(split_k=slices) for slices in SPLITS[:3])
            if shape.cluster == (1, 1) and not shape.pingpong:
                for cluster in arch.pipeline(PIPELINE).clusters:
                    joined = alone.replace(split_k=cluster[2], cluster=cluster) if cluster[2] > 1 else None
                    if joined is not None and rules.allows(joined, arch):
                        yield joined
        stream = base.replace(reduction=Reduction.LINEAR)
        if not shape.pingpong and not shape.swapped and rules.allows(stream, arch):
            yield stream


def _config(kind: SpaceClass, shape: Shape) -> GemmConfig:
    fields: dict[str, Any] = shape.fields(kind.dtype_a)
    tile, warp = fields["tile"], fields["warp_tile"]
    line = ROW_BYTES // DType(kind.dtype_c).bytes
    staged = kind.stored and (shape.swapped or warp[1] % line == 0)
    return GemmConfig(
        dtype_a=kind.dtype_a,
        dtype_b=kind.dtype_b,
        dtype_c=kind.dtype_c,
        layout=kind.layout,
        epilogue=Epilogue.CSHUFFLE if staged else Epilogue.DEFAULT,
        promote=tile[2] // warp[2] if kind.promoted else 0,
        **fields,
    )


def _shared_unit(config: GemmConfig, arch: ArchSpec) -> GemmConfig | None:
    """The kernel with a ring of half the memory, so that two workgroups share a unit; None if that is too little."""
    if config.tile[0] * config.tile[1] > _SMALL_TILE // 2 or config.scheduler == "pingpong":
        return None
    stages = stages_of(config, arch)
    each = shared_bytes(config, arch) - shared_bytes(config.replace(stages=stages - 1), arch) if stages > 2 else 0
    if not each:
        return None
    rest = shared_bytes(config, arch) - stages * each
    fitting = (arch.lds_bytes // 2 - 1024 - rest) // each
    return config.replace(stages=int(fitting)) if 3 <= fitting < stages else None
