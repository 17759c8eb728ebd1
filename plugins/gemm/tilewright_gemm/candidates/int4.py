"""Candidates with packed 4-bit weights: algorithms of plain products whose steps end where groups end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.int4 import GROUP_K
from tilewright_gemm.rules.int4 import INT4_PIPELINE
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.tables import with_extent

__all__ = ["with_int4"]


def with_int4(algorithms: Iterable[GemmConfig], device: DeviceInfo) -> Iterator[GemmConfig]:
    """The algorithms that unpack values on their way, in steps that divide a group."""
    arch = device.arch
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
