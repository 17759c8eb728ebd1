"""Candidates with block scales: algorithms of plain products whose steps end where blocks of k end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tilewright_gemm.config.block_scales import block_of, has_exponents, takes_exponents
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.vocabulary import ScaleB
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.footprint.workgroup import is_specialised
from tilewright_kit.tiles.tables import with_extent

__all__ = ["block_scaled"]

_CPU_PIPELINE = "compv3"


def block_scaled(algorithms: Iterable[GemmConfig], device: DeviceInfo, scale_b: ScaleB) -> Iterator[GemmConfig]:
    """The algorithms that a block of k divides into whole steps, or is made one step of; those whose instructions take
    the factors, as they are.
    """
    block, exponents = block_of(scale_b), has_exponents(scale_b)
    for config in algorithms:
        if device.arch.kind == "cpu":
            if config.pipeline == _CPU_PIPELINE:  # scaled values are fp32, also where 8 bits become pairs of bf16
                tile = with_extent(config.tile, 2, config.tile[2] // config.warp_tile[2])
                yield config.replace(tile=tile, warp_tile=with_extent(config.warp_tile, 2, 1))
        elif exponents and takes_exponents(config, device.arch):
            yield config.replace(promote=0)
        elif not (exponents and is_specialised(config, device.arch)) and config.scheduler != "pingpong":
            k = config.tile[2] if block.k % config.tile[2] == 0 else block.k
            if not exponents or k % config.warp_tile[2] == 0:
                yield config.replace(tile=with_extent(config.tile, 2, k), promote=0)
