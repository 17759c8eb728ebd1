"""Candidates of the pipelines without producers on CUDA devices, for operands that the copy engine cannot reach, and
for fp32.

Capacities are left to the rules, times to the cost model.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_gemm.config.choices import table_key
from tilewright_gemm.config.config import GemmConfig, Triple
from tilewright_gemm.launch.splits import splits
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Epilogue
from tilewright_kit.contract.device import DeviceInfo

__all__ = ["PORTABLE_TILES", "cuda_algorithms", "portable_shapes"]

_SIDE = 64

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
_SMALL = ((_SIDE, _SIDE), (2, 2), "compv4")


def portable_shapes(problem: GemmProblem, few: bool) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
    """Shapes for the problem's rows and columns, the preferred first, the most general last. ``few``: where better
    kernels are at hand.
    """
    m, n = max(item.m for item in problem.products), max(item.n for item in problem.products)
    for tile, wave, pipeline in (*PORTABLE_TILES[:2], _SMALL) if few else PORTABLE_TILES:
        if tile[0] < 2 * max(m, 16) and tile[1] < 2 * max(n, 16):
            yield tile, wave, pipeline
    yield (64, 64), (2, 2), "compv3"


def cuda_algorithms(problem: GemmProblem, device: DeviceInfo, few: bool) -> Iterator[GemmConfig]:
    """Configurations with the algorithm set, the signature not; the most general last."""
    arch, size = device.arch, problem.dtype_a.bytes
    for (m, n), wave, pipeline in portable_shapes(problem, few):
        if pipeline not in arch.pipelines:
            continue
        warp_tiles = arch.warp_tiles_for(table_key(problem.dtype_a.value, problem.dtype_b.value), pipeline)
        if not warp_tiles:
            continue
        tile: Triple = (m, n, max(64 // size, warp_tiles[0][2]) * (2 if m * n <= _SIDE * _SIDE else 1))
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
        for split in splits(problem, device, tile, 1, resident=2 if m * n <= _SIDE * _SIDE else 1):
            yield config.replace(split_k=split) if split > 1 else config
