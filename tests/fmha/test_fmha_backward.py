"""Gradients on a CPU, through plans, against the reference: features alone and in pairs, in every order of memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from cpu_kernels import Array, compiler, draw
from fmha_cases import COMPILED, Case, drawn_cases, request_of
from fmha_runner import FmhaRunner, outputs_of
from selected import Selected

from tilewright_arch import ArchSpec
from tilewright_fmha.launch.kernel_args import SCALARS
from tilewright_fmha.pipelines.candidates import with_signature
from tilewright_fmha.plan.plan import plan_fmha
from tilewright_fmha.problem.parse.attention import parse_attention, parse_backward
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.problem.sequences import item_of
from tilewright_fmha.references.backward import reference_backward
from tilewright_fmha.references.forward import reference_attention
from tilewright_fmha.references.sample_inputs import sample_inputs
from tilewright_fmha.vocabulary import ATTENTION_BACKWARD, Family
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import I64, ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.numerics.compare import compare
from tilewright_kit.types.dtypes import DType

CASES = drawn_cases({**COMPILED, "dbias": [False, True]}, 5)
ALONE = {
    "sizes_1": Case(seq=(1, 1)),
    "sizes_odd": Case(seq=(127, 200), heads=(4, 2)),
    "no_keys": Case(seq=(5, 0)),
    "no_queries": Case(seq=(0, 5)),
    "bottom": Case(mask="bottom", seq=(64, 17)),
    "wide": Case(mask="causal", seq=(65, 129), heads=(3, 1)),
    "sinks_columns": Case(mask="causal", layout="bshd", columns=True),
    "bias_keys": Case(bias="keys", dbias=True, seq=(40, 300)),
    "bias_head": Case(bias="head", dbias=True, heads=(4, 2)),
    "bias_rows": Case(bias="rows", dbias=True, seq=(40, 300)),
    "bias_column": Case(bias="column", dbias=True, heads=(4, 2), seq=(40, 300)),
    "token_sinks": Case(mask="sink", seq=(65, 127)),
    "token_sinks_bf16": Case(mask="sink", dtype="bf16", seq=(65, 127)),
    "capped_rows_in_pairs": Case(dtype="bf16", softcap=True, seq=(3, 65)),
    "hdim_72": Case(dtype="bf16", hdim=(72, 40), seq=(33, 70)),
}

TEAMS = ("sizes_odd", "bias_keys", "bias_head", "bias_rows", "bias_column")


def inputs_of(request: OperationRequest, problem: FmhaProblem, rng: np.random.Generator) -> dict[str, Array]:
    inputs = sample_inputs(request, rng)
    for item in problem.operands:
        if item.role is Role.INPUT and item.name not in inputs:
            inputs[item.name] = draw(rng, item.desc)
    if "bias" in inputs:
        hidden = rng.random(inputs["bias"].shape) < 0.1
        inputs["bias"] = np.where(hidden, -np.inf, inputs["bias"].astype(np.float32)).astype(inputs["bias"].dtype)
        given = {name: inputs[name] for name in inputs if name not in ("o", "lse")}
        inputs |= forward_of(request, given)
    return poisoned(problem, inputs)


def poisoned(problem: FmhaProblem, inputs: dict[str, Array]) -> dict[str, Array]:
    """NaN in every row that no sequence has."""
    found = dict(inputs)
    for name in ("q", "o", "do", "k", "v", "lse"):
        array = np.array(inputs[name])
        rows = np.moveaxis(array, (1 if name == "lse" else 0) if problem.varlen else 2, 0)
        if problem.varlen:
            outside = np.ones(len(rows), bool)
        for b in range(problem.batch):
            item = item_of(problem, inputs, b)
            first, count = (item.k_first, item.keys) if name in ("k", "v") else (item.q_first, item.queries)
            if problem.varlen:
                outside[first : first + count] = False
            else:
                rows[count:, b] = np.nan
        if problem.varlen:
            rows[outside] = np.nan
        found[name] = array
    return found


def forward_of(request: OperationRequest, inputs: dict[str, Array]) -> dict[str, Array]:
    """What forward stores, of a bias that hides keys."""
    tensors = {name: desc for name, desc in request.inputs.items() if name not in ("o", "do", "lse")}
    words = {name: value for name, value in request.attributes.items() if name != "return_dbias"}
    problem = parse_attention(OperationRequest("attention", tensors, {}, {**words, "return_lse": True}))
    found = reference_attention(problem, inputs)
    return {
        "o": found["o"].astype(np.float32).astype(request.inputs["o"].dtype.numpy),
        "lse": found["lse"].astype(np.float32),
    }


def covered(problem: FmhaProblem, inputs: dict[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    """Elements that some sequence has: of sequences end to end, only these are written."""
    mask = np.ones(shape, bool)
    if problem.varlen and name in ("dq", "dk", "dv"):
        mask[:] = False
        for b in range(problem.batch):
            item = item_of(problem, inputs, b)
            first, rows = (item.q_first, item.queries) if name == "dq" else (item.k_first, item.keys)
            mask[first : first + rows] = True
    return mask


def check(problem: FmhaProblem, inputs: dict[str, Array], got: dict[str, Array]) -> None:
    truth = reference_backward(problem, inputs)
    terms = problem.seq_q * problem.group + problem.seq_k + problem.hdim_q
    for name, have in got.items():
        seen = covered(problem, inputs, name, have.shape)
        assert not np.isfinite(have.astype(np.float64)[~seen]).any(), f"{name} is written where no sequence is"
        if not seen.any():
            continue
        dtype = problem.operand(name).desc.dtype
        # Both products that make a gradient round their operands to bf16, each as much as the result is rounded.
        coarse = DType.BF16 if problem.dtype.q is DType.BF16 else dtype
        want = truth[name]
        result = compare(have[seen], want[seen], coarse, terms)
        factor = 2.0 if coarse is DType.BF16 else 1.0
        assert result.unwritten == 0 and result.misplaced == 0, f"{name}: {result}"
        assert result.error <= factor * result.bound or small(have[seen], want[seen], coarse), f"{name}: {result}"


def small(have: Array, want: Array, dtype: DType) -> bool:
    """Gradients that are zero but for cancellation have no relative error."""
    noise = {DType.FP32: 1e-6, DType.FP16: 1e-4, DType.BF16: 1e-3}[dtype]
    return bool(np.all(np.abs(have.astype(np.float64) - want) <= noise))


def planned(case: Case, device: DeviceInfo, team: int = 1) -> tuple[OperationRequest, FmhaProblem, ExecutionPlan]:
    request = request_of(case, ATTENTION_BACKWARD)
    problem = parse_backward(request)
    config = with_signature(problem, Family.DQ_DK_DV, device)
    config = config.replace(wave=(team, *config.wave[1:]))
    return request, problem, plan_fmha(problem, config, device)


@pytest.fixture(scope="module")
def runner(cpu: ArchSpec, device: DeviceInfo, kernel_folder: Path, request: pytest.FixtureRequest) -> FmhaRunner:
    made, run = FmhaRunner(cpu, compiler(), kernel_folder), Selected(request)
    alone = [case for case in CASES if case in run] + [case for name, case in ALONE.items() if name in run]
    teams = [planned(ALONE[name], device, team=2)[2] for name in TEAMS if name in run]
    made.prepare([*(planned(case, device)[2] for case in alone), *teams])
    return made


def run(runner: FmhaRunner, case: Case, device: DeviceInfo, seed: int) -> None:
    request, problem, plan = planned(case, device)
    inputs = inputs_of(request, problem, np.random.default_rng(seed))
    check(problem, inputs, outputs_of(plan, runner.run(plan, inputs)))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.some(4)
@pytest.mark.extended
def test_pairs_of_features(runner: FmhaRunner, case: Case, device: DeviceInfo) -> None:
    run(runner, case, device, 1)


@pytest.mark.parametrize("name", TEAMS)
@pytest.mark.some(3)
def test_teams_give_what_one_thread_gives_in_another_order(runner: FmhaRunner, name: str, device: DeviceInfo) -> None:
    """Two threads share out slices of keys; what each adds is fixed, so that runs agree to the last bit."""
    case = dataclasses.replace(ALONE[name], heads=(3, 1), seq=(65, 300))
    request, problem, plan = planned(case, device, team=2)
    assert slices_of(plan) > 1
    inputs = inputs_of(request, problem, np.random.default_rng(3))
    first = outputs_of(plan, runner.run(plan, inputs))
    check(problem, inputs, first)
    # A team that turns out smaller takes longer, and that is all.
    for team in (2, 1):
        again = outputs_of(plan, runner.run(plan, inputs, team))
        for name, have in first.items():
            assert np.array_equal(have.view(np.uint8), again[name].view(np.uint8)), name


def slices_of(plan: ExecutionPlan) -> int:
    """Of ``dq_dk_dv``: field ``splits`` of its arguments."""
    fields = dict(zip(SCALARS, plan.stages[1].args.fields[-4 - len(SCALARS) : -4], strict=True))
    value = fields["splits"]
    assert isinstance(value, I64)
    return value.value


@pytest.mark.parametrize("name", ALONE)
def test_features(runner: FmhaRunner, name: str, device: DeviceInfo) -> None:
    run(runner, ALONE[name], device, 2)
