"""Kernels for few rows and many keys, planned as for a device and run on the CPU: every wave has keys of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fmha_requests import Descs, desc, drawn, ints
from test_fmha_gpu_emulated import folder, gpu, run

from tilewright_fmha.config.pipelines import FEW_ROWS
from tilewright_fmha.pipelines.candidates import fmha_candidates
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.problem.parse.attention import parse_attention
from tilewright_fmha.references.forward import reference_attention
from tilewright_fmha.vocabulary import ATTENTION
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.numerics.compare import compare

__all__ = ["folder", "gpu"]


def dense(dtype: str, rows: int, columns: int, q: int, v: int, cache: str = "", heads: int = 2) -> Descs:
    kept = cache or dtype
    tensors = {"q": desc(dtype, 2, 4, rows, q)}
    return {**tensors, "k": desc(kept, 2, heads, columns, q), "v": desc(kept, 2, heads, columns, v)}


def paged(dtype: str, page: int, pages: int, q: int = 32, v: int = 32, cache: str = "") -> Descs:
    """Three sequences of at most ``pages`` pages."""
    kept = cache or dtype
    tensors = {"q": desc(dtype, 3, 4, 1, q), "block_table": ints(3, pages), "seqlens_k": ints(3)}
    return {**tensors, "k": desc(kept, 3 * pages, page, 2, q), "v": desc(kept, 3 * pages, page, 2, v)}


def vectorized(dtype: str, page: int, pages: int, cache: str = "") -> Descs:
    kept, x = cache or dtype, 16 if cache else 8
    k, v = desc(kept, 3 * pages, 2, 32 // x, page, x), desc(kept, 3 * pages, 2, page // x, 32, x)
    return {**paged(dtype, page, pages), "k": k, "v": v}


def strided(dtype: str) -> Descs:
    """Rows that no vector can read, of keys and of values."""
    tensors = dense(dtype, 1, 300, 32, 32)
    far = (2 * 300 * 33, 300 * 33, 33, 1)
    return {**tensors, "k": desc(dtype, 2, 2, 300, 32, strides=far), "v": desc(dtype, 2, 2, 300, 32, strides=far)}


LSE = {"return_lse": True}
CASES: dict[str, tuple[Descs, dict[str, Any]]] = {
    "long": (dense("bf16", 1, 700, 64, 64), LSE),
    "heads_of_other_sizes": (dense("fp16", 1, 300, 40, 72), LSE),
    "some_queries_causal": (dense("bf16", 3, 300, 32, 32), {"causal": True, "mask_align": "bottom_right", **LSE}),
    "window": (
        dense("bf16", 2, 400, 32, 32),
        {"window_left": 100, "window_right": 0, "sink_size": 3, "mask_align": "bottom_right"},
    ),
    "several_tiles": (dense("fp16", 11, 270, 32, 32), LSE),
    "scores": (dense("fp16", 1, 300, 32, 32), {"softcap": 5.0, "dropout_p": 0.3, "seed": 7, "num_splits": 2, **LSE}),
    "eight_bits": (dense("bf16", 1, 300, 64, 32, cache="fp8"), LSE),
    "eight_bits_halves": (dense("fp16", 3, 300, 128, 128, cache="fp8"), {"num_splits": 3, **LSE}),
    "eight_bits_not_aligned": (dense("bf16", 1, 300, 40, 72, cache="fp8"), {"softcap": 5.0, **LSE}),
    "eight_bits_pages": (paged("bf16", 16, 20, cache="fp8"), {"return_status": True, **LSE}),
    "eight_bits_chunks": (vectorized("bf16", 16, 20, cache="fp8"), {"kv_layout": "vectorized"}),
    "rows_that_are_not_aligned": (strided("bf16"), LSE),
    "pages": (paged("bf16", 16, 20), {"return_status": True, **LSE}),
    "small_pages": (paged("fp16", 2, 140), {"return_status": True}),
    "pages_in_chunks": (vectorized("fp16", 16, 20), {"kv_layout": "vectorized", "return_status": True}),
    "one_part": (dense("bf16", 1, 300, 64, 128), {"num_splits": 1, **LSE}),
    "more_parts_than_blocks": (dense("bf16", 1, 300, 32, 32), {"num_splits": 40, **LSE}),
    "more_parts_than_lanes": (dense("fp16", 1, 2300, 32, 32), {"num_splits": 35, **LSE}),
    "wide_heads": (dense("fp16", 1, 200, 256, 256), {"num_splits": 3}),
    "sinks": ({**dense("bf16", 1, 300, 32, 32), "sinks": desc("fp32", 4)}, LSE),
    "sinks_of_one_part": ({**dense("bf16", 1, 300, 32, 32), "sinks": desc("fp32", 4)}, {"num_splits": 1, **LSE}),
    "lengths": ({**dense("bf16", 1, 500, 32, 32), "seqlens_k": ints(2)}, {"num_splits": 3, **LSE}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(4)
@pytest.mark.extended
def test_waves_share_keys(name: str, gpu: DeviceInfo, folder: Path) -> None:
    tensors, words = CASES[name]
    request = OperationRequest(ATTENTION, tensors, {}, words)
    problem = parse_attention(request)
    few = (item for item in fmha_candidates(problem, gpu) if item.pipeline == FEW_ROWS)
    config = next(item for item in few if item.pack_gqa or problem.group == 1)
    inputs = drawn(request, 3)
    truth = reference_attention(problem, inputs)
    plan = plan_fmha(problem, config, gpu)
    assert [stage.name for stage in plan.stages] == ["split"]
    have = run(plan, inputs, gpu, folder, seeds=(1, 2, 3))
    for output, values in have.items():
        if values.dtype.kind == "i":
            assert np.array_equal(values, truth[output]), output
            continue
        result = compare(values, truth[output], problem.operand(output).desc.dtype, problem.seq_k + problem.hdim_q)
        near = output == "lse" and np.allclose(values, truth[output], rtol=1e-3, atol=1e-3)
        # Probabilities are rounded to the type of the queries.
        assert near or (result.error <= 2 * result.bound and result.unwritten == 0), f"{output}: {result}"


def test_parts_may_be_left_to_a_second_stage(gpu: DeviceInfo, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What launches without counters do: no plan asks for it, but measurements compare the two."""
    monkeypatch.setattr("tilewright_fmha.plan.plan.tickets_of", lambda *_: 0)
    request = OperationRequest(ATTENTION, dense("bf16", 1, 700, 64, 64), {}, {"num_splits": 5, **LSE})
    problem = parse_attention(request)
    config = next(item for item in fmha_candidates(problem, gpu) if item.pipeline == FEW_ROWS and item.pack_gqa)
    inputs = drawn(request, 3)
    plan = plan_fmha(problem, config, gpu)
    assert [stage.name for stage in plan.stages] == ["split", "combine"] and plan.counter_bytes == 0
    have, truth = run(plan, inputs, gpu, folder, seeds=(1, 2)), reference_attention(problem, inputs)
    assert np.allclose(have["lse"], truth["lse"], rtol=1e-3, atol=1e-3)
    result = compare(have["o"], truth["o"], problem.operand("o").desc.dtype, problem.seq_k + problem.hdim_q)
    assert result.error <= 2 * result.bound and result.unwritten == 0


def test_pages_outside_the_cache_are_told_and_not_read(gpu: DeviceInfo, folder: Path) -> None:
    request = OperationRequest(ATTENTION, paged("bf16", 16, 20), {}, {"return_status": True, **LSE})
    problem = parse_attention(request)
    config = next(item for item in fmha_candidates(problem, gpu) if item.pipeline == FEW_ROWS and item.pack_gqa)
    inputs = drawn(request, 3)
    inputs["seqlens_k"][:] = 320
    inputs["block_table"][...] = np.arange(60, dtype=np.int32).reshape(3, 20)
    inputs["block_table"][1, 7], inputs["block_table"][2, 19] = -1, 1 << 30
    truth = reference_attention(problem, inputs)
    have = run(plan_fmha(problem, config, gpu), inputs, gpu, folder)
    assert have["status"].tolist() == [2, 1, 127, 0]  # a bad page; the first item that has one, its last column there
    assert np.allclose(have["lse"], truth["lse"], rtol=1e-3, atol=1e-3)


@pytest.mark.extended
def test_queries_beside_an_eight_bit_cache_may_be_large(gpu: DeviceInfo, folder: Path) -> None:
    """They are multiplied as fp16, scaled by a power of two: others times such a power give the same bits."""
    tensors = dense("bf16", 1, 300, 64, 32, cache="fp8")
    results = []
    for power in (0, 60, -60):
        request = OperationRequest(ATTENTION, tensors, {}, {"scale": 0.125 * 2.0**-power, **LSE})
        problem = parse_attention(request)
        config = next(item for item in fmha_candidates(problem, gpu) if item.pipeline == FEW_ROWS and item.pack_gqa)
        inputs = drawn(request, 3)
        inputs["q"] = (inputs["q"].astype(np.float32) * np.float32(2.0**power)).astype(inputs["q"].dtype)
        results.append(run(plan_fmha(problem, config, gpu), inputs, gpu, folder))
    assert all(np.isfinite(results[0][name].astype(np.float32)).all() for name in ("o", "lse"))
    for other in results[1:]:
        assert all(np.array_equal(other[name].view(np.uint8), results[0][name].view(np.uint8)) for name in other)


def test_empty_caches_give_zeros(gpu: DeviceInfo, folder: Path) -> None:
    request = OperationRequest(ATTENTION, paged("bf16", 16, 20), {}, LSE)
    problem = parse_attention(request)
    config = next(item for item in fmha_candidates(problem, gpu) if item.pipeline == FEW_ROWS and item.pack_gqa)
    inputs = drawn(request, 3)
    inputs["seqlens_k"][:] = 0, 1, 320
    have = run(plan_fmha(problem, config, gpu), inputs, gpu, folder, seeds=(1, 2))
    assert not have["o"][0].any() and np.all(np.isneginf(have["lse"][0]))
    assert np.all(np.isfinite(have["lse"][1:]))
