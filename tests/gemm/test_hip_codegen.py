"""Units of AMD kernels: every kernel has one, it states the configuration, and the headers agree with it."""

from __future__ import annotations

from typing import Any

import pytest
from hip_units import HAVE_HIP, HIP_ARCHS, WITHOUT_HIP, compile_text, statement_of

import tilewright_arch
from tilewright_gemm.codegen import generate
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.vocabulary import Epilogue
from tilewright_kit.tiles.footprint.workgroup import shared_bytes, threads_of
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import ConfigInvalidError

DECODE = GemmConfig(
    dtype_a=DType.FP8,
    dtype_b="bf8",
    dtype_c="bf16",
    pipeline="mem",
    scheduler="interwave",
    tile=(16, 64, 64),
    wave=(1, 4, 1),
    warp_tile=(16, 16, 32),
    split_k=4,
)


@pytest.mark.parametrize("name", HIP_ARCHS)
def test_every_kernel_of_the_default_set_has_a_unit_of_its_own(name: str) -> None:
    arch = tilewright_arch.load(name)
    units = [generate(config, arch) for config in KERNEL_SETS["default"].expand(arch, RULES)]
    assert len({unit.text for unit in units}) == len({unit.name for unit in units}) == len(units) >= 100
    for unit in units:
        assert unit.language == "hip" and list(unit.entries) == ["main"]
        assert "$" not in unit.text and '#include "tilewright/gpu/gemm/gemm.hpp"' in unit.text
        assert unit.text.rstrip().endswith(f"TW_GEMM_KERNEL({unit.entries['main']}, Config)")


def test_a_unit_states_every_constant() -> None:
    text = generate(DECODE, tilewright_arch.load("gfx942")).text
    for line in (
        "using A = tw::fp8;",
        "using B = tw::bf8;",
        "using C = tw::bf16;",
        "bool a_col = false, b_col = true;",
        "tile_m = 16, tile_n = 64, tile_k = 64;",
        "wave_m = 1, wave_n = 4, wave_k = 1;",
        "warp_tile_m = 16, warp_tile_n = 16, warp_tile_k = 32;",
        "pipeline = tw::Pipeline::mem;",
        "scheduler = tw::Scheduler::interwave;",
        "epilogue = tw::EpilogueKind::cshuffle;",
        "transpose_c = false, preshuffle = false, double_buffer = false;",
        "split_k = 4, stages = 4, promote = 0;",
    ):
        assert line in text, line


def test_words_that_are_keywords_of_the_language_have_another_spelling() -> None:
    config = GemmConfig(pipeline="preshufflev2", preshuffle=True, scheduler="default")
    text = generate(config, tilewright_arch.load("gfx942")).text
    assert "scheduler = tw::Scheduler::default_;" in text and "preshuffle = true, double_buffer = true;" in text


def test_kernels_of_another_wave_size_are_refused_before_anything_is_built() -> None:
    for config, name, rule in (
        (DECODE, "gfx1100", "dtype_pair"),
        (GemmConfig(), "gfx1201", "wave_table"),
        (GemmConfig(wave=(2, 4, 1), tile=(128, 128, 32), warp_tile=(16, 16, 16)), "gfx942", "wave_table"),
        (GemmConfig(wave=(4, 2, 1)), "gfx1100", "warp_tile_table"),
        (GemmConfig(block_size=128), "gfx942", "workgroup_threads"),
        (GemmConfig(pipeline="comp_async"), "gfx1100", "pipeline"),
        (GemmConfig(warp_tile=(16, 8, 16)), "gfx942", "warp_tile_table"),
    ):
        with pytest.raises(ConfigInvalidError) as caught:
            generate(config, tilewright_arch.load(name))
        assert rule in {violation.rule for violation in caught.value.violations}, config.name


@pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)
@pytest.mark.parametrize("name", HIP_ARCHS)
def test_lds_and_threads_are_what_the_kernels_state(name: str) -> None:
    arch = tilewright_arch.load(name)
    chosen = dict.fromkeys(KERNEL_SETS["essential"].expand(arch, RULES))
    chosen |= dict.fromkeys(KERNEL_SETS["default"].expand(arch, RULES)[::9])
    odd: dict[str, Any] = {"layout": "crr", "epilogue": Epilogue.DEFAULT}
    chosen |= {config: None for base in list(chosen) if RULES.allows(config := base.replace(**odd), arch)}
    parts = []
    for number, config in enumerate(chosen):
        expected = (
            f'static_assert(Kernel::shared_bytes == {shared_bytes(config, arch)}, "shared_bytes of {config.name}");\n'
            f'static_assert(Kernel::threads == {threads_of(config, arch)}, "threads of {config.name}");\n'
            f'static_assert(tw::gpu::kWave == {arch.wave_size}, "wave size");'
        )
        parts.append(statement_of(config, arch, number, expected))
    assert len(parts) > 50
    log = compile_text(parts, arch)
    assert log == "", log[:3000]


@pytest.mark.skipif(not HAVE_HIP, reason=WITHOUT_HIP)
def test_the_comparison_with_the_headers_can_fail() -> None:
    arch = tilewright_arch.load("gfx942")
    wrong = statement_of(DECODE, arch, 0, 'static_assert(Kernel::shared_bytes == 1, "planted");')
    assert "planted" in compile_text([wrong], arch)
