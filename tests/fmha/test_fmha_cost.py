"""The analytic model: positive and finite, and larger where there is more to do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from fmha_configs import AMD, CPU, NVIDIA, RDNA, all_templates
from fmha_requests import desc

from tilewright_arch import ArchSpec
from tilewright_fmha.pipelines.candidates import fmha_candidates, predict_fmha
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.references.sample_inputs import PARSERS
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, Family
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest

ARCHS = [CPU, AMD, NVIDIA]


@pytest.fixture(autouse=True)
def _templates() -> Iterator[None]:
    with all_templates():
        yield


def _problem(batch: int = 1, heads: int = 8, queries: int = 512, keys: int = 512, **attributes: Any) -> FmhaProblem:
    tensors = {
        "q": desc("bf16", batch, heads, queries, 64),
        "k": desc("bf16", batch, heads, keys, 64),
        "v": desc("bf16", batch, heads, keys, 64),
    }
    problem: FmhaProblem = PARSERS[ATTENTION](OperationRequest(ATTENTION, tensors, {}, attributes))
    return problem


def _device(arch: ArchSpec) -> DeviceInfo:
    return device_of(arch, 4 if arch is CPU else 0)


def _best(problem: FmhaProblem, device: DeviceInfo) -> float:
    return min(predict_fmha(problem, item, device).seconds for item in fmha_candidates(problem, device))


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_every_candidate_has_a_cost_that_its_parts_explain(arch: ArchSpec) -> None:
    device = _device(arch)
    for problem in (_problem(), _problem(queries=1, keys=8192), _problem(queries=3, keys=5), _problem(causal=True)):
        for config in fmha_candidates(problem, device):
            found = predict_fmha(problem, config, device)
            assert math.isfinite(found.seconds) and found.seconds > 0
            assert all(math.isfinite(part) and part >= 0 for part in found.parts.values())
            assert max(found.parts.values()) <= found.seconds * 1.0001
            assert predict_fmha(problem, config, device) == found


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_more_work_costs_more(arch: ArchSpec) -> None:
    device = _device(arch)
    plain = _best(_problem(queries=4096, keys=4096), device)
    assert _best(_problem(queries=4096, keys=8192), device) > plain
    assert _best(_problem(batch=4, queries=4096, keys=4096), device) > 2 * plain
    assert _best(_problem(queries=4096, keys=4096, causal=True), device) < 0.8 * plain
    assert _best(_problem(queries=4096, keys=4096, dropout_p=0.1), device) > plain


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_few_queries_over_many_keys_are_split(arch: ArchSpec) -> None:
    device, problem = _device(arch), _problem(heads=1, queries=1, keys=65536)
    ranked = sorted(fmha_candidates(problem, device), key=lambda item: predict_fmha(problem, item, device).seconds)
    assert ranked[0].family is Family.SPLITKV
    many = _problem(batch=8, heads=16, queries=2048, keys=2048)
    best = min(fmha_candidates(many, device), key=lambda item: predict_fmha(many, item, device).seconds)
    assert best.family is Family.FWD


def test_a_team_is_worth_waking_for_large_problems_only() -> None:
    device = _device(CPU)

    def team(problem: FmhaProblem) -> int:
        found = fmha_candidates(problem, device)
        return min(found, key=lambda item: predict_fmha(problem, item, device).seconds).team

    assert team(_problem(queries=2048, keys=2048)) == 4
    assert team(_problem(heads=1, queries=4, keys=4)) == 1


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_gradients_cost_more_than_the_forward_kernel(arch: ArchSpec) -> None:
    device, forward = _device(arch), _problem(queries=1024, keys=1024)
    assert _best(_gradients(forward), device) > _best(forward, device)


def _gradients(forward: FmhaProblem) -> FmhaProblem:
    tensors = {item.name: item.desc for item in forward.tensors}
    lse = desc("fp32", *tensors["q"].shape[:3])
    inputs = {**tensors, "do": tensors["o"], "lse": lse}
    problem: FmhaProblem = PARSERS[ATTENTION_BACKWARD](OperationRequest(ATTENTION_BACKWARD, inputs, {}, {}))
    return problem


@pytest.mark.parametrize("arch", [AMD, RDNA], ids=lambda arch: arch.name)
def test_gradients_of_long_sequences_take_the_largest_tile_there_is(arch: ArchSpec) -> None:
    """Small blocks make the same products, but read more, and wait for memory as often as there are blocks."""
    problem, device = _gradients(_problem(heads=64, queries=4096, keys=4096)), _device(arch)
    found = [item for item in fmha_candidates(problem, device) if item.family is Family.DQ_DK_DV]
    best = min(found, key=lambda item: predict_fmha(problem, item, device).seconds)
    assert best.m0 * best.n0 == max(item.m0 * item.n0 for item in found) > min(item.m0 * item.n0 for item in found)
    assert best.waves > 1
