"""Heads of every size: none is padded by the caller, and the scale is that of the true size."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fmha_requests import REFERENCES, append_of, desc, drawn, ints
from fmha_runner import FmhaRunner, outputs_of
from test_fmha_gpu_emulated import run

import tilewright_arch
from tilewright_fmha.pipelines.candidates import fmha_candidates, fmha_refusal, predict_fmha
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.references.sample_inputs import PARSERS
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, KV_APPEND, Family
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.numerics.compare import compare

GPUS = ("sm_80", "sm_90a", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
HEADS = [(1, 1), (3, 5), (40, 40), (72, 33), (100, 100), (112, 160), (257, 31), (300, 520), (1000, 1001)]
MASK: dict[str, Any] = {"causal": True, "mask_align": "bottom_right"}


def qkv(dtype: str, heads: tuple[int, int], rows: int = 19, keys: int = 70) -> dict[str, Any]:
    q, v = heads
    return {"q": desc(dtype, 2, 4, rows, q), "k": desc(dtype, 2, 2, keys, q), "v": desc(dtype, 2, 2, keys, v)}


def gradients(dtype: str, heads: tuple[int, int]) -> dict[str, Any]:
    o = desc(dtype, 2, 4, 9, heads[1])
    return {**qkv(dtype, heads, 9, 30), "o": o, "do": o, "lse": desc("fp32", 2, 4, 9)}


def pages(dtype: str, heads: tuple[int, int]) -> dict[str, Any]:
    q, v = heads
    tensors = {"q": desc(dtype, 3, 4, 1, q), "k": desc(dtype, 10, 8, 2, q), "v": desc(dtype, 10, 8, 2, v)}
    return {**tensors, "block_table": ints(3, 4), "seqlens_k": ints(3)}


def check(problem: FmhaProblem, found: dict[str, Any], truth: dict[str, Any], room: float = 1.0) -> None:
    for name, have in found.items():
        if name == "lse":
            assert np.allclose(have, truth[name], rtol=1e-3, atol=1e-3)
            continue
        result = compare(have, truth[name], problem.operand(name).desc.dtype, problem.seq_k + problem.hdim_q)
        assert result.error <= room * result.bound, f"{name}: {result}"
        assert result.unwritten == result.misplaced == 0, f"{name}: {result}"


def on_cpu(operation: str, tensors: dict[str, Any], runner: FmhaRunner, cpu: DeviceInfo, **words: Any) -> None:
    request = OperationRequest(operation, tensors, {}, words)
    problem = PARSERS[operation](request)
    for config in {item.family: item for item in fmha_candidates(problem, cpu)}.values():
        plan, inputs = plan_fmha(problem, config, cpu), drawn(request)
        check(problem, outputs_of(plan, runner.run(plan, inputs)), REFERENCES[operation](problem, inputs))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.some(2)
def test_cpus_take_heads_of_any_size(heads: tuple[int, int], fmha_runner: FmhaRunner, device: DeviceInfo) -> None:
    on_cpu(ATTENTION, qkv("bf16", heads), fmha_runner, device, **MASK, return_lse=True)
    on_cpu(ATTENTION, qkv("fp32", heads, 1), fmha_runner, device)
    on_cpu(ATTENTION_BACKWARD, gradients("fp32", heads), fmha_runner, device, causal=True)


@pytest.mark.parametrize("heads", [(7, 13), (328, 21)], ids=str)
def test_caches_have_heads_of_any_size(heads: tuple[int, int], fmha_runner: FmhaRunner, device: DeviceInfo) -> None:
    on_cpu(ATTENTION, pages("fp32", heads), fmha_runner, device)
    tensors = append_of("fp32") | {
        f"{name}_{end}": desc("fp32", 2, 2, rows, size)
        for name, size in zip("kv", heads, strict=True)
        for end, rows in (("new", 3), ("past", 20))
    }
    on_cpu(KV_APPEND, tensors, fmha_runner, device)


def gpu_of(name: str) -> DeviceInfo:
    return dataclasses.replace(device_of(tilewright_arch.load(name)), units=4)


@pytest.mark.parametrize("operation", [ATTENTION, ATTENTION_BACKWARD])
@pytest.mark.parametrize("heads", [(1, 1), (20, 12), (100, 100)], ids=str)
@pytest.mark.some(1)
def test_kernels_of_gpus_take_heads_that_are_no_multiples_of_8(
    operation: str, heads: tuple[int, int], tmp_path: Path
) -> None:
    gpu, forward = gpu_of("sm_90a"), operation == ATTENTION
    tensors = qkv("fp16", heads) if forward else gradients("fp16", heads)
    request = OperationRequest(operation, tensors, {}, {**MASK, "return_lse": True} if forward else MASK)
    problem = PARSERS[operation](request)
    # Hopper's own kernels want its copy engine, which a CPU has not.
    config = next(item for item in fmha_candidates(problem, gpu) if item.pipeline != "ws" and item.waves <= 4)
    inputs = drawn(request)
    truth = REFERENCES[operation](problem, inputs)
    check(problem, run(plan_fmha(problem, config, gpu), inputs, gpu, tmp_path), truth, 2)


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_kernels_for_the_sizes_between_multiples_of_8(name: str) -> None:
    gpu = gpu_of(name)
    for size, dtype, of in itertools.product((1, 33, 100, 255), ("fp16", "bf16", "fp32"), (qkv, pages)):
        odd, whole = (
            PARSERS[ATTENTION](OperationRequest(ATTENTION, of(dtype, (own, own)), {}, {}))
            for own in (size, -(-size // 8) * 8)
        )
        found = fmha_candidates(odd, gpu)
        assert bool(found) == bool(fmha_candidates(whole, gpu)), (size, dtype, fmha_refusal(odd, gpu))
        # Others store whole vectors, behind the end of a row.
        assert {item.family for item in found} <= {Family.SPLITKV}
        assert found or (dtype == "fp32" and size == 255)


FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (qkv("fp16", (300, 520)), {**MASK, "return_lse": True}),
    "scores": (
        {**qkv("bf16", (264, 40)), "bias": desc("bf16", 1, 4, 19, 1), "alibi_slopes": desc("fp32", 2, 4)},
        {"softcap": 3.0, "window_left": 9, "window_right": 3, "return_scores": "probabilities"},
    ),
    "sinks": (
        {**qkv("fp16", (8, 264)), "sinks": desc("fp32", 4), "seqlens_q": ints(2), "seqlens_k": ints(2)},
        {"dropout_p": 0.4, "seed": 7, "causal": True},
    ),
    "fp32": (qkv("fp32", (257, 272)), {"return_lse": True}),
    "latent": ({name: item for name, item in qkv("bf16", (576, 1)).items() if name != "v"}, {"head_dim_v": 512}),
    "pages": (pages("fp16", (264, 272)), {"return_lse": True}),
    "pages, latent": (
        {name: item for name, item in pages("bf16", (576, 1)).items() if name != "v"}, {"head_dim_v": 512}
    ),
    "pages, varlen": (
        {
            "q": desc("bf16", 9, 4, 264), "k": desc("bf16", 10, 8, 2, 264), "v": desc("bf16", 10, 8, 2, 16),
            "cu_seqlens_q": ints(4), "block_table": ints(3, 4), "seqlens_k": ints(3),
            "alibi_slopes": desc("fp32", 4),
        },
        {"max_seqlen_q": 5, "mask": "bottom_right"},
    ),
    "varlen": (
        {
            "q": desc("fp16", 30, 4, 260), "k": desc("fp16", 60, 2, 260), "v": desc("fp16", 60, 2, 16),
            "cu_seqlens_q": ints(4), "cu_seqlens_k": ints(4), "alibi_slopes": desc("fp32", 4),
        },
        {"max_seqlen_q": 16, "max_seqlen_k": 24, "mask": "bottom_right"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FEATURES)
@pytest.mark.some(1)
def test_gpus_take_larger_heads_part_by_part(case: str, tmp_path: Path) -> None:
    tensors, words = FEATURES[case]
    request = OperationRequest(ATTENTION, tensors, {}, words)
    problem, gpu = PARSERS[ATTENTION](request), gpu_of("sm_80")
    config = next(item for item in fmha_candidates(problem, gpu) if item.waves <= 4)
    plan, inputs = plan_fmha(problem, config, gpu), drawn(request)
    parts = -(-problem.hdim_v // config.hdim[1])
    assert [stage.name for stage in plan.stages][: parts + 1] == [
        "open_scores", *(f"values_{number}" for number in range(parts))
    ]  # fmt: skip
    found = run(plan, inputs, gpu, tmp_path)
    scores = found.pop("scores", None)
    truth = REFERENCES[ATTENTION](problem, inputs)
    check(problem, found, truth, 2)
    if scores is not None:
        assert np.allclose(scores, truth["scores"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_takes_larger_heads(name: str) -> None:
    gpu = gpu_of(name)
    for dtype, heads in itertools.product(("fp16", "bf16", "fp32"), ((264, 64), (576, 512), (1000, 1000))):
        problem = PARSERS[ATTENTION](OperationRequest(ATTENTION, qkv(dtype, heads), {}, MASK))
        found = fmha_candidates(problem, gpu)
        assert found and {item.family for item in found} == {Family.FWD}, (dtype, heads)
        assert predict_fmha(problem, found[0], gpu).seconds > 0
        assert len(plan_fmha(problem, found[0], gpu).stages) == 1 + -(-heads[1] // found[0].hdim[1])
        problem = PARSERS[ATTENTION](OperationRequest(ATTENTION, pages(dtype, heads), {}, {}))
        assert fmha_candidates(problem, gpu), (dtype, heads, fmha_refusal(problem, gpu))


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("of", [gradients, lambda dtype, _: qkv(dtype, (264, 61))], ids=["dq", "odd"])
def test_gpus_refuse_what_parts_cannot_do_and_say_what_takes_it(name: str, of: Any) -> None:
    tensors = of("fp16", (264, 64))
    operation = ATTENTION_BACKWARD if "do" in tensors else ATTENTION
    problem, gpu = PARSERS[operation](OperationRequest(operation, tensors, {}, {})), gpu_of(name)
    assert not fmha_candidates(problem, gpu)
    refusal = fmha_refusal(problem, gpu)
    assert refusal is not None
    assert (refusal.rule, refusal.field) == ("hdim_multiple_of_8", "hdim")
    assert "CPUs up to 1024" in refusal.reason
    assert ("gradients" if operation == ATTENTION_BACKWARD else "whole vectors") in refusal.reason
    assert not refusal.fix  # heads are what they are


def test_the_scale_is_that_of_the_true_size() -> None:
    problem = PARSERS[ATTENTION](OperationRequest(ATTENTION, qkv("fp32", (10, 3)), {}, {}))
    assert problem.scale == 10**-0.5
