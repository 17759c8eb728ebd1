"""Candidates: valid kernels that compute the problem, the most general among them; and why others do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fmha_configs import AMD, CPU, NVIDIA, RDNA, all_templates, valid
from fmha_requests import (
    VARLEN,
    append_of,
    append_paged_of,
    backward_of,
    batch_of,
    desc,
    ints,
    paged_of,
    prefill_of,
    varlen_of,
    vectorized_of,
)

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.pipelines import is_specialised
from tilewright_fmha.config.tile_order import category
from tilewright_fmha.launch.splits import choose_splits
from tilewright_fmha.pipelines.candidates import (
    MOST_CPU,
    MOST_GPU,
    fmha_candidates,
    fmha_mismatches,
    fmha_refusal,
    with_signature,
)
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.problem.signature import signature_of
from tilewright_fmha.references.sample_inputs import PARSERS
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, KV_APPEND, BiasKind, Family, MaskKind
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import OperationRequest

Request = tuple[str, dict[str, Any], dict[str, Any]]

REQUESTS: dict[str, Request] = {
    "plain": (ATTENTION, batch_of(), {}),
    "causal": (ATTENTION, batch_of("fp32"), {"causal": True, "return_lse": True}),
    "window": (ATTENTION, batch_of("bf16"), {"window_left": 3, "window_right": 0, "sink_size": 2}),
    "biased": (ATTENTION, {**batch_of(), "bias": desc("fp32", 1, 1, 5, 7)}, {"softcap": 20.0}),
    "alibi": (ATTENTION, {**batch_of(), "alibi_slopes": desc("fp32", 4)}, {"dropout_p": 0.25, "seed": 3}),
    "sinks": (ATTENTION, {**batch_of(), "sinks": desc("fp32", 4)}, {}),
    "eight": (ATTENTION, batch_of("fp8"), {"out_dtype": "bf16"}),
    "varlen": (ATTENTION, varlen_of("bf16"), {**VARLEN, "min_seqlen_q": 2}),
    "paged": (ATTENTION, paged_of(), {}),
    "vectorized": (ATTENTION, vectorized_of("bf16"), {"kv_layout": "vectorized"}),
    "prefill": (ATTENTION, prefill_of("bf16"), {"max_seqlen_q": 8}),
    "backward": (ATTENTION_BACKWARD, backward_of("fp32"), {"causal": True}),
    "append": (KV_APPEND, append_of(), {}),
    "append_paged": (KV_APPEND, append_paged_of("bf16"), {}),
}  # fmt: skip


def _problem(name: str) -> FmhaProblem:
    operation, tensors, attributes = REQUESTS[name]
    if name == "append_paged":
        tensors = {"block_table": ints(3, 4), "seqlens_k": ints(3), **tensors}
    problem: FmhaProblem = PARSERS[operation](OperationRequest(operation, tensors, {}, attributes))
    return problem


@pytest.fixture(autouse=True)
def _templates() -> Iterator[None]:
    with all_templates():
        yield


@pytest.mark.parametrize("arch", [CPU, AMD, NVIDIA, RDNA], ids=lambda arch: arch.name)
@pytest.mark.parametrize("name", REQUESTS)
def test_candidates_are_valid_and_compute_the_problem(name: str, arch: ArchSpec) -> None:
    problem, device = _problem(name), device_of(arch, 2 if arch is CPU else 0)
    if problem.dtype.value not in (attention_of(arch).dtypes if attention_of(arch) else ()):
        pytest.skip(f"{arch.name} has no {problem.dtype}")
    found = fmha_candidates(problem, device)
    assert found and len(set(found)) == len(found) <= (MOST_CPU if arch is CPU else MOST_GPU)
    assert fmha_candidates(problem, device) == found
    for config in found:
        assert RULES.check(config, arch) == () == fmha_mismatches(problem, config, device)
    last = found[-1]
    assert last.family is problem.family and last.page_size == 0 and last.pipeline != "ws"
    assert last.pad_s and last.pad_sk and last.pad_d and last.pad_dv
    assert fmha_refusal(problem, device) is None


@pytest.mark.parametrize("name", REQUESTS)
def test_a_kernel_has_the_signature_of_its_problem(name: str) -> None:
    problem = _problem(name)
    config = with_signature(problem, problem.family, device_of(CPU, 2))
    wanted = signature_of(problem)
    assert {key: value for key, value in config.signature().items() if key != "hdim"} == {
        key: getattr(value, "value", value) for key, value in wanted.items() if key != "hdim"
    }
    assert config.hdim >= wanted["hdim"] == (problem.hdim_q, problem.hdim_v)
    assert RULES.allows(config, CPU)


def _long(queries: int, keys: int, heads: int = 1, **attributes: Any) -> FmhaProblem:
    tensors = {
        "q": desc("bf16", 1, heads, queries, 128),
        "k": desc("bf16", 1, 1, keys, 128),
        "v": desc("bf16", 1, 1, keys, 128),
    }
    problem: FmhaProblem = PARSERS[ATTENTION](OperationRequest(ATTENTION, tensors, {}, attributes))
    return problem


@pytest.mark.parametrize("arch", [CPU, AMD, NVIDIA], ids=lambda arch: arch.name)
def test_keys_are_cut_where_queries_are_few(arch: ArchSpec) -> None:
    device = device_of(arch, 4 if arch is CPU else 0)
    decode = fmha_candidates(_long(1, 8192, 8), device)
    assert decode[0].family is Family.SPLITKV and decode[-1].family is Family.FWD
    splits = choose_splits(_long(1, 8192, 8), decode[0], device)
    assert 1 < splits <= decode[0].max_splits
    many = fmha_candidates(_long(8192, 8192, 8), device)
    assert {config.family for config in many} == {Family.FWD}
    short = fmha_candidates(_long(1, 64, 8), device)
    assert {choose_splits(_long(1, 64, 8), config, device) for config in short} == {1}
    portable = [config for config in short if not is_specialised(config)]
    assert Family.SPLITKV not in {config.family for config in portable}


def test_splits_come_from_capacities_and_can_be_asked_for() -> None:
    device = device_of(CPU, 4)
    config = next(item for item in fmha_candidates(_long(1, 8192), device) if item.family is Family.SPLITKV)
    asked = _long(1, 8192, num_splits=3)
    assert choose_splits(asked, config, device) == 3
    only = fmha_candidates(asked, device)
    assert {item.family for item in only} == {Family.SPLITKV}
    assert choose_splits(_long(1, 8192), config.replace(num_splits=5), device) == 5
    assert choose_splits(_long(1, 8192), config.replace(family=Family.FWD), device) == 1
    assert choose_splits(_long(1, 130), config, device) <= 2
    most = fmha_candidates(_long(1, 8192, num_splits=64), device)
    assert most and all(item.max_splits >= 64 for item in most)


def test_the_order_is_that_of_tiles() -> None:
    device = device_of(NVIDIA)
    found = [item for item in fmha_candidates(_long(64, 8192, 64), device) if item.family is Family.FWD][:-1]
    kinds = [category(item.m0, 64) for item in found if item.pipeline != "ws"]
    assert kinds == sorted(kinds)


@pytest.mark.parametrize(
    ("name", "changes", "rule", "field"),
    [
        ("plain", {"family": Family.COMBINE}, "main_family", "family"),
        ("plain", {"family": Family.PAGEDKV}, "signature", "family"),
        ("plain", {"mask": MaskKind.CAUSAL}, "signature", "mask"),
        ("plain", {"bias": BiasKind.ALIBI}, "signature", "bias"),
        ("plain", {"lse": True}, "signature", "lse"),
        ("plain", {"hdim": (8, 8)}, "signature", "hdim"),
        ("plain", {"pad_s": False}, "padding", "pad_s"),
        ("plain", {"pad_sk": False}, "padding", "pad_sk"),
        ("plain", {"pad_d": False}, "padding", "pad_d"),
        ("plain", {"pad_dv": False}, "padding", "pad_dv"),
        ("varlen", {"pad_s": False}, "padding", "pad_s"),
        ("plain", {"max_seq_len_q": 4}, "max_seq_len_q", "max_seq_len_q"),
        ("plain", {"wave": (64, *(1,) * 8)}, "team", "wave"),
        ("paged", {"page_size": 64}, "signature", "page_size"),
        ("backward", {"deterministic": False}, "signature", "deterministic"),
    ],
)
def test_why_a_kernel_does_not_fit(name: str, changes: dict[str, Any], rule: str, field: str) -> None:
    problem, device = _problem(name), device_of(CPU, 2)
    config = fmha_candidates(problem, device)[-1]
    found = fmha_mismatches(problem, config.replace(**changes), device)
    assert [(item.rule, item.field) for item in found] == [(rule, field)] and found[0].reason
    if found[0].fix:
        assert fmha_mismatches(problem, config.replace(**{**changes, **found[0].fix}), device) == ()


def test_a_deterministic_kernel_serves_who_does_not_ask_for_it() -> None:
    operation, tensors, attributes = REQUESTS["backward"]
    loose: FmhaProblem = PARSERS[operation](
        OperationRequest(operation, tensors, {}, {**attributes, "deterministic": False})
    )
    device = device_of(CPU, 2)
    config = fmha_candidates(_problem("backward"), device)[0]
    assert config.deterministic and fmha_mismatches(loose, config, device) == ()


def test_what_nothing_computes_is_refused_with_the_nearest() -> None:
    refusal = fmha_refusal(_problem("eight"), device_of(RDNA))
    assert refusal is None or refusal.rule
    config = valid(CPU)
    assert fmha_mismatches(_problem("append"), config, device_of(CPU, 2))
