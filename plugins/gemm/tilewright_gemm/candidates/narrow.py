"""Candidates with operands of fewer than 8 bits: algorithms of products of fp8 that read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tilewright_gemm.config.block_scales import takes_packed, waves_of_rounds
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.narrow import widths
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.rules.narrow import NARROW_PIPELINE
from tilewright_gemm.vocabulary import Epilogue
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.footprint.workgroup import is_specialised
from tilewright_kit.tiles.tables import with_extent

__all__ = ["with_narrow"]


_PAIR, _SIDE = (256, 128), 256
"""The tile of four waves that becomes one of eight, and that one's rows and columns."""
_SHALLOW, _DEEP = 128, 256
"""Depths of tiles that 4-bit values make lines of 64 and of 128 bytes of."""


def with_narrow(algorithms: Iterable[GemmConfig], problem: GemmProblem, device: DeviceInfo) -> Iterator[GemmConfig]:
    """The algorithms whose instructions take the operands as they are stored, or that widen them on their way."""
    arch = device.arch
    for config in algorithms:
        if arch.kind == "cpu" or takes_packed(config.replace(scale_a=problem.scale_a, scale_b=problem.scale_b), arch):
            yield config
            if _is_shallow(config, problem):
                deep = config.replace(tile=with_extent(config.tile, 2, _DEEP))
                yield deep
                if deep.tile[:2] == _PAIR:  # twice as large, with a wave beside each of its own
                    large = deep.replace(tile=(_SIDE, _SIDE, _DEEP), epilogue=Epilogue.DEFAULT)
                    waves = waves_of_rounds(large.replace(scale_a=problem.scale_a, scale_b=problem.scale_b))
                    yield from (large.replace(wave=wave) for wave in waves)
        elif NARROW_PIPELINE in arch.pipelines and not is_specialised(config, arch):
            scheduler = arch.pipeline(NARROW_PIPELINE).schedulers[0]
            yield config.replace(pipeline=NARROW_PIPELINE, scheduler=scheduler, stages=0)


def _is_shallow(config: GemmConfig, problem: GemmProblem) -> bool:
    """True if a tile whose lines are as long as those of 8-bit floats goes straight to LDS, too."""
    four = widths(problem.scale_a, problem.scale_b) == (4, 4)
    return four and config.pipeline == "comp_async" and config.tile[2] == _SHALLOW
