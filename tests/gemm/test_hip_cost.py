"""The model's first choice for AMD GPUs is among the kernels with the best static bounds."""

from __future__ import annotations

import math
from functools import cache

import pytest
from hip_units import HAVE_HIP, HIP_ARCHS, WITHOUT_HIP, toolchain

import tilewright_arch
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.cost.hip import resident_of
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.selection.strategies import Selector
from tilewright_kit.types.errors import ToolchainMissingError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_tools.analysis.disassembly import Disassembler
from tilewright_tools.analysis.kernels import Finding, analyze_config, launch_of
from tilewright_tools.analysis.roofline import bound_of

GEMM = GemmOperation()
SQUARE = (4096, 4096, 4096)
SHAPES = (SQUARE, (8192, 8192, 8192), (4096, 8192, 2048))
"""So large that slices of K, whose joining the bounds leave out, are of no use."""
CLOSE = 1.03
"""How much longer than the shortest bound that of the first choice may be."""
RIVALS, ALL = 3, 1 << 20
"""Candidates that the first choice is compared with, in every run and at all."""


def have_disassembler() -> bool:
    try:
        Disassembler().find()
    except ToolchainMissingError:
        return False
    return True


pytestmark = [
    pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP),
    pytest.mark.skipif(not have_disassembler(), reason="no llvm-objdump that knows AMD GPUs: install llvm 19 or later"),
]


def problem_of(sizes: tuple[int, int, int]) -> GemmProblem:
    m, n, k = sizes
    inputs = {"a": TensorDesc.of("fp16", (m, k)), "b": TensorDesc.of("fp16", (k, n), (1, k))}
    return GEMM.parse(OperationRequest("gemm", inputs))


@cache
def finding(config: GemmConfig, name: str) -> Finding:
    return analyze_config(GEMM, config, tilewright_arch.load(name), toolchain(), shape=",".join(map(str, SQUARE)))


def bound(config: GemmConfig, name: str, sizes: tuple[int, int, int]) -> float:
    """The least seconds that the kernel takes. It is built and analysed once for all sizes."""
    found = finding(config, name)
    problem, _ = launch_of(GEMM, config, tilewright_arch.load(name), ",".join(map(str, sizes)))
    return bound_of(found.analysis, problem).seconds


def first_choice(name: str, sizes: tuple[int, int, int]) -> GemmConfig:
    config = Selector().select(GEMM, problem_of(sizes), device_of(tilewright_arch.load(name))).config
    assert isinstance(config, GemmConfig)
    return config


def rivals(name: str, sizes: tuple[int, int, int], count: int) -> list[GemmConfig]:
    """The candidates that the model thinks best: of these one may be better than the first choice."""
    problem, device = problem_of(sizes), device_of(tilewright_arch.load(name))
    candidates = GEMM.candidates(problem, device)
    assert len(candidates) > count or count == ALL
    return sorted(candidates, key=lambda config: GEMM.predict(problem, config, device).seconds)[:count]


@pytest.mark.parametrize("count", [RIVALS, pytest.param(ALL, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
@pytest.mark.parametrize("name", HIP_ARCHS)
@pytest.mark.extended
def test_the_first_choice_has_nearly_the_best_bound_of_the_candidates(name: str, count: int) -> None:
    for sizes in SHAPES:
        candidates = rivals(name, sizes, count)
        best = min(candidates, key=lambda config: bound(config, name, sizes))
        chosen = first_choice(name, sizes)
        assert chosen in candidates
        assert bound(chosen, name, sizes) <= CLOSE * bound(best, name, sizes), f"{chosen.name}, not {best.name}"


@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950"])
@pytest.mark.slow
@pytest.mark.extended
def test_no_essential_kernel_of_halves_has_a_better_bound_than_the_first_choice(name: str) -> None:
    arch = tilewright_arch.load(name)
    essential = [
        config
        for config in KERNEL_SETS["essential"].expand(arch, RULES)
        if config.dtype_a.value == "fp16" and config.layout == "rcr" and math.prod(config.tile[:2]) >= 128 * 256
    ]
    assert essential
    chosen = first_choice(name, SQUARE)
    for config in essential:
        assert bound(chosen, name, SQUARE) <= CLOSE * bound(config, name, SQUARE), config.name


def test_a_tile_for_every_unit_is_chosen_and_fills_the_matrix_units() -> None:
    chosen = first_choice("gfx942", SQUARE)
    assert (chosen.tile, chosen.wave, chosen.pipeline) == ((256, 224, 32), (4, 1, 1), "compv4")
    assert chosen in set(KERNEL_SETS["essential"].expand(tilewright_arch.load("gfx942"), RULES))
    found = finding(chosen, "gfx942").bound
    assert found.units_used == 1.0 and found.share_of_peak > 0.94


def bytes_problem(dtype: str, size: int) -> GemmProblem:
    inputs = {"a": TensorDesc.of(dtype, (size, size)), "b": TensorDesc.of(dtype, (size, size), (1, size))}
    return GEMM.parse(OperationRequest("gemm", inputs, {}, {"out_dtype": "bf16"}))


@pytest.mark.parametrize("size", [4096, 8192])
@pytest.mark.parametrize("dtype", ["fp8", "bf8"])
def test_where_codes_are_replaced_workgroups_share_a_unit(dtype: str, size: int) -> None:
    """A wave that is alone on its SIMD cannot hide six instructions for four values."""
    device = device_of(tilewright_arch.load("gfx942"))
    chosen = Selector().select(GEMM, bytes_problem(dtype, size), device).config
    assert isinstance(chosen, GemmConfig) and resident_of(chosen, device.arch) >= 2


@pytest.mark.extended
@pytest.mark.parametrize(("size", "least"), [(4096, 0.94), (8192, 0.9)])
def test_products_of_fp8_fill_the_matrix_units_of_gfx942(size: int, least: float) -> None:
    arch = tilewright_arch.load("gfx942")
    chosen = Selector().select(GEMM, bytes_problem("fp8", size), device_of(arch)).config
    assert isinstance(chosen, GemmConfig)
    found = analyze_config(GEMM, chosen, arch, toolchain(), shape=f"{size},{size},{size}").bound
    assert found.share_of_peak >= least, chosen.name
