"""Which kernels of a CUDA device are worth considering for a problem: few, and good.

Shapes of tiles are listed here; what the device has room for is the rules' business, which of them is fastest the cost
model's. Where the caller leaves it open, K is split so that the tiles fill the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from tilewright_arch import ArchSpec
from tilewright_gemm.candidates.applicability import copy_fault
from tilewright_gemm.config.choices import table_key
from tilewright_gemm.config.config import GemmConfig, Triple
from tilewright_gemm.launch.geometry import matrices
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Epilogue, Reduction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.cost.units import units_of
from tilewright_kit.types.arithmetic import ceil_div
from tilewright_kit.types.dtypes import DType

__all__ = [
    "PORTABLE_TILES",
    "WS_SHAPES",
    "Shape",
    "gpu_algorithms",
    "portable_shapes",
    "splits",
    "swapped_shapes",
    "tile_count",
    "ws_shapes",
]

SIDE = 64
ROW_BYTES, INSTRUCTION_BYTES = 128, 32
"""Along k: what a swizzled row of a stage holds, and what one instruction takes."""
_FEW_ROWS = 128
"""Rows (columns) up to which tiles are cut to size."""
_LEAST_STEPS = 4
"""Steps along k below which a slice is not worth its partial tile."""
_MOST_SLICES = 32
_FULL = 0.85
"""Part of the device from which on tiles need not be split."""


class Shape(NamedTuple):
    """How a kernel cuts a problem, apart from K."""

    tile: tuple[int, int]
    wave: tuple[int, int]
    cluster: tuple[int, int] = (1, 1)
    pingpong: bool = False
    swapped: bool = False
    k_rows: int = 1
    """Length of tile_k, in ``ROW_BYTES``."""
    stages: int = 0
    """As in the configuration. Few, where two workgroups are to share a unit."""

    def fields(self, a: DType) -> dict[str, Any]:
        """The fields of a ``ws`` configuration for A of type ``a``."""
        m, n = self.tile
        deep = INSTRUCTION_BYTES // a.bytes
        warp = (m // self.wave[0], SIDE, deep) if self.swapped else (SIDE, n // self.wave[1], deep)
        return {
            "pipeline": "ws",
            "scheduler": "pingpong" if self.pingpong else "cooperative",
            "num_wave_groups": 2 if self.pingpong else 1,
            "tile": (m, n, ROW_BYTES // a.bytes * self.k_rows),
            "wave": (*self.wave, 1),
            "warp_tile": warp,
            "cluster": (*self.cluster, 1),
            "transpose_c": self.swapped,
            "stages": self.stages,
            "persistent": True,
        }


WS_SHAPES = (
    Shape((128, 256), (2, 1), (2, 1)),
    Shape((128, 256), (2, 1)),
    Shape((128, 256), (2, 1), (1, 2)),
    Shape((256, 128), (2, 1), (1, 2)),
    Shape((256, 128), (2, 1)),
    Shape((128, 192), (1, 1), pingpong=True),
    Shape((128, 192), (1, 1), (2, 1), pingpong=True),
    Shape((128, 128), (1, 1), pingpong=True),
    Shape((128, 128), (1, 1), (1, 2), pingpong=True),
    Shape((128, 128), (1, 1), (2, 1), pingpong=True),
    Shape((64, 256), (1, 1), pingpong=True),
    Shape((64, 256), (1, 1), (2, 1), pingpong=True),
    Shape((128, 192), (2, 1), (2, 1)),
    Shape((128, 192), (2, 1)),
    Shape((128, 128), (2, 1), (2, 1)),
    Shape((128, 128), (2, 1)),
    Shape((64, 192), (1, 1), (2, 1), pingpong=True),
    Shape((64, 128), (1, 1), (2, 1), pingpong=True),
    Shape((64, 128), (1, 1), pingpong=True),
    Shape((128, 64), (2, 1)),
    Shape((128, 64), (2, 1), (1, 2), k_rows=2),
    Shape((64, 128), (1, 2)),
    Shape((64, 128), (1, 2), (2, 1)),
    Shape((64, 64), (1, 1), stages=6),
    Shape((64, 64), (1, 1)),
)
"""Hopper's shapes for problems with many rows and columns, the preferred first."""

PORTABLE_TILES: tuple[tuple[tuple[int, int], tuple[int, int], str], ...] = (
    ((128, 128), (2, 2), "compv4"),
    ((128, 128), (2, 4), "compv4"),
    ((128, 256), (2, 4), "compv4"),
    ((256, 128), (4, 2), "compv4"),
    ((128, 128), (2, 4), "compv3"),
    ((128, 64), (2, 2), "compv4"),
    ((64, 128), (2, 2), "compv4"),
    ((64, 64), (2, 2), "compv4"),
    ((64, 64), (2, 2), "compv3"),
    ((32, 64), (1, 4), "compv4"),
    ((16, 64), (1, 4), "compv4"),
    ((16, 128), (1, 4), "compv4"),
    ((64, 16), (4, 1), "compv4"),
)
"""Tile, waves and pipeline of kernels without producers, for what the copy engine cannot reach and for fp32."""
_SMALL = ((SIDE, SIDE), (2, 2), "compv4")


def gpu_algorithms(problem: GemmProblem, device: DeviceInfo) -> Iterator[GemmConfig]:
    """Configurations with the algorithm set, the signature not; the most general last."""
    arch = device.arch
    if problem.packing:
        return
    names = [name for name, offer in arch.pipelines.items() if offer.register_splits and _reachable(problem, arch)]
    for name in names:
        yield from _specialised(problem, device, name)
    yield from _portable(problem, device, few=bool(names))


def _reachable(problem: GemmProblem, arch: ArchSpec) -> bool:
    """Whether the copy engine reaches A and B, and the matrix instruction takes them as they lie."""
    if arch.bulk_copy is None or not arch.warp_tiles_for(_key(problem), "ws"):
        return False
    if problem.dtype_a.bytes == 1 and problem.layout != "rcr":
        return False
    return problem.alignment >= arch.bulk_copy.alignment and not _any_fault(problem, arch, (0, 1))


def _any_fault(problem: GemmProblem, arch: ArchSpec, which: tuple[int, ...]) -> bool:
    copies = arch.bulk_copy
    return copies is None or any(
        product.k == 0 or copy_fault(matrices(problem, product)[index], product.batch, copies)
        for product in problem.products
        if not product.is_empty
        for index in which
    )


def _key(problem: GemmProblem) -> str:
    return table_key(problem.dtype_a.value, problem.dtype_b.value)


# ---- warp-specialised ----


def _specialised(problem: GemmProblem, device: DeviceInfo, pipeline: str) -> Iterator[GemmConfig]:
    arch = device.arch
    stored = not _any_fault(problem, arch, (2,))
    promote = problem.dtype_a in ("fp8", "bf8") and not problem.fast_accumulation
    for shape in ws_shapes(problem, arch):
        fields = shape.fields(problem.dtype_a)
        tile, warp = fields["tile"], fields["warp_tile"]
        line = ROW_BYTES // problem.dtype_c.bytes
        staged = stored and (shape.swapped or warp[1] % line == 0)
        config = GemmConfig(
            dtype_a=problem.dtype_a,
            epilogue=Epilogue.CSHUFFLE if staged else Epilogue.DEFAULT,
            promote=tile[2] // warp[2] if promote else 0,
            **{**fields, "pipeline": pipeline},
        )
        for split in splits(problem, device, tile, math.prod(shape.cluster)):
            # One tile each: nothing is left to claim.
            stays = shape.pingpong or tile_count(problem, tile) * split > units_of(device)
            yield config.replace(split_k=split, persistent=stays)
            if (1, 1, split) in arch.pipeline(pipeline).clusters[1:] and config.cluster == (1, 1, 1) and not stays:
                yield config.replace(split_k=split, persistent=False, cluster=(1, 1, split))
        if _wants_stream(problem, device, tile, shape):
            yield config.replace(reduction=Reduction.LINEAR)


def ws_shapes(problem: GemmProblem, arch: ArchSpec) -> Iterator[Shape]:
    """Shapes for the problem's rows and columns, the preferred first."""
    m, n = max(item.m for item in problem.products), max(item.n for item in problem.products)
    if m <= _FEW_ROWS:
        yield from swapped_shapes(m, arch, _key(problem), problem.layout[0] == "c")
        if m <= SIDE:
            return
    if n <= SIDE:
        columns = _columns(n, arch, _key(problem), problem.layout[1] == "r")
        for waves in (2, 1):
            yield Shape((SIDE * waves, columns), (waves, 1))
        return
    # A tile twice as tall as the problem wastes half its work, whatever else it saves.
    yield from (shape for shape in WS_SHAPES if shape.tile[0] * shape.cluster[0] < 2 * max(m, SIDE))


def swapped_shapes(m: int, arch: ArchSpec, key: str, panels: bool) -> Iterator[Shape]:
    """Transposed shapes for products of few rows: the tile has as many rows as the problem, as nearly as can be."""
    rows = _columns(m, arch, key, panels)
    yield Shape((rows, SIDE), (1, 1), swapped=True, k_rows=2)
    yield Shape((rows, SIDE), (1, 1), swapped=True)
    yield Shape((rows, SIDE * 2), (1, 2), swapped=True, k_rows=2)
    yield Shape((rows, SIDE * 2), (1, 2), swapped=True)
    yield Shape((rows, SIDE * 2), (1, 2), (1, 2), swapped=True)
    yield Shape((rows, SIDE * 4), (1, 2), swapped=True)


def _columns(size: int, arch: ArchSpec, key: str, panels: bool) -> int:
    """The narrowest instruction that covers ``size``."""
    widths = sorted(tile[1] for tile in arch.warp_tiles_for(key, "ws") if tile[0] == SIDE or tile[1] == SIDE)
    flexible = {tile[0] if tile[1] == SIDE else tile[1] for tile in arch.warp_tiles_for(key, "ws")}
    fitting = sorted(width for width in flexible if width >= size and (not panels or width % SIDE == 0))
    return fitting[0] if fitting else widths[-1]


# ---- portable ----


def portable_shapes(problem: GemmProblem, few: bool) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
    """Shapes for the problem's rows and columns, the preferred first, the most general last. ``few``: where better
    kernels are at hand.
    """
    m, n = max(item.m for item in problem.products), max(item.n for item in problem.products)
    for tile, wave, pipeline in (*PORTABLE_TILES[:2], _SMALL) if few else PORTABLE_TILES:
        if tile[0] < 2 * max(m, 16) and tile[1] < 2 * max(n, 16):
            yield tile, wave, pipeline
    yield (64, 64), (2, 2), "compv3"


def _portable(problem: GemmProblem, device: DeviceInfo, few: bool) -> Iterator[GemmConfig]:
    arch, size = device.arch, problem.dtype_a.bytes
    for (m, n), wave, pipeline in portable_shapes(problem, few):
        if pipeline not in arch.pipelines:
            continue
        warp_tiles = arch.warp_tiles_for(_key(problem), pipeline)
        if not warp_tiles:
            continue
        tile: Triple = (m, n, max(64 // size, warp_tiles[0][2]) * (2 if m * n <= SIDE * SIDE else 1))
        config = GemmConfig(
            dtype_a=problem.dtype_a,
            pipeline=pipeline,
            epilogue=Epilogue.CSHUFFLE,
            scheduler=arch.pipeline(pipeline).schedulers[0],
            tile=tile,
            wave=(*wave, 1),
            warp_tile=warp_tiles[0],
            stages=4 if pipeline == "compv4" else 0,
        )
        for split in splits(problem, device, tile, 1, resident=2 if m * n <= SIDE * SIDE else 1):
            yield config.replace(split_k=split) if split > 1 else config


# ---- sharing K ----


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
    if not tiles or tiles * cluster >= units * _FULL:
        return (1,)
    most = min(units // tiles, steps // _LEAST_STEPS, _MOST_SLICES)
    return (1, most) if most > 1 else (1,)


def tile_count(problem: GemmProblem, tile: Triple) -> int:
    return sum(ceil_div(item.m, tile[0]) * ceil_div(item.n, tile[1]) * item.batch for item in problem.products)


def _wants_stream(problem: GemmProblem, device: DeviceInfo, tile: Triple, shape: Shape) -> bool:
    """Whether the last round of tiles would leave much of the device idle."""
    if problem.split_k or problem.grouped or problem.is_batched or shape.pingpong or shape.swapped:
        return False
    units, tiles = units_of(device), tile_count(problem, tile)
    rounds = tiles / units
    return tiles >= units // 2 and rounds / math.ceil(rounds) < _FULL and problem.k >= 16 * tile[2]
