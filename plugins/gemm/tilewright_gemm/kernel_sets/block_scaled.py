"""Kernels with block scales: a small set for every kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewright_gemm.candidates.warp_specialised import Shape
from tilewright_gemm.config.block_scales import DTYPES, SCALES, block_of, has_exponents
from tilewright_gemm.config.choices import offered
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.narrow import NARROW
from tilewright_gemm.vocabulary import LAYOUTS, Epilogue, ScaleA
from tilewright_kit.kernel_sets.declare import ANY, Declaration, DeferredDeclarations, KernelSet, declare
from tilewright_kit.types.dtypes import DType

__all__ = ["BLOCK_SCALED", "WS_SCALED_SHAPES"]

WS_SCALED_SHAPES = (
    Shape((128, 128), (2, 1)),
    Shape((128, 128), (2, 1), (2, 1)),
    Shape((256, 128), (2, 1)),
    Shape((256, 128), (2, 1), (1, 2)),
    Shape((128, 192), (2, 1)),
    Shape((128, 192), (2, 1), (2, 1)),
    Shape((128, 64), (2, 1)),
    Shape((64, 128), (1, 2)),
    Shape((16, 64), (1, 1), swapped=True),
    Shape((64, 128), (1, 2), swapped=True),
    Shape((128, 128), (1, 2), swapped=True),
)
"""Shapes of the warp-specialised pipeline. Consumers work at the same time: one scales while another multiplies."""

EXPONENT_SHAPES: tuple[dict[str, Any], ...] = (
    {"pipeline": "comp_async", "tile": (256, 256, 128), "wave": (4, 4, 1), "warp_tile": (16, 16, 128)},
    {"pipeline": "comp_async", "tile": (128, 128, 128), "wave": (2, 2, 1), "warp_tile": (32, 32, 64)},
    {"pipeline": "compv4", "tile": (128, 128, 128), "wave": (2, 2, 1), "warp_tile": (16, 16, 128)},
    {"pipeline": "compv3", "tile": (64, 64, 128), "wave": (2, 2, 1), "warp_tile": (16, 16, 128)},
    {"pipeline": "compv4", "tile": (16, 128, 256), "wave": (1, 4, 1), "warp_tile": (16, 16, 128)},
)
"""Shapes of kernels whose instructions take the factors of blocks of 32."""
_FOUR_BITS: tuple[dict[str, Any], ...] = (
    {
        "pipeline": "comp_async", "epilogue": Epilogue.DEFAULT, "tile": (256, 256, 256), "wave": (2, 4, 1),
        "warp_tile": (32, 32, 64),
    },
    {"pipeline": "comp_async", "tile": (128, 128, 256), "wave": (2, 2, 1), "warp_tile": (32, 32, 64)},
)  # fmt: skip
"""Those of two operands of 4 bits, with lines as long as those of 8-bit floats."""


_NARROW_PAIRS = (("fp4", "fp4"), ("fp6", "fp6"), ("bf6", "bf6"), ("", "fp4"))
"""Formats of A and B of fewer than 8 bits; empty: fp8."""


def _narrow() -> Iterator[Declaration[GemmConfig]]:
    """Kernels with operands of fewer than 8 bits: those that widen values, and those whose instructions take them."""
    for a, b in _NARROW_PAIRS:
        fields: dict[str, Any] = {
            "dtype_a": DType.FP8, "dtype_c": "bf16", "scale_a": NARROW[a].scale_a if a else ScaleA.BLOCK_1X32,
            "scale_b": NARROW[b].scale_b,
        }  # fmt: skip
        widened = fields | {"pipeline": "compv3", "wave": (2, 2, 1)}
        yield declare(
            GemmConfig, **(widened | {"wave": (1, 1, 1)}), epilogue=Epilogue.DEFAULT, tile=ANY, warp_tile=ANY
        ).for_kinds("cpu")
        yield declare(GemmConfig, **widened, tile=(64, 64, 32), warp_tile=(16, 8, 32)).for_kinds("cuda")
        for warp in ((16, 16, 32), (16, 16, 16)):
            yield declare(GemmConfig, **widened, tile=(64, 64, 32), warp_tile=warp).for_kinds("hip")
        for shape in (*EXPONENT_SHAPES, *(_FOUR_BITS if (a, b) == ("fp4", "fp4") else ())) if a else ():
            yield declare(GemmConfig, **fields, **shape).for_kinds("hip")


def _declarations() -> Iterator[Declaration[GemmConfig]]:
    for scale_a, scale_b in SCALES.values():
        block_k, exponents = block_of(scale_b).k, has_exponents(scale_b)
        scales: dict[str, Any] = {"dtype_a": DType.FP8, "dtype_c": "bf16", "scale_a": scale_a, "scale_b": scale_b}
        yield declare(
            GemmConfig, **scales, pipeline="compv3", layout=list(LAYOUTS), epilogue=Epilogue.DEFAULT, tile=ANY,
            wave=(1, 1, 1), warp_tile=ANY,
        ).for_kinds("cpu")  # fmt: skip
        for shape in () if exponents else WS_SCALED_SHAPES:
            yield declare(GemmConfig, **(scales | shape.fields(DType.FP8))).for_kinds("cuda")
        small = {"tile": (64, 64, block_k), "wave": (2, 2, 1), "warp_tile": (16, 8, 32), "stages": 4}
        yield declare(GemmConfig, **scales, **small, layout=list(LAYOUTS)).for_kinds("cuda")
        for dtype in DTYPES:
            for other in DTYPES:
                types = scales | {"dtype_a": dtype, "dtype_b": other.value}
                for warp in ((16, 16, 32), (16, 16, 16)):
                    for pipeline in ("compv3", "compv4"):
                        yield declare(
                            GemmConfig, **types, pipeline=pipeline, tile=(64, 64, block_k), wave=(2, 2, 1),
                            warp_tile=warp,
                        ).for_kinds("hip")  # fmt: skip
                for fields in EXPONENT_SHAPES if exponents else ():
                    yield declare(GemmConfig, **types, **fields).for_kinds("hip")
    yield from _narrow()


BLOCK_SCALED = KernelSet(
    "block_scaled",
    "Products of 8-bit floats with a scale for each block of A and B",
    DeferredDeclarations(_declarations),
    offered,
)
