"""Small requests that show what the operations can do; the conformance test plans, builds, runs and checks them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_gemm.config.block_scales import SCALES, block_of
from tilewright_gemm.vocabulary import ScaleBlock
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["gemm_sample_inputs", "gemm_samples", "pack_b_samples"]


def gemm_samples() -> Iterator[OperationRequest]:
    of = TensorDesc.of
    yield OperationRequest("gemm", {"a": of("fp32", (37, 53)), "b": of("fp32", (53, 41), (1, 53))})
    yield OperationRequest("gemm", {"a": of("bf16", (64, 96)), "b": of("bf16", (96, 80))}, {}, {"out_dtype": "fp32"})
    yield OperationRequest("gemm", {"a": of("int8", (33, 70)), "b": of("int8", (70, 40), (1, 70))})
    yield OperationRequest(
        "gemm",
        {
            "a": of("fp16", (3, 20, 48)),
            "b": of("fp16", (3, 48, 24)),
            "bias": of("fp32", (24,)),
            "d[0]": of("fp16", (3, 20, 24)),
        },
        {},
        {"unary": "Gelu", "alpha": 0.5},
    )
    yield OperationRequest(
        "gemm",
        {
            "a[0]": of("fp32", (17, 30)),
            "b[0]": of("fp32", (30, 19)),
            "a[1]": of("fp32", (5, 64)),
            "b[1]": of("fp32", (64, 32)),
        },
        {},
        {"groups": 2},
    )
    yield OperationRequest(
        "gemm",
        {
            "a": of("fp8", (40, 64)),
            "b": of("bf8", (64, 48), (1, 64)),
            "scale_a": of("fp32", (40,)),
            "scale_b": of("fp32", (48,)),
        },
    )
    yield OperationRequest(
        "gemm",
        {
            "a": of("fp8", (33, 300)),
            "b": of("fp8", (300, 140), (1, 300)),
            "scale_a": of("fp32", (33, 3)),
            "scale_b": of("fp32", (2, 3)),
            "bias": of("fp32", (140,)),
        },
        {},
        {"scale_block": "1x128_128x128"},
    )
    yield OperationRequest(
        "gemm",
        {
            "a": of("bf16", (19, 301)),
            "b": of("int8", (151, 70), (1, 151)),
            "scale_b": of("fp16", (70, 3)),
            "zero_b": of("int8", (70, 3)),
        },
        {},
        {"b_format": "int4_128"},
    )
    exponents = {name: of("int8", (rows, 3)) for name, rows in (("scale_a", 21), ("scale_b", 44))}
    yield OperationRequest(
        "gemm",
        {"a": of("fp8", (21, 70)), "b": of("fp8", (70, 44), (1, 70)), **exponents},
        {},
        {"scale_block": "1x32_1x32", "out_dtype": "fp32"},
    )
    yield OperationRequest("gemm", {"a": of("fp32", (24, 3000)), "b": of("fp32", (3000, 40))}, {}, {"split_k": 3})
    yield OperationRequest("gemm", {"a": of("fp32", (4, 0)), "b": of("fp32", (0, 6))})


def pack_b_samples() -> Iterator[OperationRequest]:
    yield OperationRequest("gemm_pack_b", {"b": TensorDesc.of("fp32", (100, 70))}, {}, {"m": 64})


def gemm_sample_inputs(request: OperationRequest, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    """Exponents of 8 bits for factors between 1/16 and 16; other inputs may hold anything."""
    block = ScaleBlock(request.attributes.get("scale_block", ScaleBlock.NONE.value))
    if block is ScaleBlock.NONE or block_of(SCALES[block][1]).dtype is not DType.INT8:
        return {}
    return {
        name: rng.integers(123, 132, desc.shape).astype(np.uint8).view(np.int8)
        for name, desc in request.inputs.items()
        if name.startswith("scale_")
    }
