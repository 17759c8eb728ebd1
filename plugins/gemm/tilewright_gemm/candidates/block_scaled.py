"""Candidates with block scales: algorithms of plain products whose steps end where blocks of k end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tilewright_gemm.config.block_scales import BLOCK_K
from tilewright_gemm.config.config import GemmConfig
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.tables import with_extent

__all__ = ["block_scaled"]

_CPU_PIPELINE = "compv3"


def block_scaled(algorithms: Iterable[GemmConfig], device: DeviceInfo) -> Iterator[GemmConfig]:
    """The algorithms that a block of k divides into whole steps, or is made one step of."""
    for config in algorithms:
        if device.arch.kind == "cpu":
            if config.pipeline == _CPU_PIPELINE:  # scaled values are fp32, also where 8 bits become pairs of bf16
                tile = with_extent(config.tile, 2, config.tile[2] // config.warp_tile[2])
                yield config.replace(tile=tile, warp_tile=with_extent(config.warp_tile, 2, 1))
        else:
            k = config.tile[2] if BLOCK_K % config.tile[2] == 0 else BLOCK_K
            if config.scheduler != "pingpong":
                yield config.replace(tile=with_extent(config.tile, 2, k), promote=0)
