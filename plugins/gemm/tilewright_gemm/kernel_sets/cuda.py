"""Default kernels of CUDA devices without producers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewright_gemm.candidates.cuda import PORTABLE_TILES
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.vocabulary import LAYOUTS, Binary, Epilogue, Unary
from tilewright_kit.kernel_sets.declare import Declaration, DeferredDeclarations, declare
from tilewright_kit.types.dtypes import DType

__all__ = ["CUDA_DEFAULTS"]

_HALVES = [DType.FP16, DType.BF16]
_EIGHT = ((DType.FP8, ""), (DType.FP8, "bf8"), (DType.BF8, "fp8"), (DType.BF8, ""))


def _portable() -> Iterator[Declaration[GemmConfig]]:
    """Every type in every layout, and one of every variant."""
    for dtypes, warp, k in (
        ([DType.FP32], (16, 8, 4), 16),
        (_HALVES, (16, 8, 16), 32),
        ([DType.INT8], (16, 8, 32), 64),
    ):
        yield from _portable_tiles(dtype_a=dtypes, warp_tile=warp, k=k)
    for dtype, other in _EIGHT:
        yield from _portable_tiles(dtype_a=dtype, dtype_b=other, warp_tile=(16, 8, 32), k=64)
    base: dict[str, Any] = {"tile": (128, 128, 32), "wave": (2, 2, 1), "warp_tile": (16, 8, 16), "stages": 4}
    variants: tuple[dict[str, Any], ...] = (
        {"split_k": [2, 4]},
        {"batched": True},
        {"grouped": True},
        {"epilogue": Epilogue.DEFAULT},
        {"persistent": True},
        {"dtype_c": "fp32"},
        {"bias": "fp32", "unary": [Unary.NONE, Unary.GELU]},
        {"binary": Binary.MULTI_D_ADD, "num_d_tensors": [1, 2], "unary": [Unary.NONE, Unary.RELU]},
    )
    for variant in variants:
        yield declare(GemmConfig, dtype_a=_HALVES, **base, **variant)


def _portable_tiles(k: int, **fields: Any) -> Iterator[Declaration[GemmConfig]]:
    wide = fields["dtype_a"] in ([DType.FP32], DType.FP8, DType.BF8)
    for (m, n), wave, pipeline in PORTABLE_TILES:
        # Fragments of fp32 and of widened 8-bit floats leave less room for accumulators.
        usual = (m, n) in ((64, 64), (16, 64)) or ((m, n), pipeline) == ((128, 128), "compv3")
        if not usual and ((m, n), wave) != ((128, 128), (2, 4) if wide else (2, 2)):
            continue
        yield declare(
            GemmConfig,
            layout=list(LAYOUTS),
            pipeline=pipeline,
            tile=(m, n, k * (2 if m * n <= 64 * 64 else 1)),
            wave=(*wave, 1),
            stages=4 if pipeline == "compv4" else 0,
            **fields,
        )


CUDA_DEFAULTS = DeferredDeclarations(_portable)
