"""Shapes of GPU kernels that are worth considering: tiles and waves of products, and steps of depthwise kernels.

Kernel sets are made of them, and so are candidates: ``gpu_shapes`` gives algorithms without regard to a problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import DIRECT_PIPELINE, Triple
from tilewright_grouped_conv.vocabulary import Direction, Specialization
from tilewright_kit.tiles.choices import warp_tile_for
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Epilogue

__all__ = [
    "CUDA_SHAPES",
    "DEPTHWISE_STEPS",
    "HIP_SHAPES",
    "VECTOR_BYTES",
    "Shape",
    "Step",
    "depthwise_fields",
    "gpu_shapes",
    "shape_fields",
    "shape_warp_tiles",
    "shared_vectors",
    "vectors",
]

VECTOR_BYTES = 16


class Shape(NamedTuple):
    """Output tile of a workgroup, how its waves stand, its pipeline, and bytes of the tile along k."""

    tile: tuple[int, int]
    wave: tuple[int, int]
    pipeline: str
    line: int = 64
    stages: int = 0


CUDA_SHAPES = (
    Shape((128, 128), (2, 2), "compv4", 64, 4),
    Shape((128, 128), (2, 2), "compv4", 128, 3),
    Shape((128, 128), (2, 4), "compv4", 64, 4),
    Shape((256, 128), (4, 2), "compv4", 64, 4),
    Shape((128, 256), (2, 4), "compv4", 64, 4),
    Shape((256, 64), (4, 1), "compv4", 64, 4),
    Shape((128, 64), (2, 2), "compv4", 64, 4),
    Shape((128, 64), (2, 2), "compv4", 128, 3),
    Shape((64, 128), (2, 2), "compv4", 64, 4),
    Shape((64, 64), (2, 2), "compv4", 64, 4),
    Shape((64, 64), (2, 2), "compv4", 128, 3),
    Shape((128, 32), (4, 1), "compv4", 64, 4),
    Shape((128, 16), (4, 1), "compv4", 64, 4),
    Shape((256, 16), (4, 1), "compv4", 64, 4),
    Shape((128, 16), (4, 1), "compv4", 32, 4),
    Shape((16, 128), (1, 4), "compv4", 128, 4),
    Shape((64, 32), (2, 2), "compv4", 128, 4),
    Shape((32, 64), (1, 4), "compv4", 128, 4),
    Shape((64, 64), (2, 2), "compv3", 64),
)
"""Tall tiles first: products of convolutions have many pixels and, in groups, few channels."""

HIP_SHAPES = (
    Shape((256, 128), (2, 2), "compv3"),
    Shape((256, 128), (4, 2), "compv3"),
    Shape((128, 128), (2, 2), "compv4"),
    Shape((128, 128), (2, 4), "compv4"),
    Shape((128, 128), (2, 2), "compv3"),
    Shape((128, 128), (2, 4), "compv3"),
    Shape((128, 64), (2, 2), "compv3"),
    Shape((128, 64), (4, 2), "compv3"),
    Shape((64, 128), (2, 2), "compv3"),
    Shape((64, 128), (2, 4), "compv3"),
    Shape((64, 64), (2, 2), "compv3", 128),
    Shape((64, 64), (4, 2), "compv3", 128),
    Shape((128, 32), (4, 1), "mem"),
    Shape((128, 16), (8, 1), "mem"),
    Shape((64, 16), (4, 1), "mem"),
    Shape((64, 32), (2, 1), "mem", 128),
    Shape((32, 64), (1, 4), "mem", 128),
    Shape((32, 64), (2, 4), "mem", 128),
)
"""All archs together: those whose waves an arch lacks fall away."""


class Step(NamedTuple):
    """Without a product: waves, channels of a step (in vectors; 0: the template's choice) and pixels (H, W)."""

    waves: int
    vectors: int = 0
    pixels: tuple[int, int] = (0, 0)


DEPTHWISE_STEPS = (Step(4), Step(4, 4, (2, 4)), Step(4, 8, (2, 4)), Step(2, 8, (1, 8)))


def vectors(dtype: DType, out: DType, most: int = VECTOR_BYTES) -> Triple:
    """Accesses of up to ``most`` bytes to A, B and C."""
    width = max(min(most, VECTOR_BYTES) // dtype.bytes, 1)
    return width, width, VECTOR_BYTES // out.bytes


def shared_vectors(sizes: Triple, tile: Triple, threads: int) -> Triple:
    """Accesses of which every thread has a whole one of the tiles of A and B, as the image's gradient wants them."""
    m, n, k = tile
    a, b = (
        min(size, 1 << (max(extent * k // max(threads, 1), 1).bit_length() - 1))
        for size, extent in zip(sizes, (m, n), strict=False)
    )
    return a, b, sizes[2]


def shape_fields(shape: Shape, dtype: DType, arch: ArchSpec, key: str) -> dict[str, Any] | None:
    """Fields of a product of this shape; None if the arch has no pipeline, waves or warp tile for it."""
    wave = (*shape.wave, 1)
    if shape.pipeline not in arch.pipelines or wave not in arch.waves:
        return None
    depth = shape.line // dtype.bytes
    part = (shape.tile[0] // shape.wave[0], shape.tile[1] // shape.wave[1])
    warp = warp_tile_for(shape_warp_tiles(arch, key, shape.pipeline), part, depth)
    if warp is None:
        return None
    fields: dict[str, Any] = {"pipeline": shape.pipeline, "tile": (*shape.tile, depth), "wave": wave}
    offer = arch.pipeline(shape.pipeline)
    stages = shape.stages if offer.min_stages <= shape.stages <= offer.max_stages else 0
    return fields | {"warp_tile": warp, "stages": stages if offer.min_stages < offer.max_stages else 0}


def shape_warp_tiles(arch: ArchSpec, key: str, pipeline: str) -> list[Triple]:
    """Warp tiles that rules on waves of 32 leave."""
    tiles = arch.warp_tiles_for(key, pipeline)
    return [tile for tile in tiles if arch.wave_size > 32 or arch.kind != "hip" or tile[0] != 32]


def depthwise_fields(step: Step, dtype: DType, out: DType, ndim: int) -> dict[str, Any]:
    """Fields of a depthwise kernel with channels last."""
    width = VECTOR_BYTES // dtype.bytes
    pixels = (0, 0, 0)
    if step.pixels != (0, 0):
        pixels = (1, 1 if ndim == 1 else step.pixels[0], step.pixels[1])
    return {
        "pipeline": DIRECT_PIPELINE,
        "epilogue": Epilogue.DEFAULT,
        "scheduler": "default",
        "tile": (1, 1, 1),
        "wave": (step.waves, 1, 1),
        "warp_tile": (1, 1, 1),
        "vector_sizes": (width, width, min(width, VECTOR_BYTES // out.bytes)),
        "specialization": Specialization.DEPTHWISE,
        "channel_tile": step.vectors * width,
        "pixel_tile": pixels,
    }


def gpu_shapes(arch: ArchSpec, dtype: DType, key: str, direction: Direction) -> Iterator[dict[str, Any]]:
    """Fields of products that the arch may compute, the preferred first, the most general last; accesses are left to
    the problem.
    """
    for shape in CUDA_SHAPES if arch.kind == "cuda" else HIP_SHAPES:
        backward = arch.kind == "hip" and direction is not Direction.FORWARD
        if backward and shape.pipeline == "compv4":
            continue
        # Compiled for two workgroups of a unit, this one spills.
        weights = direction is Direction.BACKWARD_WEIGHT and dtype == DType.FP32 and arch.kind == "cuda"
        if weights and (shape.tile, shape.wave) == ((128, 128), (2, 4)):
            continue
        fields = shape_fields(shape, dtype, arch, key)
        if fields is not None:
            yield fields
