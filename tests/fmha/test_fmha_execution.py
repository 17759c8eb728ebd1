"""Attention on a CPU, through plans, against the reference: every family, features in pairs, every way a cache lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_kernels import Array, compiler
from fmha_cases import CACHES, COMPILED, CacheCase, Case, cache_request, drawn_cases, pairwise, request_of
from fmha_requests import (
    ROTARY,
    append_of,
    append_paged_of,
    append_rounded_of,
    batch_of,
    desc,
    drawn,
    ints,
    paged_of,
    prefill_of,
    varlen_of,
    vectorized_of,
)
from fmha_runner import FmhaRunner, outputs_of
from selected import Selected

from tilewright_arch import ArchSpec
from tilewright_fmha.pipelines.candidates import with_signature
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.problem.sequences import item_of
from tilewright_fmha.references.append import reference_append
from tilewright_fmha.references.forward import reference_attention
from tilewright_fmha.references.sample_inputs import PARSERS
from tilewright_fmha.vocabulary import ATTENTION, KV_APPEND, Family
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.numerics.compare import compare
from tilewright_kit.types.dtypes import DType


def _scales(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return {f"{name}_descale": desc("fp32", *shape) for name, shape in shapes.items()}


LONG = {"q": desc("fp32", 2, 4, 3, 16), "k": desc("fp32", 2, 2, 700, 16), "v": desc("fp32", 2, 2, 700, 24)}
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "split": (LONG, {"num_splits": 3, "return_lse": True}),
    "split_sinks": ({**LONG, "sinks": desc("fp32", 4), "seqlens_k": ints(2)}, {"num_splits": 4, "causal": True}),
    "split_skipped": (
        {**LONG, "sinks": desc("fp32", 4), "seqlens_q": ints(2)},
        {"num_splits": 2, "min_seqlen_q": 3, "return_lse": True},
    ),
    "split_varlen": (
        {**varlen_of("bf16"), "k": desc("bf16", 900, 2, 16), "v": desc("bf16", 900, 2, 24)},
        {"max_seqlen_q": 8, "max_seqlen_k": 400, "num_splits": 2, "dropout_p": 0.4, "return_lse": True},
    ),
    "split_paged": (paged_of("fp32"), {"num_splits": 2, "return_status": True}),
    "paged": (paged_of("fp32"), {"causal": True, "mask_align": "bottom_right", "return_lse": True}),
    "paged_vectorized": (vectorized_of("bf16"), {"kv_layout": "vectorized"}),
    "prefill": (prefill_of("fp32"), {"max_seqlen_q": 8}),
    "prefill_flat": (
        {**prefill_of("bf16"), "block_table": ints(12), "page_starts": ints(4)},
        {"max_seqlen_q": 8, "max_seqlen_k": 32, "kv_lookup": "sglang", "causal": True},
    ),
    "no_keys": (
        {"q": desc("fp32", 2, 4, 5, 16), "k": desc("fp32", 2, 2, 0, 16), "v": desc("fp32", 2, 2, 0, 24)},
        {"return_lse": True},
    ),
    "cache_index": ({**batch_of("fp32"), "cache_index": ints(2)}, {}),
    "random_values": (batch_of("fp32"), {"dropout_p": 0.5, "seed": 1 << 40, "offset": 9, "return_randval": True}),
    "fp8": ({**batch_of("fp8"), **_scales(q=(), k=(), v=())}, {"out_dtype": "bf16"}),
    "fp8_heads": ({**batch_of("fp8"), **_scales(q=(2, 4), k=(2, 2), v=(2, 2))}, {"out_dtype": "fp32"}),
    "fp8_one_scale": ({**batch_of("fp8"), **_scales(k=())}, {"out_dtype": "fp32"}),
    "fp8_blocks": (
        {**batch_of("fp8"), **_scales(q=(2, 4, 2), k=(2, 2, 2), v=(2, 2, 2))},
        {"scale_block_q": 4, "scale_block_k": 4, "out_dtype": "fp16"},
    ),
    "fp8_pages": ({**paged_of("fp8"), **_scales(q=(), k=(10, 2), v=(10, 2))}, {"qscale": "kv_blockscale"}),
}
APPENDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows": (append_of("fp32"), {}),
    "turned": ({**append_of("bf16"), **ROTARY, "q": desc("bf16", 2, 4, 3, 16)}, {"rope": "half"}),
    "pages": ({**append_paged_of("fp16"), **ROTARY}, {"rope": "interleaved", "return_status": True}),
    "rounded": ({**append_rounded_of("fp16", paged=False, k=(2, 2))}, {}),
    "rounded_pages": (
        {**append_rounded_of("bf16", k=(2,), v=()), **ROTARY, "q": desc("bf16", 3, 4, 3, 16)},
        {"rope": "half", "return_status": True},
    ),
    "fp8_turned": ({**append_of("fp8"), **ROTARY}, {"rope": "interleaved"}),
    "chosen": (
        {
            **append_of("fp32"),
            **{f"{name}_past": desc("fp32", 5, 2, 20, size) for name, size in (("k", 16), ("v", 24))},
            "cache_index": ints(2),
        },
        {},
    ),
}


CACHED = pairwise(CACHES, 3, kind=CacheCase)


def planned(request: OperationRequest, device: DeviceInfo) -> tuple[FmhaProblem, ExecutionPlan]:
    problem = PARSERS[request.operation](request)
    family = Family.SPLITKV if problem.num_splits > 1 else problem.family
    config = with_signature(problem, family, device)
    if family is Family.SPLITKV:
        config = config.replace(max_splits_log2=3, wave=(2, *config.wave[1:]))
    return problem, plan_fmha(problem, config, device)


def of_case(case: Case) -> OperationRequest:
    return request_of(case, ATTENTION, return_lse=True)


def of_words(name: str) -> OperationRequest:
    tensors, words = REQUESTS[name]
    return OperationRequest(ATTENTION, tensors, {}, words)


def appending(name: str) -> OperationRequest:
    tensors, words = APPENDS[name]
    outputs = {"seqlens_out": ints(3 if "pages" in name else 2)} if name != "rows" else {}
    return OperationRequest(KV_APPEND, tensors, outputs, words)


@pytest.fixture(scope="module")
def runner(cpu: ArchSpec, device: DeviceInfo, kernel_folder: Path, request: pytest.FixtureRequest) -> FmhaRunner:
    made, run = FmhaRunner(cpu, compiler(), kernel_folder), Selected(request)
    requests = [of_case(case) for case in drawn_cases(COMPILED, 6) if case in run]
    requests += [cache_request(case) for case in CACHED if case in run]
    requests += [of_words(name) for name in REQUESTS if name in run]
    requests += [appending(name) for name in APPENDS if name in run]
    made.prepare([planned(request, device)[1] for request in requests])
    return made


def check(problem: FmhaProblem, inputs: Mapping[str, Array], got: Mapping[str, Array]) -> None:
    truth = reference_attention(problem, inputs)
    for name, have in got.items():
        if name == "status":
            assert not have.any()
            continue
        seen = np.ones(have.shape, bool)
        if problem.varlen:
            seen[:] = False
            for b in range(problem.batch):
                item = item_of(problem, inputs, b)
                rows = slice(item.q_first, item.q_first + item.queries)
                seen[(slice(None), rows) if name in ("lse", "randval") else rows] = True
            assert not np.isfinite(have[~seen].astype(np.float64)).any() or name == "randval"
        dtype = problem.operand(name).desc.dtype
        # Probabilities are rounded to bf16 where the products are of bf16; lse is of unrounded ones.
        pairs = name == "o" and problem.dtype.q in (DType.BF16, DType.FP8)
        result = compare(have[seen], truth[name][seen], DType.BF16 if pairs else dtype, problem.seq_k + problem.hdim_q)
        assert result.unwritten == 0 and result.misplaced == 0, f"{name}: {result}"
        near = name == "lse" and np.allclose(have[seen], truth[name][seen], rtol=2e-6, atol=1e-5)
        assert near or result.error <= (1.5 if pairs else 1.0) * result.bound, f"{name}: {result}"


@pytest.mark.parametrize("case", drawn_cases(COMPILED, 6), ids=str)
@pytest.mark.extended
def test_pairs_of_features(runner: FmhaRunner, case: Case, device: DeviceInfo) -> None:
    request = of_case(case)
    problem, plan = planned(request, device)
    inputs = drawn(request, 5)
    check(problem, inputs, outputs_of(plan, runner.run(plan, inputs)))


@pytest.mark.parametrize("case", CACHED, ids=str)
@pytest.mark.extended
def test_pairs_of_features_over_pages(runner: FmhaRunner, case: CacheCase, device: DeviceInfo) -> None:
    request = cache_request(case)
    problem, plan = planned(request, device)
    inputs = drawn(request, 5)
    check(problem, inputs, outputs_of(plan, runner.run(plan, inputs)))


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.some(4)
def test_families(runner: FmhaRunner, name: str, device: DeviceInfo) -> None:
    request = of_words(name)
    problem, plan = planned(request, device)
    inputs = drawn(request, 6)
    check(problem, inputs, outputs_of(plan, runner.run(plan, inputs)))


def test_parts_are_added_in_one_order(runner: FmhaRunner, device: DeviceInfo) -> None:
    """Whoever computes a part, and however many do, the result is the same to the last bit."""
    request = of_words("split")
    _, plan = planned(request, device)
    inputs = drawn(request, 7)
    first = outputs_of(plan, runner.run(plan, inputs, 2))
    again = outputs_of(plan, runner.run(plan, inputs, 1))
    for name, have in first.items():
        assert np.array_equal(have.view(np.uint8), again[name].view(np.uint8)), name


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", APPENDS)
def test_appending(runner: FmhaRunner, name: str, in_place: bool, device: DeviceInfo) -> None:
    request = appending(name)
    problem, plan = planned(request, device)
    inputs = drawn(request, 8)
    memory = runner.run(plan, inputs, in_place=in_place)
    truth = reference_append(problem, inputs)
    for output, have in outputs_of(plan, memory).items():
        if output == "status":
            assert not have.any()
            continue
        if have.dtype.kind == "i":
            assert np.array_equal(have, truth[output]), output
            continue
        result = compare(have, truth[output], problem.operand(output).desc.dtype)
        assert result.passed, f"{output}: {result}"
