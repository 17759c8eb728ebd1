"""Kernels with packed 4-bit weights: a small set for every kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewright_gemm.candidates.int4 import RING_TILES
from tilewright_gemm.config.choices import offered
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.int4 import DTYPES, GROUP_K, INT4_RING
from tilewright_gemm.vocabulary import Epilogue, ScaleB
from tilewright_kit.kernel_sets.declare import ANY, Declaration, DeferredDeclarations, KernelSet, declare
from tilewright_kit.types.dtypes import DType

__all__ = ["INT4_SET"]

_KINDS = (ScaleB.INT4_FP16, ScaleB.INT4_BF16_ZEROS)
_PORTABLE = (((64, 64), (2, 2)), ((16, 64), (1, 4)), ((128, 64), (2, 2)))


def _declarations() -> Iterator[Declaration[GemmConfig]]:
    for dtype in DTYPES:
        fields: dict[str, Any] = {
            "dtype_a": dtype, "dtype_c": "bf16", "layout": ["rcr", "ccr"], "scale_b": list(_KINDS),
            "pipeline": "compv3",
        }  # fmt: skip
        yield declare(
            GemmConfig, **fields, epilogue=Epilogue.DEFAULT, tile=ANY, wave=(1, 1, 1), warp_tile=ANY
        ).for_kinds("cpu")
        for tile, wave in _PORTABLE:
            yield declare(
                GemmConfig, **fields, tile=(*tile, 64), wave=(*wave, 1), warp_tile=(16, 8, 32 // dtype.bytes)
            ).for_kinds("cuda")
        for tile, wave in RING_TILES:
            yield declare(
                GemmConfig, **(fields | {"layout": "rcr", "pipeline": INT4_RING}), tile=(*tile, GROUP_K),
                wave=(*wave, 1), warp_tile=(16, 8, 32 // dtype.bytes), stages=2,
            ).for_kinds("cuda")  # fmt: skip
        depths = (16, 32) if dtype in (DType.FP8, DType.INT8) else (16,)
        for depth in depths:
            yield declare(
                GemmConfig, **fields, tile=(64, 64, 64), wave=[(2, 2, 1), (2, 4, 1)], warp_tile=(16, 16, depth)
            ).for_kinds("hip")


INT4_SET = KernelSet(
    "int4",
    "Products of fp16, bf16, fp8 and int8 with 4-bit weights in groups of 128",
    DeferredDeclarations(_declarations),
    offered,
)
