"""Candidates with operands of fewer than 8 bits: algorithms of products of fp8 that read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tilewright_gemm.config.block_scales import takes_packed
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.rules.narrow import NARROW_PIPELINE
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.footprint.workgroup import is_specialised

__all__ = ["with_narrow"]


def with_narrow(algorithms: Iterable[GemmConfig], problem: GemmProblem, device: DeviceInfo) -> Iterator[GemmConfig]:
    """The algorithms whose instructions take the operands as they are stored, or that widen them on their way."""
    arch = device.arch
    for config in algorithms:
        if arch.kind == "cpu" or takes_packed(config.replace(scale_a=problem.scale_a, scale_b=problem.scale_b), arch):
            yield config
        elif NARROW_PIPELINE in arch.pipelines and not is_specialised(config, arch):
            scheduler = arch.pipeline(NARROW_PIPELINE).schedulers[0]
            yield config.replace(pipeline=NARROW_PIPELINE, scheduler=scheduler, stages=0)
