"""Candidates of the warp-specialised pipeline: tile shapes, and which of them suit a problem.

A producer fills a ring of stages through the bulk copy engine, consumers run warpgroup instructions of ``SIDE`` rows.
Capacities are left to the rules, times to the cost model. Where the caller leaves it open, K is split so that the tiles
fill the device.
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
from tilewright_gemm.launch.splits import FULL, splits, tile_count
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Epilogue, Reduction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.cost.units import units_of
from tilewright_kit.types.dtypes import DType

__all__ = [
    "INSTRUCTION_BYTES",
    "PIPELINE",
    "WS_SHAPES",
    "Shape",
    "swapped_shapes",
    "ws_algorithms",
    "ws_reaches",
    "ws_shapes",
]

PIPELINE = "ws"
SIDE = 64
ROW_BYTES, INSTRUCTION_BYTES = 128, 32
"""Along k: what a swizzled row of a stage holds, and what one instruction takes."""
_FEW_ROWS = 128
"""Rows (columns) up to which tiles are cut to size."""


class Shape(NamedTuple):
    """The cut of a problem, apart from K."""

    tile: tuple[int, int]
    wave: tuple[int, int]
    cluster: tuple[int, int] = (1, 1)
    pingpong: bool = False
    swapped: bool = False
    k_rows: int = 1
    """Length of tile_k, in ``ROW_BYTES``."""
    stages: int = 0
    """Stages as in the configuration. Few, where two workgroups are to share a unit."""

    def fields(self, a: DType) -> dict[str, Any]:
        """The fields of a configuration for A of type ``a``."""
        m, n = self.tile
        deep = INSTRUCTION_BYTES // a.bytes
        warp = (m // self.wave[0], SIDE, deep) if self.swapped else (SIDE, n // self.wave[1], deep)
        return {
            "pipeline": PIPELINE,
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
"""Shapes for problems with many rows and columns, the preferred first."""


def ws_reaches(problem: GemmProblem, arch: ArchSpec) -> bool:
    """True if the copy engine reaches A and B, and the matrix instruction takes them as they lie."""
    if arch.bulk_copy is None or not arch.warp_tiles_for(_key(problem), PIPELINE):
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


def ws_algorithms(problem: GemmProblem, device: DeviceInfo, few: bool) -> Iterator[GemmConfig]:  # noqa: ARG001
    """Configurations with the algorithm set, the signature not."""
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
            **fields,
        )
        for split in splits(problem, device, tile, math.prod(shape.cluster)):
            # One tile each: nothing is left to claim.
            stays = shape.pingpong or tile_count(problem, tile) * split > units_of(device)
            yield config.replace(split_k=split, persistent=stays)
            if (1, 1, split) in arch.pipeline(PIPELINE).clusters[1:] and config.cluster == (1, 1, 1) and not stays:
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
    widths = sorted(tile[1] for tile in arch.warp_tiles_for(key, PIPELINE) if tile[0] == SIDE or tile[1] == SIDE)
    flexible = {tile[0] if tile[1] == SIDE else tile[1] for tile in arch.warp_tiles_for(key, PIPELINE)}
    fitting = sorted(width for width in flexible if width >= size and (not panels or width % SIDE == 0))
    return fitting[0] if fitting else widths[-1]


def _wants_stream(problem: GemmProblem, device: DeviceInfo, tile: Triple, shape: Shape) -> bool:
    """True if the last round of tiles would leave much of the device idle."""
    if problem.split_k or problem.grouped or problem.is_batched or shape.pingpong or shape.swapped:
        return False
    units, tiles = units_of(device), tile_count(problem, tile)
    rounds = tiles / units
    return tiles >= units // 2 and rounds / math.ceil(rounds) < FULL and problem.k >= 16 * tile[2]
