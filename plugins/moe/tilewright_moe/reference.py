"""The truth in float64, and sample requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_gemm.fusion import spread_factors
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.numerics.elementwise import apply_unary
from tilewright_kit.types.tensor import TensorDesc
from tilewright_kit.types.vocabulary import Unary
from tilewright_moe.problem import LEAST_RANGE, RESULT_BLOCK, TURN, MoeProblem

__all__ = ["draw_counts", "moe_samples", "reference_moe", "sample_inputs"]

LARGEST = 448.0
"""Largest magnitude of fp8 (E4M3)."""
Array = npt.NDArray[Any]


def reference_moe(problem: MoeProblem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs by name. Rows that belong to no expert are NaN."""
    x, w = (np.asarray(inputs[name]).astype(np.float64) for name in ("x", "w"))
    blocks = problem.block_scaled
    if blocks:
        x, w = _scaled(problem, inputs, x, w)
    counts = np.asarray(inputs["counts"]).astype(np.int64)
    scale_x, scale_w = (_float(None if blocks else inputs.get(name)).reshape(-1) for name in ("scale_x", "scale_w"))
    each = np.broadcast_to(problem.alpha * scale_x[0] * scale_w, (problem.experts,))
    out = np.full((*x.shape[:-1], problem.n), np.nan)
    scales = np.full((*x.shape[:-1], -(-problem.n // RESULT_BLOCK)), np.nan)
    first = 0
    for expert, count in enumerate(counts.tolist()):
        rows = min(max(count, 0), problem.rows - (0 if problem.masked else first))
        place: Any = (expert, slice(rows)) if problem.masked else slice(first, first + rows)
        product = each[expert] * (x[place] @ w[expert].T)
        out[place] = _gated(product) if problem.gated else product
        if problem.quantised:
            scales[place], out[place] = _quantised(out[place])
        first += rows
    found: dict[str, Array] = {"out": out, **({"out_scale": scales} if problem.quantised else {})}
    if problem.desc("status") is not None:
        found["status"] = _status(problem, counts)
    return found


def _gated(product: Array) -> Array:
    """silu(gate) * up, of columns in turns."""
    gate, up = np.moveaxis(product.reshape(len(product), product.shape[1] // (2 * TURN), 2, TURN), 2, 0)
    found: Array = (apply_unary(Unary.SILU, gate, 0.0, 0.0) * up).reshape(len(product), product.shape[1] // 2)
    return found


def _quantised(values: Array) -> tuple[Array, Array]:
    """Factors of blocks, and values in the range of fp8, which are not rounded."""
    blocks = -(-values.shape[1] // RESULT_BLOCK)
    room = np.pad(np.abs(values), ((0, 0), (0, blocks * RESULT_BLOCK - values.shape[1])))
    scales = np.maximum(room.reshape(len(values), blocks, RESULT_BLOCK).max(-1, initial=0.0), LEAST_RANGE) / LARGEST
    return scales, values / np.repeat(scales, RESULT_BLOCK, 1)[:, : values.shape[1]]


def _scaled(problem: MoeProblem, inputs: Mapping[str, Array], x: Array, w: Array) -> tuple[Array, Array]:
    """Rows and weights times the factors of their blocks."""
    kind, scale_x, scale_w = problem.scales[1], inputs["scale_x"], inputs["scale_w"]
    of_x, of_w = spread_factors(scale_x, scale_w, kind, w.shape[1], problem.k)
    return x * of_x, w * of_w


def _float(array: Array | None) -> Array:
    return np.ones(1) if array is None else np.asarray(array).astype(np.float64)


def _status(problem: MoeProblem, counts: Array) -> Array:
    """Bits, the first expert with a wrong count, that count, 0."""
    bits, culprit, first = 0, None, 0
    for expert, count in enumerate(counts.tolist()):
        room = problem.rows - (0 if problem.masked else first)
        bad = 1 if count < 0 else (2 if problem.masked else 4) if count > room else 0
        first += min(max(count, 0), room)
        bits |= bad
        if bad and culprit is None:
            culprit = expert, count
    return np.array([bits, *(culprit or (0, 0)), 0], np.int64)


def draw_counts(rng: np.random.Generator, experts: int, rows: int, masked: bool) -> Array:
    """Counts that make sense: of rows that are routed at random, or of as many as there is room for."""
    if masked:
        return np.full(experts, rows, np.int32)
    return rng.multinomial(rows, np.full(experts, 1.0 / experts)).astype(np.int32)


def moe_samples() -> Iterator[OperationRequest]:
    of = TensorDesc.of

    def request(x: TensorDesc, w: TensorDesc, more: dict[str, TensorDesc], **attributes: Any) -> OperationRequest:
        inputs = {"x": x, "w": w, "counts": of("int32", (w.shape[0],)), **more}
        return OperationRequest("moe_gemm", inputs, {}, attributes)

    yield request(of("fp32", (37, 53)), of("fp32", (5, 41, 53)), {})
    yield request(of("bf16", (70, 64)), of("bf16", (4, 80, 64)), {}, return_status=True)
    yield request(of("fp16", (3, 9, 48)), of("fp16", (3, 24, 48)), {}, alpha=0.5, out_dtype="fp32")
    yield request(of("fp32", (21, 16)), of("fp32", (2, 24, 16), (16 * 24, 1, 24)), {}, expected_rows=4)
    scales = {"scale_x": of("fp32", ()), "scale_w": of("fp32", (3,))}
    yield request(of("fp8", (33, 64)), of("fp8", (3, 48, 64)), scales, out_dtype="bf16")
    blocks = {"scale_x": of("fp32", (33, 2)), "scale_w": of("fp32", (3, 2, 2))}
    words = {"out_dtype": "bf16", "scale_block": "1x128_128x128"}
    yield request(of("fp8", (33, 192)), of("fp8", (3, 144, 192)), blocks, **words)
    yield request(of("bf16", (37, 64)), of("bf16", (3, 80, 64)), {}, activation="swiglu")
    yield request(of("bf16", (0, 32)), of("bf16", (3, 16, 32)), {})


def sample_inputs(request: OperationRequest, rng: np.random.Generator) -> dict[str, Array]:
    """Counts of a sample."""
    x, w = request.inputs["x"], request.inputs["w"]
    return {"counts": draw_counts(rng, w.shape[0], x.shape[-2], len(x.shape) == 3)}
