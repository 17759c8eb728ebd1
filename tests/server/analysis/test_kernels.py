"""Real kernels, built and analysed: what the generated code is made of, and what it can reach at the most."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tilewright_arch
from tilewright_kit.contract.abilities import Product
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.tiles.work_share import tile_share
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import NotFoundError, UnsupportedError
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_tools.analysis.kernels import Finding, analyze_config, named_config, summary
from tilewright_tools.analysis.roofline import Problem, analyze, bound_of
from tilewright_tools.cli.problems.loading import load_operation

pytestmark = pytest.mark.slow

MATRIX = {
    "gfx90a": "v_mfma_f32_32x32x8f16",
    "gfx942": "v_mfma_f32_32x32x8_f16",
    "gfx950": "v_mfma_f32_32x32x16_f16",
    "gfx1100": "v_wmma_f32_16x16x16_f16",
    "gfx1201": "v_wmma_f32_16x16x16_f16",
}
BEST = {
    "dtype_a": "fp16", "layout": "rcr", "pipeline": "compv4", "scheduler": "intrawave", "epilogue": "default",
    "tile": [256, 224, 32], "wave": [4, 1, 1], "warp_tile": [32, 32, 16],
}  # fmt: skip
"""16 by 19 tiles of 4096 x 4096: one for each of 304 compute units."""


def product_problem(m: int, n: int, k: int, tile: tuple[int, int, int]) -> Problem:
    product = Product(m, n, k, 1, DType.FP16, DType.FP16, 2 * (m + n) * k, 2 * m * n)
    share = tile_share(product, tile)
    return Problem(product, share, share.slices)


def changed(problem: Problem, **fields: Any) -> Problem:
    return replace(problem, share=replace(problem.share, **fields))


@pytest.fixture(scope="module")
def best(operation: Operation[Any, Any], toolchain: HipToolchain) -> Finding:
    config = operation.config_type.from_dict(BEST)
    return analyze_config(operation, config, tilewright_arch.load("gfx942"), toolchain)


@pytest.mark.parametrize("name", MATRIX)
def test_a_main_loop_multiplies_whole_steps_of_its_tile(
    name: str, operation: Operation[Any, Any], toolchain: HipToolchain
) -> None:
    arch = tilewright_arch.load(name)
    config = next(
        item
        for item in operation.kernel_sets["essential"].iterate(arch, operation.rules)
        if item.to_dict()["tile"][:2] == [128, 128] and item.name.startswith("gemm_fp16_rcr_compv4")
    )
    found = analyze_config(operation, config, arch, toolchain)
    cost, tile = found.analysis.cost, config.to_dict()["tile"]
    assert list(cost.matrix_mnemonics) == [MATRIX[name]]
    assert cost.flops * found.analysis.waves % (2 * tile[0] * tile[1] * tile[2]) == 0
    assert found.analysis.kernel.vgpr_spills == 0
    assert found.analysis.occupancy.workgroups >= 1
    # What a step needs of A and B is loaded once by the workgroup, and stored to LDS once or not at all.
    steps = cost.flops * found.analysis.waves / (2 * tile[0] * tile[1] * tile[2])
    rates = arch.rates
    assert rates is not None
    assert (
        cost.global_ * rates.global_bytes_per_cycle * found.analysis.waves == (tile[0] + tile[1]) * tile[2] * 2 * steps
    )
    assert 0.2 < found.bound.share_of_peak <= 1
    assert json.loads(json.dumps(summary(found)))["bound"]["share_of_peak"] == round(found.bound.share_of_peak, 4)


@pytest.mark.parametrize("name", ["gfx1100", "gfx1201"])
def test_a_kernel_of_the_vector_unit_has_a_bound_too(
    name: str, operation: Operation[Any, Any], toolchain: HipToolchain
) -> None:
    arch = tilewright_arch.load(name)
    config = next(
        item
        for item in operation.kernel_sets["essential"].iterate(arch, operation.rules)
        if item.name.startswith("gemm_fp32_rcr")
    )
    found = analyze_config(operation, config, arch, toolchain)
    assert found.analysis.cost.matrix_mnemonics == {}
    assert found.analysis.cost.flops > 0
    assert 0.1 < found.bound.share_of_peak <= 1


def test_the_best_kernel_for_gfx942_can_reach_85_percent_of_the_peak(best: Finding) -> None:
    assert best.analysis.kernel.vgprs <= 512
    assert best.analysis.matrix_share >= 0.95
    assert best.bound.units_used == 1
    assert best.bound.share_of_peak >= 0.85


def test_its_matrix_instructions_stand_back_to_back(best: Finding) -> None:
    """The matrix unit idles for less than a fiftieth of an iteration, even if all waves reach for LDS together."""
    matrix = best.analysis.cost.matrix
    assert best.analysis.cost.alone <= 1.02 * matrix
    assert best.analysis.in_step <= 1.05 * matrix


def test_the_bound_follows_the_problem(best: Finding) -> None:
    found, problem = best.analysis, best.problem
    base = bound_of(found, problem)
    share = problem.share
    longer = bound_of(found, changed(problem, flops=2 * share.flops, useful_flops=2 * share.useful_flops))
    assert longer.parts["loop"] == pytest.approx(2 * base.parts["loop"])
    assert longer.share_of_peak > base.share_of_peak
    # One tile more than there are units: one of them has two.
    more = bound_of(found, replace(changed(problem, slices=305), workgroups=305))
    assert more.parts["loop"] == pytest.approx(2 * base.parts["loop"])
    assert more.units_used == pytest.approx(305 / 608)
    tiny = bound_of(found, changed(problem, flops=share.flops / 64, useful_flops=share.useful_flops / 64))
    assert tiny.seconds >= tiny.parts["memory"]


def test_no_bound_exceeds_the_peak(best: Finding) -> None:
    for shape in ((4096, 4096, 4096), (256, 224, 64), (65536, 65408, 65536), (1, 1, 1), (4097, 4096, 8192)):
        m, n, k = shape
        problem = product_problem(m, n, k, (256, 224, 64))
        bound = bound_of(best.analysis, problem)
        assert 0 < bound.share_of_peak <= best.analysis.matrix_share
        assert 0 < bound.units_used <= 1
        assert 0 < bound.edge <= 1


def test_a_workgroup_that_needs_more_lds_than_there_is_is_refused(
    operation: Operation[Any, Any], toolchain: HipToolchain, tmp_path: Path
) -> None:
    arch = tilewright_arch.load("gfx942")
    unit = operation.generate(operation.config_type.from_dict(BEST), arch)
    image = toolchain.compile(unit, tmp_path, arch).binary.read_bytes()
    with pytest.raises(UnsupportedError, match="too little LDS"):
        analyze(image, arch, waves=4, lds_bytes=65537)


def test_residency_can_be_asked_for(operation: Operation[Any, Any], toolchain: HipToolchain) -> None:
    arch = tilewright_arch.load("gfx942")
    config = operation.config_type.from_dict({**BEST, "tile": [64, 64, 64], "wave": [2, 2, 1]})
    one = analyze_config(operation, config, arch, toolchain, resident=1).analysis
    all_of_them = analyze_config(operation, config, arch, toolchain).analysis
    assert (one.resident, all_of_them.resident) == (1, all_of_them.occupancy.workgroups)
    assert all_of_them.resident > 1
    assert all_of_them.cycles["matrix"] == all_of_them.resident * one.cycles["matrix"]
    assert all_of_them.matrix_share >= one.matrix_share


@pytest.mark.parametrize("name", ["attention", "attention_backward"])
@pytest.mark.extended
def test_kernels_of_attention_are_analysed_whole(name: str, toolchain: HipToolchain) -> None:
    """One turn of the loop over blocks has both products of a block (of gradients all five) and what is between."""
    arch, operation = tilewright_arch.load("gfx942"), load_operation(name)
    config = next(
        item
        for item in operation.kernel_sets["essential"].iterate(arch, operation.rules)
        if item.to_dict()["family"] in ("fwd", "bwd_dq_dk_dv") and item.to_dict()["dtype"] != "fp32"
    )
    found = analyze_config(operation, config, arch, toolchain)
    assert found.analysis.waves == math.prod(config.to_dict()["wave"][:3])  # of this kernel, not of the plan's last
    assert found.analysis.cost.flops * found.analysis.waves == found.problem.share.turn_flops
    assert found.analysis.cost.global_ and found.analysis.cost.counts["vector"]
    assert 0 < found.bound.share_of_peak <= found.analysis.matrix_share
    assert json.loads(json.dumps(summary(found)))["problem"]["dtype"] == found.problem.product.dtype.value


@pytest.mark.parametrize("name", ["attention", "attention_backward"])
def test_a_loop_that_has_a_whole_turn_is_not_left_for_the_one_around(name: str, toolchain: HipToolchain) -> None:
    """Of the loops v3, one goes round for each block of the other side, and gradients have another around it."""
    arch, operation = tilewright_arch.load("gfx950"), load_operation(name)
    config = next(
        item
        for item in operation.kernel_sets["default"].iterate(arch, operation.rules)
        if item.to_dict()["pipeline"] == "v3" and item.to_dict()["hdim"] == [128, 128]
    )
    found = analyze_config(operation, config, arch, toolchain)
    assert found.analysis.cost.flops * found.analysis.waves in (
        found.problem.share.turn_flops,
        2 * found.problem.share.turn_flops,  # two blocks, each with LDS of its own
    )
    assert found.bound.share_of_peak > 0.5


def test_turns_that_a_mask_cuts_count_with_the_loop_that_they_take(toolchain: HipToolchain) -> None:
    """A causal mask over 4096 queries and keys in blocks of 32 and 128 cuts 4 of 66 blocks in a column on average."""
    arch, operation = tilewright_arch.load("gfx950"), load_operation("attention_backward")
    config = next(
        item
        for item in operation.kernel_sets["default"].iterate(arch, operation.rules)
        if item.to_dict()["pipeline"] == "v3" and item.to_dict()["mask"] == "causal"
    )
    found = analyze_config(operation, config, arch, toolchain, shape="1,8,8,4096,4096,128,128")
    share = found.problem.share
    assert share.cut == pytest.approx(4 / 66)
    assert found.analysis.cut.flops == found.analysis.cost.flops
    assert found.analysis.cut.counts["vector"] > found.analysis.cost.counts["vector"]
    none, every = (
        bound_of(found.analysis, replace(found.problem, share=replace(share, cut=cut))).parts["loop"] for cut in (0, 1)
    )
    assert none < found.bound.parts["loop"] < every
    assert found.bound.parts["loop"] == pytest.approx(none + (every - none) * share.cut)


def test_what_cannot_be_analysed_is_refused(operation: Operation[Any, Any], toolchain: HipToolchain) -> None:
    arch = tilewright_arch.load("gfx942")
    with pytest.raises(NotFoundError) as missing:
        named_config(operation, arch, "gemm_nonsense")
    assert missing.value.rule == "kernel_name"
    config = operation.config_type.from_dict(BEST)
    with pytest.raises(UnsupportedError, match="only those of AMD GPUs"):
        analyze_config(operation, config, tilewright_arch.load("sm_90a"), toolchain)
    with pytest.raises(UnsupportedError, match="states no rates"):
        analyze(b"", replace(arch, rates=None), waves=4)


def test_a_kernel_without_a_loop_is_refused(toolchain: HipToolchain, tmp_path: Path) -> None:
    text = 'extern "C" __attribute__((global)) void nothing(int* x) { *x = 1; }'
    unit = SourceUnit(name="n", language="hip", text=text, entries={"main": "nothing"}, plugin_version="1")
    arch = tilewright_arch.load("gfx942")
    image = toolchain.compile(unit, tmp_path, arch).binary.read_bytes()
    with pytest.raises(UnsupportedError, match="no loop that multiplies"):
        analyze(image, arch, waves=4)
