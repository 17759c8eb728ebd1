"""Kernel sets of CUDA devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.candidates.im2col import COLUMN_SHAPES, ROW_SHAPES
from tilewright_grouped_conv.candidates.shapes import (
    CUDA_SHAPES,
    DEPTHWISE_STEPS,
    VECTOR_BYTES,
    Shape,
    Step,
    depthwise_fields,
    shared_vectors,
    vectors,
)
from tilewright_grouped_conv.config.config import BULK_PIPELINE, ConvConfig
from tilewright_grouped_conv.config.pipelines import BULK, IM2COL
from tilewright_grouped_conv.vocabulary import Direction, Scale, Specialization, layout_of
from tilewright_kit.kernel_sets.declare import ANY, Declaration, declare
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Binary, Epilogue, Unary, default_output

__all__ = [
    "CDNA",
    "CUDA",
    "RDNA",
    "cuda_defaults",
    "cuda_essential",
    "cuda_full",
    "every_shape",
    "gpu_variants",
    "product",
]

Declarations = Iterator[Declaration[ConvConfig]]


class Target(NamedTuple):
    """GPUs that kernels are declared for."""

    kind: str
    wave_size: int
    """Threads of a wave."""

    def matches(self, arch: ArchSpec) -> bool:
        return (arch.kind, arch.wave_size) == self


CUDA, CDNA, RDNA = Target("cuda", 32), Target("hip", 64), Target("hip", 32)

_FLOATS = (DType.FP32, DType.FP16, DType.BF16)
_EIGHT = ((DType.INT8, ""), (DType.FP8, ""), (DType.BF8, ""), (DType.FP8, "bf8"), (DType.BF8, "fp8"))
_SQUARE, _DEEP = Shape((128, 128), (2, 2), "compv4", 64, 4), Shape((128, 64), (2, 2), "compv4", 128, 3)
_WIDE = Shape((128, 128), (2, 4), "compv4", 64, 4)
"""For fp32, whose products hold more in registers: more waves share the large tile."""
_NARROW, _SMALL = Shape((128, 32), (4, 1), "compv4", 64, 4), Shape((64, 64), (2, 2), "compv4", 64, 4)
_MERGED = (
    (Specialization.DEPTHWISE, 64),
    (Specialization.DIRECT, 32),
    (Specialization.DIRECT, 16),
    (Specialization.DIRECT, 8),
    (Specialization.DIRECT, 4),
    (Specialization.DIRECT, 2),
)
"""Groups of 1, 2, 4 and 8 channels, of which blocks of eight channels are made; of 16 and 32, which are blocks."""
_ELEMENT = (1, 1, 8)


def product(
    config: type[ConvConfig], target: Target, shape: Shape, dtype: DType, **fields: Any
) -> Declaration[ConvConfig]:
    """Kernels of one shape and type, with the widest accesses unless ``fields`` say otherwise."""
    out = DType(fields["dtype_out"]) if isinstance(fields.get("dtype_out"), str) else default_output(dtype)
    tile, access = (*shape.tile, shape.line // dtype.bytes), vectors(dtype, out)
    if config.direction is Direction.BACKWARD_DATA and target.kind == "hip":
        access = shared_vectors(access, tile, shape.wave[0] * shape.wave[1] * target.wave_size)
    shaped: dict[str, Any] = {
        "dtype_in": dtype,
        "pipeline": shape.pipeline,
        "tile": tile,
        "wave": (*shape.wave, 1),
        "warp_tile": ANY,
        "stages": shape.stages,
        "vector_sizes": access,
    }
    return declare(config, **{**shaped, **fields}).where(target.matches)


def depthwise(
    config: type[ConvConfig], target: Target, step: Step, dtype: DType, ndim: int = 2, **fields: Any
) -> Declaration[ConvConfig]:
    """Depthwise kernels of one step and type, with channels last."""
    shaped = depthwise_fields(step, dtype, default_output(dtype), ndim)
    layout = {"layout": layout_of(ndim), "ndim": ndim}
    return declare(config, **{"dtype_in": dtype, **layout, **shaped, **fields}).where(target.matches)


def gpu_variants(config: type[ConvConfig], target: Target, shape: Shape, narrow: Shape) -> Declarations:
    """Kernels of each direction beside plain products: fused steps, phases, slices, depthwise kernels."""
    direction, half = config.direction, DType.FP16

    def one(**fields: Any) -> Declaration[ConvConfig]:
        return product(config, target, shape, half, **fields)

    yield one(epilogue=Epilogue.DEFAULT)
    yield one(vector_sizes=_ELEMENT)
    for ndim in (1, 3):
        yield one(layout=layout_of(ndim), ndim=ndim)
    yield one(specialization=[Specialization.FILTER1X1_PAD0, Specialization.FILTER3X3])
    yield one(specialization=Specialization.FILTER1X1_STRIDE1_PAD0, explicit_gemm=[False, True])
    if direction is not Direction.BACKWARD_WEIGHT:
        yield one(mapped_rows=True)
    if direction is Direction.FORWARD:
        yield one(bias="fp32", unary=[Unary.NONE, Unary.RELU])
        yield one(binary=Binary.MULTI_D_ADD, num_d_tensors=1, unary=Unary.RELU)
        yield product(config, target, shape, DType.INT8, dtype_out="fp16", scale=Scale.CHANNEL)
        yield one(split_k=2)
    else:
        yield one(accumulate=True)
    if direction is Direction.BACKWARD_DATA:
        yield one(bias="fp32", unary=Unary.RELU)
        yield one(mapped_rows=True, accumulate=True)
        yield one(split_k=2)
    if direction is Direction.BACKWARD_WEIGHT:
        yield one(dtype_out="fp32")
        for dtype in (DType.FP32, DType.FP16):
            yield product(config, target, shape, dtype, split_k=8, two_stage=[False, True])
            yield product(config, target, narrow, dtype, split_k=8, two_stage=[False, True])
    for dtype in _FLOATS:
        yield depthwise(config, target, DEPTHWISE_STEPS[0], dtype)
    constants: dict[str, Any] = {"filter": (1, 3, 3), "stride": (1, 1, 1), "dilation": (1, 1, 1)}
    for step in DEPTHWISE_STEPS[1:]:
        yield depthwise(config, target, step, half, **constants)
    yield depthwise(config, target, Step(4, 4, (1, 4)), half, **constants)
    yield depthwise(config, target, Step(4, 4, (1, 4)), half, **{**constants, "stride": (1, 2, 2)})
    for ndim in (1, 3):
        yield depthwise(config, target, DEPTHWISE_STEPS[0], half, ndim)
    first: dict[str, Any] = {"layout": layout_of(2, True), "vector_sizes": (1, 1, 1)}
    yield depthwise(config, target, DEPTHWISE_STEPS[0], half, **first)
    if direction is Direction.BACKWARD_DATA:
        yield depthwise(config, target, DEPTHWISE_STEPS[0], half, mapped_rows=True)


def _loops(config: type[ConvConfig]) -> Declarations:
    """Merged groups, and small groups without a product."""
    constants = {"filter": (1, 3, 3), "stride": (1, 1, 1), "dilation": (1, 1, 1)}
    for special, merged in _MERGED:
        fields: dict[str, Any] = {"specialization": special, "num_groups_to_merge": merged, "pixel_tile": (1, 8, 8)}
        yield depthwise(config, CUDA, Step(4, 8), DType.FP16, **{**fields, **constants})
        if config.direction is not Direction.BACKWARD_WEIGHT:
            yield from _faster_loops(config, {**fields, **constants})
    for dtype in (DType.FP16, DType.FP32):
        yield depthwise(config, CUDA, Step(4, 8), dtype, specialization=Specialization.DIRECT, vector_sizes=(4, 4, 4))


def _faster_loops(config: type[ConvConfig], fields: dict[str, Any]) -> Declarations:
    """The other forms of merged groups: sums in lanes, of the most common sizes; tensors that a copy engine moves."""
    stored = {**fields, "epilogue": Epilogue.CSHUFFLE}
    boxes = {**stored, "pipeline": BULK_PIPELINE, "pixel_tile": (2, 4, 8)}
    yield depthwise(config, CUDA, Step(4, 8), DType.FP16, **boxes).where(BULK.drives)
    if fields["num_groups_to_merge"] in (64, 16):
        yield depthwise(config, CUDA, Step(4, 8), DType.FP16, **stored)
        yield depthwise(config, CUDA, Step(4, 8), DType.BF16, **boxes).where(BULK.drives)


def _im2col(config: type[ConvConfig], dtype: DType, count: int) -> Declarations:
    """Kernels whose pixels a copy engine gathers: the first shapes that are considered."""
    weights = config.direction is Direction.BACKWARD_WEIGHT
    for shape in (COLUMN_SHAPES if weights else ROW_SHAPES)[:count]:
        yield declare(config, **shape.fields(dtype, default_output(dtype))).where(IM2COL.drives)


def cuda_essential(config: type[ConvConfig], tiny: bool = False) -> Declarations:
    """Every type in one tile, and every variant; ``tiny``: one kernel."""
    if tiny:
        yield product(config, CUDA, _SQUARE, DType.FP16)
        return
    for dtype in _FLOATS:
        yield product(config, CUDA, _DEEP, dtype)
    if config.direction is Direction.FORWARD:
        for dtype, other in _EIGHT:
            yield product(config, CUDA, _SMALL, dtype, dtype_wei=other)
    yield from gpu_variants(config, CUDA, _SMALL, _NARROW)
    yield from _loops(config)
    yield from _im2col(config, DType.FP16, 1)


def cuda_defaults(config: type[ConvConfig]) -> Declarations:
    """The shapes that are considered for problems in half precision, some for other types, and every variant."""
    for shape in CUDA_SHAPES:
        yield product(config, CUDA, shape, DType.FP16)
    for shape in (_SQUARE, _DEEP, _SMALL):
        yield product(config, CUDA, shape, DType.BF16)
        wide = shape is _SQUARE and config.direction is not Direction.BACKWARD_WEIGHT
        yield product(config, CUDA, _WIDE if wide else shape, DType.FP32)
    if config.direction is Direction.FORWARD:
        for dtype, other in _EIGHT:
            yield product(config, CUDA, _SMALL, dtype, dtype_wei=other)
    yield from gpu_variants(config, CUDA, _SQUARE, _NARROW)
    yield from _loops(config)
    yield from _im2col(config, DType.BF16, 4)


def cuda_full(config: type[ConvConfig]) -> Declarations:
    """Every shape with every type, dimension and access."""
    yield from every_shape(config, CUDA, CUDA_SHAPES)


def every_shape(config: type[ConvConfig], target: Target, shapes: tuple[Shape, ...]) -> Declarations:
    """Shapes with every type, dimension, access and epilogue; of floats also those that read the image as a matrix,
    and gradients of the weights in two stages.
    """
    eight = _EIGHT if config.direction is Direction.FORWARD else ()
    for dtype, other in (*((dtype, "") for dtype in _FLOATS), *eight):
        for shape in shapes:
            for ndim in (1, 2, 3):
                for access in (VECTOR_BYTES, dtype.bytes):
                    yield product(
                        config,
                        target,
                        shape,
                        dtype,
                        dtype_wei=other,
                        layout=layout_of(ndim),
                        ndim=ndim,
                        vector_sizes=vectors(dtype, default_output(dtype), access),
                        epilogue=[Epilogue.CSHUFFLE, Epilogue.DEFAULT],
                    )
                if other or dtype.bytes == 1:
                    continue
                placed: dict[str, Any] = {"layout": layout_of(ndim), "ndim": ndim}
                pointwise = {"specialization": Specialization.FILTER1X1_STRIDE1_PAD0, "explicit_gemm": True}
                yield product(config, target, shape, dtype, **placed, **pointwise)
                if config.direction is Direction.BACKWARD_WEIGHT:
                    yield product(config, target, shape, dtype, **placed, split_k=8, two_stage=True)
