"""The default kernel set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_gemm.fusion import PIPELINE, SCALES, ScaleBlock, Shape, offered
from tilewright_kit.kernel_sets.declare import ANY, Declaration, DeferredDeclarations, KernelSet, declare
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Epilogue
from tilewright_moe.config import MoeConfig

__all__ = ["KERNEL_SETS"]

_HALVES = [DType.FP16, DType.BF16]
_LAYOUTS = ["rcr", "rrr"]
_PORTABLE = (
    ((128, 128), (2, 2)),
    ((64, 64), (2, 2)),
    ((16, 64), (1, 4)),
)
"""Tile and waves of kernels without producers."""


_SHAPES = (
    *(Shape((rows, 128), (1, 2), swapped=True) for rows in (8, 16, 32, 64, 128, 192)),
    Shape((16, 64), (1, 1), swapped=True, k_rows=2),
    Shape((128, 128), (1, 1), pingpong=True),
    Shape((128, 256), (2, 1)),
    Shape((256, 128), (2, 1)),
)
"""Cuts of the warp-specialised pipeline."""


def _specialised(arch: ArchSpec) -> bool:
    return PIPELINE in arch.pipelines


def _narrow_waves(arch: ArchSpec) -> bool:
    return arch.kind == "hip" and arch.wave_size == 32


def _portable(arch: ArchSpec) -> bool:
    return "compv4" in arch.pipelines and arch.kind == "cuda"


def _block_scaled() -> Iterator[Declaration[MoeConfig]]:
    """Products of fp8 with a factor for each block of rows and of weights."""
    for block in (ScaleBlock.ROWS_AND_SQUARES, ScaleBlock.ROWS_AND_COLUMNS):
        scale_a, scale_b = SCALES[block]
        scales: dict[str, Any] = {"dtype_a": DType.FP8, "dtype_c": "bf16", "scale_a": scale_a, "scale_b": scale_b}
        yield declare(
            MoeConfig, **scales, pipeline="compv3", epilogue=Epilogue.DEFAULT, tile=ANY, wave=(1, 1, 1), warp_tile=ANY
        ).for_kinds("cpu")
        small = {"tile": (64, 64, 128), "wave": (2, 2, 1), "persistent": True}
        yield declare(MoeConfig, **scales, **small, warp_tile=(16, 8, 32), stages=4).where(_portable)
        yield declare(MoeConfig, **scales, **small, warp_tile=ANY, pipeline="compv3").for_kinds("hip")
        for shape in _SHAPES:
            if shape.swapped and shape.k_rows == 1 and shape.tile[0] <= 128:
                yield declare(MoeConfig, **(scales | shape.fields(DType.FP8))).where(_specialised)


def _fused() -> Iterator[Declaration[MoeConfig]]:
    """Kernels with a gate's activation, and with results in fp8."""
    types: dict[str, Any] = {"dtype_a": [DType.BF16, DType.FP8], "dtype_c": "fp32"}
    for steps in ({"gated": True, "result": "bf16"}, {"gated": True, "result": "fp8"}, {"result": "fp8"}):
        fused = types | steps
        yield declare(
            MoeConfig, **fused, pipeline="compv3", epilogue=Epilogue.DEFAULT, tile=ANY, wave=(1, 1, 1), warp_tile=ANY
        ).for_kinds("cpu")
        columns = 256 if steps == {"gated": True, "result": "fp8"} else 128
        small: dict[str, Any] = {"tile": (64, columns, 64), "wave": (4, 1, 1), "persistent": True}
        for dtype, warp in ((DType.BF16, (16, 8, 16)), (DType.FP8, (16, 8, 32))):
            yield declare(MoeConfig, **(fused | small | {"dtype_a": dtype}), warp_tile=warp, stages=3).where(_portable)


def _declarations() -> Iterator[Declaration[MoeConfig]]:
    base: dict[str, Any] = {"layout": _LAYOUTS, "epilogue": Epilogue.DEFAULT, "tile": ANY, "warp_tile": ANY}
    types = [DType.FP32, *_HALVES, DType.FP8]
    yield declare(MoeConfig, dtype_a=types, pipeline="compv3", scheduler=ANY, wave=ANY, **base).for_kinds("cpu")
    yield declare(MoeConfig, dtype_a=types, pipeline="mem", wave=ANY, **base).for_kinds("cpu")
    for dtypes, warp, k in (([DType.FP32], (16, 8, 4), 16), (_HALVES, (16, 8, 16), 32), ([DType.FP8], (16, 8, 32), 64)):
        for (m, n), wave in _PORTABLE:
            yield declare(
                MoeConfig,
                dtype_a=dtypes,
                layout=_LAYOUTS,
                tile=(m, n, k * (2 if m * n <= 64 * 64 else 1)),
                # Fragments of fp32 and of widened 8-bit floats leave less room for accumulators.
                wave=(2, 4, 1) if m * n > 64 * 64 and dtypes is not _HALVES else (*wave, 1),
                warp_tile=warp,
                persistent=True,
                stages=4,
            ).where(_portable)
    yield from _block_scaled()
    yield from _fused()
    for shape in _SHAPES:
        yield declare(MoeConfig, dtype_a=_HALVES, layout=_LAYOUTS, **shape.fields(DType.FP16)).where(_specialised)
        if shape.tile[0] <= 128 and shape.swapped:
            promoted = {**shape.fields(DType.FP8), "promote": 4 * shape.k_rows, "dtype_c": ["", "bf16"]}
            yield declare(MoeConfig, dtype_a=DType.FP8, **promoted).where(_specialised)
    for dtypes, k in ((_HALVES, 64), ([DType.FP8], 128)):
        yield declare(
            MoeConfig, dtype_a=dtypes, layout="rcr", tile=(128, 128, k), wave=(2, 2, 1), warp_tile=ANY, persistent=True
        ).for_kinds("hip")
    narrow: dict[str, Any] = {"pipeline": "compv3", "tile": (128, 128, 32), "wave": (2, 4, 1), "warp_tile": ANY}
    yield declare(MoeConfig, dtype_a=_HALVES, layout="rcr", persistent=True, **narrow).where(_narrow_waves)


KERNEL_SETS = {
    "default": KernelSet(
        "default",
        "Kernels of CPUs for few and for many rows of an expert, and the usual tiles of GPUs",
        DeferredDeclarations(_declarations),
        offered,
    )
}
