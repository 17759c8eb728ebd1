"""Kernels forward and backward must agree: gradients with differences of what forward gives, in fp32, and the same
probabilities dropped in both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_kernels import Array, compiler, draw
from fmha_cases import Case, request_of
from fmha_runner import FmhaRunner, outputs_of

from tilewright_arch import ArchSpec
from tilewright_fmha.pipelines.candidates import with_signature
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.problem.parse.attention import parse_attention, parse_backward
from tilewright_fmha.problem.philox import random_bytes
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.references.sample_inputs import sample_inputs
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, Family
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest, Role

CASES = {
    "causal": Case(mask="causal", heads=(4, 2), hdim=(24, 32), seq=(33, 40)),
    "scores": Case(mask="window", bias="head", dbias=True, softcap=True, seq=(20, 150)),
    "dropped": Case(bias="alibi", drop=True, sinks=True, mode="lengths", seq=(30, 70)),
}
STEP = 1 / 64
"""Of a difference: rounding in fp32 and the third derivative err about equally, both below a thousandth."""


def forward_request(request: OperationRequest, **more: Any) -> OperationRequest:
    tensors = {name: desc for name, desc in request.inputs.items() if name not in ("o", "do", "lse")}
    words = {name: value for name, value in request.attributes.items() if name != "return_dbias"}
    return OperationRequest(ATTENTION, tensors, {}, {**words, "return_lse": True, **more})


class Pair:
    """The plans of a case, forward and backward."""

    def __init__(self, case: Case, device: DeviceInfo, **more: Any) -> None:
        self.request = request_of(case, ATTENTION_BACKWARD, batch=2, **more)
        self.forward_request = forward_request(self.request)
        self.forward = self._plan(parse_attention(self.forward_request), Family.FWD, device)
        self.problem = parse_backward(self.request)
        self.backward = self._plan(self.problem, Family.DQ_DK_DV, device)

    @staticmethod
    def _plan(problem: FmhaProblem, family: Family, device: DeviceInfo) -> ExecutionPlan:
        return plan_fmha(problem, with_signature(problem, family, device), device)

    def inputs(self, rng: np.random.Generator) -> dict[str, Array]:
        found = sample_inputs(self.forward_request, rng)
        for item in self.problem.operands:
            if item.role is Role.INPUT and item.name not in (*found, "o", "lse"):
                found[item.name] = draw(rng, item.desc)
        return found


@pytest.fixture(scope="module")
def pairs(device: DeviceInfo) -> dict[str, Pair]:
    found = {name: Pair(case, device) for name, case in CASES.items()}
    found["bytes"] = Pair(Case(drop=True, seq=(64, 64), hdim=(64, 64), heads=(2, 2)), device, return_randval=True)
    return found


@pytest.fixture(scope="module")
def runner(cpu: ArchSpec, pairs: dict[str, Pair], kernel_folder: Path) -> FmhaRunner:
    made = FmhaRunner(cpu, compiler(), kernel_folder)
    made.prepare([plan for pair in pairs.values() for plan in (pair.forward, pair.backward)])
    return made


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_what_differences_say(runner: FmhaRunner, pairs: dict[str, Pair], name: str) -> None:
    """Along random directions: sum(do * o) changes as the gradients say."""
    pair, rng = pairs[name], np.random.default_rng(4)
    inputs = pair.inputs(rng)

    def loss(values: dict[str, Array]) -> float:
        given = {item.name: values[item.name] for item in pair.forward.operands if item.role is Role.INPUT}
        o = outputs_of(pair.forward, runner.run(pair.forward, given))["o"]
        return float((o.astype(np.float64) * inputs["do"].astype(np.float64)).sum())

    kept = {item.name: inputs[item.name] for item in pair.forward.operands if item.role is Role.INPUT}
    inputs |= {k: v for k, v in outputs_of(pair.forward, runner.run(pair.forward, kept)).items() if k != "randval"}
    gradients = outputs_of(pair.backward, runner.run(pair.backward, inputs))
    names = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sinks": "dsinks"}
    checked = 0
    for operand, gradient in names.items():
        if operand not in inputs or gradient not in gradients:
            continue
        for _ in range(2):
            way = rng.standard_normal(inputs[operand].shape).astype(np.float32)
            ends = [loss({**inputs, operand: inputs[operand] + sign * STEP * way}) for sign in (1, -1)]
            slope = (ends[0] - ends[1]) / (2 * STEP)
            said = float((gradients[gradient].astype(np.float64) * way).sum())
            size = float(np.linalg.norm(gradients[gradient]))
            assert size > 0 and abs(slope - said) < 4e-3 * size, f"{gradient}: {slope} for {said}"
            checked += 1
    assert checked >= 6


def test_forward_and_backward_drop_the_same(runner: FmhaRunner, pairs: dict[str, Pair], device: DeviceInfo) -> None:
    """With values, and gradients of o, that are the unit matrix, o is the dropped P and dv its transpose."""
    pair, rng = pairs["bytes"], np.random.default_rng(9)
    inputs = pair.inputs(rng)
    unit = np.broadcast_to(np.eye(64, dtype=np.float32), (2, 2, 64, 64))
    inputs |= {"v": unit, "do": unit}
    given = {item.name: inputs[item.name] for item in pair.forward.operands if item.role is Role.INPUT}
    inputs |= outputs_of(pair.forward, runner.run(pair.forward, given))
    gradients = outputs_of(pair.backward, runner.run(pair.backward, inputs))
    o, turned = inputs["o"], gradients["dv"].swapaxes(2, 3)
    assert np.array_equal(o == 0, turned == 0)
    assert np.allclose(o, turned, rtol=2e-5, atol=1e-8)
    low, high, offset = (int(word) & 0xFFFFFFFF for word in inputs["rng"][:3])
    for b in range(2):
        for h in range(2):
            drawn = random_bytes(high << 32 | low, offset, b * 2 + h, 64, 64)
            assert np.array_equal(o[b, h] == 0, drawn < pair.problem.dropout)
            assert np.array_equal(gradients["randval"][b, h].view(np.uint8), drawn)
    share = float((o == 0).mean())
    sigma = np.sqrt(0.3 * 0.7 / o.size)
    assert abs(share - pair.problem.drop_probability) < 4 * sigma


def test_a_row_that_sees_nothing_has_no_gradients(runner: FmhaRunner, pairs: dict[str, Pair]) -> None:
    """Its lse is -inf; gradients of others are as if it were not there, and nothing is a NaN."""
    pair, rng = pairs["causal"], np.random.default_rng(3)
    inputs = pair.inputs(rng)
    given = {item.name: inputs[item.name] for item in pair.forward.operands if item.role is Role.INPUT}
    inputs |= outputs_of(pair.forward, runner.run(pair.forward, given))
    inputs["lse"][:, :, 5] = -np.inf
    inputs["o"][:, :, 5] = 0
    one = outputs_of(pair.backward, runner.run(pair.backward, inputs))
    assert all(np.isfinite(array).all() for array in one.values())
    assert not one["dq"][:, :, 5].any() and one["dq"][:, :, 6].any()
    inputs["q"][:, :, 5] = 7.0
    other = outputs_of(pair.backward, runner.run(pair.backward, inputs))
    assert all(np.array_equal(one[name], other[name]) for name in one)
