"""Rules of AMD GPUs, each names the violation, and its fix corrects it."""

from __future__ import annotations

import pytest
from conv_rule_cases import HIP, HIP_CASES, HIP_DATA, HIP_WEIGHT, RDNA, Case, judge

import tilewright_arch
from tilewright_grouped_conv.rules.rulebook import RULES

CDNA_ARCHS, RDNA_ARCHS = ("gfx90a", "gfx942", "gfx950"), ("gfx1100", "gfx1201")


@pytest.mark.parametrize("case", HIP_CASES, ids=str)
def test_each_rule_of_amd_gpus_speaks_when_it_is_broken_and_mends(case: Case) -> None:
    judge(case)


@pytest.mark.parametrize("name", CDNA_ARCHS)
def test_the_seeds_defaults_are_valid_on_waves_of_64(name: str) -> None:
    arch = tilewright_arch.load(name)
    for config in (HIP, HIP_DATA, HIP_WEIGHT):
        assert RULES.check(config, arch) == ()


@pytest.mark.parametrize("name", RDNA_ARCHS)
def test_waves_of_32_have_kernels_of_their_own(name: str) -> None:
    arch = tilewright_arch.load(name)
    assert RULES.check(RDNA, arch) == ()
    broken = {item.rule for item in RULES.check(HIP, arch)}
    assert {"wave_table", "warp_tile_table"} <= broken


@pytest.mark.parametrize("name", (*CDNA_ARCHS, *RDNA_ARCHS))
def test_gradients_leave_compv4_for_compv3(name: str) -> None:
    arch = tilewright_arch.load(name)
    correction = RULES.correct(HIP_DATA.replace(pipeline="compv4"), arch)
    assert correction.is_valid
    assert correction.config.pipeline == "compv3"


@pytest.mark.parametrize("name", (*CDNA_ARCHS, *RDNA_ARCHS))
def test_single_elements_are_gathered_whatever_the_tile(name: str) -> None:
    # The coverage of a wave is about vectors; a loop over elements has no such bound.
    arch = tilewright_arch.load(name)
    base = RULES.correct(HIP.replace(tile=(256, 128, 32)), arch).config
    assert RULES.check(base.replace(vector_sizes=(1, 1, 8)), arch) == ()


def test_tables_are_looked_up_with_the_accumulator_in_the_key() -> None:
    arch = tilewright_arch.load("gfx942")
    for tile in arch.warp_tiles_for("fp16_fp16_fp32", "compv4"):
        broken = {item.rule for item in RULES.check(HIP.replace(warp_tile=tile), arch)}
        assert "warp_tile_table" not in broken
