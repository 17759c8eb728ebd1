"""Decoding on a CPU: one query of each sequence against a cache. However the cache lies, and whoever computes, sums are
made in one order: results are the same to the last bit, and right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_kernels import Array, compiler
from fmha_requests import desc, ints
from fmha_runner import FmhaRunner, outputs_of
from selected import Selected

from tilewright_arch import ArchSpec
from tilewright_fmha.pipelines.candidates import with_signature
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.problem.parse.attention import parse_attention
from tilewright_fmha.references.forward import reference_attention
from tilewright_fmha.vocabulary import ATTENTION
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.numerics.compare import compare
from tilewright_kit.types.dtypes import DType

pytestmark = pytest.mark.skipif(not compiler(), reason="there is no C++ compiler")

# dtype, heads of queries, heads of keys, D, Dv
CASES = {
    "a row of each head": ("fp32", 8, 8, 32, 32),
    "more heads than an item has": ("fp32", 48, 48, 16, 16),
    "a number of heads that few divide": ("bf16", 7, 7, 64, 64),
    "four rows of a head": ("bf16", 16, 4, 64, 64),
    "a row more than a tile": ("fp32", 15, 3, 32, 32),
    "two rows": ("fp16", 8, 4, 32, 32),
    "half vectors": ("bf16", 9, 3, 72, 40),
    "values narrower than keys": ("fp32", 12, 6, 48, 8),
    "wide heads": ("fp32", 4, 2, 256, 256),
}
LENGTHS = (300, 17, 0)
ROOM, PAGE = 304, 16
LAYOUTS = ("heads first", "rows first", "pages")


def tensors_of(name: str, layout: str) -> dict[str, Any]:
    dtype, heads, heads_k, hdim, hdim_v = CASES[name]
    batch, pages = len(LENGTHS), len(LENGTHS) * ROOM // PAGE
    found = {"q": desc(dtype, batch, heads, 1, hdim), "seqlens_k": ints(batch)}
    for operand, size in (("k", hdim), ("v", hdim_v)):
        if layout == "pages":
            found[operand] = desc(dtype, pages, PAGE, heads_k, size)
        else:
            rows = (ROOM * heads_k * size, size, heads_k * size, 1) if layout == "rows first" else None
            found[operand] = desc(dtype, batch, heads_k, ROOM, size, strides=rows)
    if layout == "pages":
        found["block_table"] = ints(batch, ROOM // PAGE)
    return found


def planned(name: str, layout: str, device: DeviceInfo) -> ExecutionPlan:
    problem = parse_attention(OperationRequest(ATTENTION, tensors_of(name, layout), {}, {"return_lse": True}))
    config = with_signature(problem, problem.family, device)
    return plan_fmha(problem, config.replace(wave=(2, *config.wave[1:])), device)


def content(name: str, layout: str) -> dict[str, Array]:
    """The same cache in every layout; rows beyond the lengths are NaN."""
    rng = np.random.default_rng(9)
    tensors = tensors_of(name, "heads first")
    found = {key: rng.standard_normal(tensors[key].shape).astype(np.float32) for key in "qkv"}
    for b, length in enumerate(LENGTHS):
        found["k"][b, :, length:] = found["v"][b, :, length:] = np.nan
    arrays = {key: array.astype(tensors[key].dtype.numpy) for key, array in found.items()}
    arrays["seqlens_k"] = np.array(LENGTHS, np.int32)
    if layout == "pages":
        count = len(LENGTHS) * ROOM // PAGE
        table = rng.permutation(count).astype(np.int32).reshape(len(LENGTHS), -1)
        for key in "kv":
            dense = arrays[key].swapaxes(1, 2)
            pages = np.empty((count, PAGE, *dense.shape[2:]), dense.dtype)
            pages[table.ravel()] = dense.reshape(count, PAGE, *dense.shape[2:])
            arrays[key] = pages
        arrays["block_table"] = table
    return arrays


@pytest.fixture(scope="module")
def runner(cpu: ArchSpec, device: DeviceInfo, kernel_folder: Path, request: pytest.FixtureRequest) -> FmhaRunner:
    made, run = FmhaRunner(cpu, compiler(), kernel_folder), Selected(request)
    made.prepare([planned(name, layout, device) for name in CASES if name in run for layout in LAYOUTS])
    return made


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(1)
def test_a_cache_may_lie_in_any_order(runner: FmhaRunner, name: str, device: DeviceInfo) -> None:
    inputs = content(name, "heads first")
    request = OperationRequest(ATTENTION, tensors_of(name, "heads first"), {}, {"return_lse": True})
    problem = parse_attention(request)
    truth = reference_attention(problem, inputs)
    results = []
    for layout in LAYOUTS:
        for team in (1, 2):
            plan = planned(name, layout, device)
            results.append(outputs_of(plan, runner.run(plan, content(name, layout), team)))
    pairs = problem.dtype.q is DType.BF16  # weights are rounded to bf16 as well
    found = compare(results[0]["o"], truth["o"], problem.operand("o").desc.dtype, problem.seq_k + problem.hdim_q)
    assert found.unwritten == 0
    assert found.error <= (1.5 if pairs else 1.0) * found.bound, found
    np.testing.assert_allclose(results[0]["lse"], truth["lse"], rtol=2e-6, atol=1e-5)
    for other in results[1:]:
        for key, have in results[0].items():
            assert np.array_equal(have.view(np.uint8), other[key].view(np.uint8)), key


@pytest.mark.parametrize("name", ["a row of each head", "four rows of a head"])
def test_keys_of_an_absent_page_are_not_seen(runner: FmhaRunner, name: str, device: DeviceInfo) -> None:
    """The first page, one in the middle, the last of a block of keys and the first of the next."""
    plan = planned(name, "pages", device)
    inputs = content(name, "pages")
    inputs["block_table"][0, [0, 3, 15, 16]] = -1, 10_000, -1, -1
    found = outputs_of(plan, runner.run(plan, inputs))
    whole = content(name, "heads first")
    seen = np.ones(ROOM, bool)
    for page in (0, 3, 15, 16):
        seen[page * PAGE : (page + 1) * PAGE] = False
    seen[LENGTHS[0] :] = False
    q, k, v = (np.asarray(whole[key][0], np.float64) for key in "qkv")
    shared = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, shared, 0)[:, seen], np.repeat(v, shared, 0)[:, seen]
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ v
    tolerance = 2e-2 if CASES[name][0] == "bf16" else 1e-5
    np.testing.assert_allclose(np.asarray(found["o"][0], np.float64), want, rtol=tolerance, atol=tolerance)
