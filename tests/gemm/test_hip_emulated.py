"""Plans for AMD GPUs, executed: what the plugin plans and generates is built and run by the emulator, and compared."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from functools import cache

import numpy as np
import pytest
from gemm_runner import draw
from hip_cases import STEPS, VARIANTS, Case, cases, pairs_of, pipelines_of
from hip_runner import HipRunner
from hip_units import HAVE_HIP, HIP_ARCHS, WITHOUT_HIP
from sampling import partly

import tilewright_arch
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.vocabulary import LAYOUTS
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.numerics.compare import compare, poison
from tilewright_kit.selection.strategies import Selector
from tilewright_kit.types.tensor import TensorDesc

GEMM = GemmOperation()
UNITS = 3
"""So few that persistent workgroups have several tiles each."""
of = TensorDesc.of
needs_compiler = pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)


@cache
def runner_of(name: str) -> HipRunner:
    return HipRunner(tilewright_arch.load(name))


def device(name: str) -> DeviceInfo:
    return device_of(tilewright_arch.load(name), UNITS)


def check(name: str, request: OperationRequest, config: GemmConfig, lead: int = 0) -> None:
    """Plan, build, run, compare."""
    problem, target = GEMM.parse(request), device(name)
    assert not GEMM.rules.check(config, target.arch), GEMM.rules.check(config, target.arch)
    assert not GEMM.mismatches(problem, config, target), GEMM.mismatches(problem, config, target)
    plan = GEMM.plan(problem, config, target)
    rng = np.random.default_rng(7)
    inputs = {item.name: draw(rng, item.desc) for item in problem.operands if item.role is Role.INPUT}
    memory = runner_of(name).run(plan, inputs, lead)
    truth = GEMM.reference(problem, inputs)
    depth = max(max(product.k for product in problem.products), 1)
    for item in problem.operands:
        if item.role is Role.OUTPUT:
            before = poison(problem.dtype_c, item.desc.shape)
            view = memory[item.name].view
            result = compare(view, truth[item.name], problem.dtype_c, depth, problem.dtype_acc, before)
            assert result.passed, f"{item.name} of {config.name}: {result}"


ALL = [(name, case) for name in HIP_ARCHS for case in cases(tilewright_arch.load(name))]


def label(value: object) -> str:
    return "-".join(value.marks.values()) if isinstance(value, Case) else str(value)


TOGETHER = (("pair", "layout"), ("pipeline", "layout"), ("variant", "step"), ("layout", "epilogue"))
"""What meets in a kernel, in every pair of values."""


def shown(case: tuple[str, Case]) -> set[Hashable]:
    """What every run has: all values on each arch, each warp tile of each pair of types, and what meets, on some."""
    name, marks = case[0], case[1].marks
    found: set[Hashable] = {(name, kind, value) for kind, value in marks.items()}
    found |= {(name, marks["pipeline"], marks["epilogue"]), (marks["pair"], marks["warp_tile"])}
    return found | {(first, marks[first], second, marks[second]) for first, second in TOGETHER}


@needs_compiler
@pytest.mark.parametrize(("name", "case"), partly(ALL, shown), ids=label)
def test_every_kind_of_kernel_computes_its_problem(name: str, case: Case) -> None:
    check(name, case.request, case.config, case.lead)


@pytest.mark.parametrize("name", HIP_ARCHS)
def test_the_cases_hold_every_kind_of_kernel(name: str) -> None:
    arch = tilewright_arch.load(name)
    marks = [case.marks for one, case in ALL if one == name]
    assert {(item["pair"], item["warp_tile"]) for item in marks} == {
        (f"{a}_{b}", "x".join(map(str, tile)))
        for a, b in pairs_of(arch)
        for tile in arch.warp_tiles[f"{a}_{b}_{arch.acc_dtype(a, b)}"]
    }
    plain = set(pipelines_of(arch)) - set(arch.preshuffle_pipelines)
    for kind, values in {
        "layout": set(LAYOUTS), "variant": set(VARIANTS), "step": set(STEPS), "pipeline": plain,
        "epilogue": {"cshuffle", "default"}, "scheduler": {"intrawave", "interwave"},
    }.items():  # fmt: skip
        assert {item[kind] for item in marks} == values, kind
    assert {(item["pipeline"], item["epilogue"]) for item in marks} == {
        (pipeline, epilogue) for pipeline in plain for epilogue in ("cshuffle", "default")
    }


def test_all_archs_together_hold_every_pair_of_what_meets_in_a_kernel() -> None:
    for first, second in TOGETHER:
        found = {(case.marks[first], case.marks[second]) for _, case in ALL}
        firsts, seconds = ({case.marks[kind] for _, case in ALL} for kind in (first, second))
        assert found == {(one, two) for one in firsts for two in seconds}, (first, second)


PROBLEMS = {
    "square": ({"a": of("fp16", (300, 260)), "b": of("fp16", (260, 290), (1, 260))}, {}),
    "decode": ({"a": of("bf16", (3, 512)), "b": of("bf16", (512, 200), (1, 512))}, {"out_dtype": "fp32"}),
    "no_k": ({"a": of("fp32", (20, 0)), "b": of("fp32", (0, 30)), "bias": of("fp32", (30,))}, {"unary": "Relu"}),
}


@needs_compiler
@pytest.mark.parametrize("name", HIP_ARCHS)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.extended
def test_what_is_chosen_for_a_problem_computes_it(problem: str, name: str) -> None:
    inputs, attributes = PROBLEMS[problem]
    request = OperationRequest("gemm", inputs, {}, attributes)
    config = Selector().select(GEMM, GEMM.parse(request), device(name)).config
    assert isinstance(config, GemmConfig)
    check(name, request, config)


@needs_compiler
@pytest.mark.parametrize("unary", ["LeakyRelu", "Elu", "Softplus", "Mish"])
def test_activations_with_exponentials_and_slopes_are_right(unary: str) -> None:
    inputs = {"a": of("fp16", (20, 32)), "b": of("fp16", (32, 30)), "bias": of("fp32", (30,))}
    slope = {"slope": 0.3} if unary in ("LeakyRelu", "Elu") else {}
    request = OperationRequest("gemm", inputs, {}, {"unary": unary, "out_dtype": "fp32", **slope})
    config = Selector().select(GEMM, GEMM.parse(request), device("gfx942")).config
    assert isinstance(config, GemmConfig)
    check("gfx942", request, config)


ODD = ((1, 3), (1, 5), (1, 7), (3, 1), (3, 3))
"""Warp tiles of a wave along m and n, at least one of them odd and above one."""


@needs_compiler
@pytest.mark.parametrize(
    ("repeats", "pipeline", "name"),
    partly(
        itertools.product(ODD, ("compv3", "compv4"), ("gfx942", "gfx950")),
        lambda case: {case[0], case[1:]},
    ),
    ids=str,
)
@pytest.mark.extended
def test_results_of_waves_with_odd_numbers_of_warp_tiles_are_shuffled(
    repeats: tuple[int, int], pipeline: str, name: str
) -> None:
    m, n = 64 * repeats[0], 32 * repeats[1]
    config = GemmConfig(tile=(m, n, 32), wave=(2, 1, 1), warp_tile=(32, 32, 8), pipeline=pipeline)
    request = OperationRequest("gemm", {"a": of("fp16", (m, 96)), "b": of("fp16", (96, n), (1, 96))})
    check(name, request, config)
