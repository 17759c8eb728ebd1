"""Candidates with packed 4-bit weights: algorithms of plain products whose steps end where groups end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tilewright_arch import ArchSpec
from tilewright_gemm.config.choices import table_key
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.int4 import GROUP_K, INT4_PIPELINE, INT4_RING
from tilewright_gemm.launch.geometry import matrices
from tilewright_gemm.launch.splits import splits
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Epilogue
from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.tables import with_extent

__all__ = ["INT4_ALIGNMENT", "RING_TILES", "int4_mismatches", "ring_config", "with_int4"]

INT4_ALIGNMENT = 16
"""Bytes: alignment of the lines of A and the columns of B that are copied asynchronously."""
RING_TILES: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = (
    ((16, 128), (1, 4)),
    ((16, 64), (1, 4)),
    ((32, 128), (1, 4)),
    ((64, 64), (2, 2)),
    ((64, 128), (2, 4)),
    ((128, 128), (2, 4)),
)
"""Tiles and waves of the ring's kernels."""
_RESIDENT = 2


def with_int4(
    algorithms: Iterable[GemmConfig], problem: GemmProblem, device: DeviceInfo, ring: bool
) -> Iterator[GemmConfig]:
    """The algorithms that unpack values on their way, in steps that divide a group; ``ring``: and the ring's, first."""
    arch = device.arch
    if ring and problem.layout[0] == "r":
        m = max(item.m for item in problem.products)
        for (rows, columns), wave in RING_TILES:
            if rows < 2 * max(m, 16):
                config = ring_config(problem, arch, (rows, columns), wave)
                for split in splits(problem, device, config.tile, 1, resident=_RESIDENT):
                    yield config.replace(split_k=split) if split > 1 else config
    for config in algorithms:
        if arch.kind == "cpu":
            if config.pipeline == INT4_PIPELINE:  # whose values are fp32: blocks of as many bytes are shorter
                yield config.replace(tile=with_extent(config.tile, 2, config.tile[2] // config.warp_tile[2]))
        elif INT4_PIPELINE in arch.pipelines and config.pipeline != "ws":
            k = config.tile[2] if GROUP_K % config.tile[2] == 0 else GROUP_K
            yield config.replace(
                pipeline=INT4_PIPELINE, scheduler=arch.pipeline(INT4_PIPELINE).schedulers[0], stages=0,
                tile=with_extent(config.tile, 2, k),
            )  # fmt: skip


def ring_config(problem: GemmProblem, arch: ArchSpec, tile: tuple[int, int], wave: tuple[int, int]) -> GemmConfig:
    """The ring's kernel of a tile."""
    warp_tiles = arch.warp_tiles_for(table_key(problem.dtype_a.value, problem.dtype_b.value), INT4_RING)
    return GemmConfig(
        dtype_a=problem.dtype_a,
        pipeline=INT4_RING,
        epilogue=Epilogue.CSHUFFLE,
        scheduler=arch.pipeline(INT4_RING).schedulers[0],
        tile=(*tile, GROUP_K),
        wave=(*wave, 1),
        warp_tile=warp_tiles[0],
        stages=2,
    )


def int4_mismatches(problem: GemmProblem, config: GemmConfig) -> Iterator[Violation]:
    """Operands that the ring's copies cannot reach."""
    if not problem.int4 or config.pipeline != INT4_RING:
        return
    for product in problem.products:
        a, b, _ = matrices(problem, product)
        size = problem.dtype_a.bytes
        for name, matrix, element in (("A", a, size), ("B", b, 1)):
            view = matrix.view
            steps = [view.offset, matrix.stride if matrix.rows > 1 else 0, view.batch_stride]
            if any(step * element % INT4_ALIGNMENT for step in steps):
                reason = f"lines of {name} do not begin at multiples of {INT4_ALIGNMENT} bytes"
                fix = {"pipeline": INT4_PIPELINE, "stages": 0}
                yield Violation("int4_copies", "pipeline", config.pipeline, reason, fix)
                return
