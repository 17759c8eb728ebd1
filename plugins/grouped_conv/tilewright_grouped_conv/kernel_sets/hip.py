"""Kernel sets of AMD GPUs: the essential one, which is built and checked for every arch, and the default one."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_grouped_conv.candidates.shapes import HIP_SHAPES, Shape
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.kernel_sets.cuda import CDNA, RDNA, every_shape, gpu_variants, product
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.kernel_sets.declare import Declaration
from tilewright_kit.types.dtypes import DType

__all__ = ["hip_defaults", "hip_essential", "hip_full"]

Declarations = Iterator[Declaration[ConvConfig]]

_FLOATS = (DType.FP32, DType.FP16, DType.BF16)
_EIGHT = ((DType.INT8, ""), (DType.FP8, ""), (DType.BF8, ""), (DType.FP8, "bf8"), (DType.BF8, "fp8"))
_USUAL = (
    (CDNA, Shape((128, 64), (2, 2), "compv3"), Shape((128, 32), (4, 1), "mem")),
    (RDNA, Shape((128, 64), (4, 2), "compv3"), Shape((128, 16), (8, 1), "mem")),
)
"""GPUs, and a usual and a narrow tile of them."""


def hip_essential(config: type[ConvConfig], tiny: bool = False) -> Declarations:
    """Every type in one tile, and every variant; ``tiny``: one kernel."""
    for target, shape, narrow in _USUAL:
        if tiny:
            yield product(config, target, shape, DType.FP16)
            continue
        for dtype in _FLOATS:
            yield product(config, target, shape, dtype)
        if config.direction is Direction.FORWARD:
            yield product(config, target, shape._replace(pipeline="compv4"), DType.FP16)
            for dtype, other in _EIGHT:
                # Where the pair of types has an instruction.
                yield product(config, target, shape, dtype, dtype_wei=other)
        yield from gpu_variants(config, target, shape, narrow)


def hip_defaults(config: type[ConvConfig]) -> Declarations:
    """The essential kernels, and the shapes that are considered for problems in half precision."""
    yield from hip_essential(config)
    for shape in HIP_SHAPES:
        for target in (CDNA, RDNA):
            yield product(config, target, shape, DType.FP16)


def hip_full(config: type[ConvConfig]) -> Declarations:
    """Every shape with every type, dimension and access."""
    for target in (CDNA, RDNA):
        yield from every_shape(config, target, HIP_SHAPES)
