"""Rules of CUDA devices: each says what is wrong, and what it asks for mends it; what has no template is refused."""

from __future__ import annotations

import pytest
from conv_rule_cases import CUDA, CUDA_CASES, CUDA_WEIGHT, Case, depthwise, judge

import tilewright_arch
from tilewright_grouped_conv.rules.cuda import blocks_that_fit, deduced_blocks
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.tiles.footprint.workgroup import registers_of, shared_bytes, threads_of
from tilewright_kit.types.vocabulary import Switch


@pytest.mark.parametrize("case", CUDA_CASES, ids=str)
def test_each_rule_of_cuda_devices_speaks_when_it_is_broken_and_mends(case: Case) -> None:
    judge(case)


@pytest.mark.parametrize("name", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("pipeline", ["compv3", "compv4"])
def test_all_directions_take_all_portable_pipelines(name: str, pipeline: str) -> None:
    arch = tilewright_arch.load(name)
    for config in (CUDA, CUDA_WEIGHT):
        assert RULES.check(config.replace(pipeline=pipeline), arch) == ()


def test_shared_memory_has_no_room_for_lines_that_begin_anywhere() -> None:
    # A gather reads whole vectors: what GEMM keeps for the first bytes of unaligned lines is not needed.
    arch = tilewright_arch.load("sm_90a")
    four = CUDA.replace(stages=4)
    assert shared_bytes(four, arch) == 4 * (128 + 128) * 32 * 2 + 16


def test_a_unit_holds_as_many_workgroups_as_its_registers_and_memory_allow() -> None:
    arch = tilewright_arch.load("sm_90a")
    config = CUDA.replace(stages=2)
    fitting = blocks_that_fit(config, arch)
    assert fitting >= 2
    assert fitting * shared_bytes(config, arch) <= arch.lds_bytes
    assert fitting * threads_of(config, arch) * registers_of(config, arch) <= arch.register_file
    assert RULES.check(config.replace(block_per_cu=fitting), arch) == ()
    assert {item.rule for item in RULES.check(config.replace(block_per_cu=fitting + 1), arch)} == {"block_per_cu"}


def test_workgroups_of_a_unit_are_deduced_as_the_seeds_do() -> None:
    assert deduced_blocks(CUDA) == 1
    assert deduced_blocks(CUDA.replace(pipeline="compv3")) == 2
    assert deduced_blocks(CUDA.replace(pipeline="mem", double_smem_buffer=Switch.ON)) == 1


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("layout", ["nhwgc", "ngchw"])
def test_depthwise_kernels_read_both_orders(direction: Direction, layout: str) -> None:
    width = 8 if layout == "nhwgc" else 1
    config = depthwise(direction, layout=layout, vector_sizes=(width, width, width))
    assert RULES.check(config, tilewright_arch.load("sm_90a")) == ()
