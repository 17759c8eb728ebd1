"""Units of CUDA kernels: every kernel has one, it states the configuration, and the headers agree with it."""

from __future__ import annotations

import functools
import re

import pytest
from cuda_units import HAVE_NVRTC, WITHOUT_NVRTC, compile_text, statement_of

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_gemm.codegen import generate, render_gpu
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS, PACK_B_SETS, SPACES
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.vocabulary import Reduction
from tilewright_kit.tiles.footprint.workgroup import is_specialised, shared_bytes, stages_of, threads_of
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import ConfigInvalidError, UnsupportedError

CUDA = ("sm_80", "sm_90a")
HEADERS = ("tilewright/gpu/gemm/gemm.hpp",)
SM90_HEADERS = ("tilewright/sm90/gemm/plan.hpp",)
DECODE = GemmConfig(
    dtype_a=DType.FP8,
    dtype_c="bf16",
    pipeline="ws",
    scheduler="cooperative",
    tile=(16, 128, 128),
    wave=(1, 2, 1),
    warp_tile=(16, 64, 32),
    split_k=4,
    transpose_c=True,
    cluster=(1, 2, 1),
    promote=8,
    stages=6,
)


def kernels(name: str) -> tuple[tuple[GemmConfig, ...], ArchSpec]:
    arch = tilewright_arch.load(name)
    return KERNEL_SETS["default"].expand(arch, RULES), arch


@functools.cache
def swept() -> tuple[GemmConfig, ...]:
    """All of Hopper's space: making it takes longer than all that is done with it here."""
    return tuple(SPACES["sweep_hopper"].iterate(tilewright_arch.load("sm_90a"), RULES))


@pytest.mark.parametrize("name", CUDA)
def test_every_kernel_of_the_default_set_has_a_unit_of_its_own(name: str) -> None:
    configs, arch = kernels(name)
    units = [generate(config, arch) for config in configs]
    assert len({unit.text for unit in units}) == len({unit.name for unit in units}) == len(units) >= 100
    for config, unit in zip(configs, units, strict=True):
        assert unit.language == "cuda" and list(unit.entries) == ["main"]
        assert "$" not in unit.text and "auto" not in unit.text.partition("struct Config")[2]
        header = "sm90" if is_specialised(config, arch) else "gpu"
        assert f'#include "tilewright/{header}/gemm/gemm.hpp"' in unit.text
        assert unit.text.rstrip().endswith(f"TW_GEMM_KERNEL({unit.entries['main']}, Config)")


def test_a_unit_states_every_constant() -> None:
    text = generate(DECODE, tilewright_arch.load("sm_90a")).text
    for line in (
        "using A = tw::fp8;",
        "using C = tw::bf16;",
        "using Bias = void;",
        "bool a_col = false, b_col = true;",
        "tile_m = 16, tile_n = 128, tile_k = 128;",
        "wave_m = 1, wave_n = 2, wave_k = 1;",
        "warp_tile_m = 16, warp_tile_n = 64, warp_tile_k = 32;",
        "pipeline = tw::Pipeline::ws;",
        "scheduler = tw::Scheduler::cooperative;",
        "epilogue = tw::EpilogueKind::cshuffle;",
        "reduction = tw::Reduction::none;",
        "persistent = false, grouped = false, batched = false;",
        "transpose_c = true, preshuffle = false, double_buffer = true;",
        "split_k = 4, stages = 6, promote = 8;",
        "cluster_m = 1, cluster_n = 2, cluster_k = 1;",
        "num_wave_groups = 1;",
    ):
        assert line in text, line


def test_stages_that_are_left_open_are_stated_as_a_number() -> None:
    arch = tilewright_arch.load("sm_90a")
    config = DECODE.replace(stages=0)
    stages = stages_of(config, arch)
    assert stages > 2 and f"stages = {stages}," in generate(config, arch).text


def test_what_cannot_be_built_is_refused_with_a_reason() -> None:
    hopper, ampere = (tilewright_arch.load(name) for name in ("sm_90a", "sm_80"))
    with pytest.raises(ConfigInvalidError) as caught:
        generate(DECODE, ampere)
    assert caught.value.rule == "dtype_pair"
    with pytest.raises(ConfigInvalidError) as invalid:
        generate(DECODE.replace(reduction=Reduction.LINEAR), hopper)
    assert invalid.value.rule == "one_work_distribution"
    with pytest.raises(UnsupportedError) as packing:
        generate(PackBConfig(**DECODE.replace(split_k=1).__dict__), hopper)
    assert packing.value.rule == "template"
    assert not PACK_B_SETS["default"].expand(hopper, RULES)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.extended
def test_the_sweep_holds_what_the_default_set_uses_of_the_ws_pipeline() -> None:
    arch = tilewright_arch.load("sm_90a")
    spaces = set()
    for config in swept():
        spaces.add((config.tile, config.wave, config.cluster, config.scheduler, config.transpose_c, config.a))
        assert re.search("_ws_", config.name)
    assert {size for tile, *_ in spaces for size in tile} >= {8, 24, 48, 80, 96, 112, 144, 160, 192, 224, 240, 256}
    assert {cluster for _, _, cluster, *_ in spaces} == {c for c in arch.pipeline("ws").clusters if c[2] == 1}
    plain = [item for item in KERNEL_SETS["default"].expand(arch, RULES) if item.pipeline == "ws" and item.a == "fp16"]
    shapes = {(c.tile, c.wave, (*c.cluster[:2], 1), c.scheduler, c.transpose_c, c.a) for c in plain}
    assert shapes <= spaces


def test_the_space_for_a_first_tuning_can_be_measured_in_one_go() -> None:
    arch = tilewright_arch.load("sm_90a")

    few = list(SPACES["tune_hopper"].iterate(arch, RULES))
    assert 500 < len(few) < 2500 and {config.split_k for config in few} == {1, 2, 3, 4, 8}
    assert {config.cluster[2] for config in few} == {1, 2, 3, 4, 8}
    assert {config.promote for config in few if config.a == "fp16"} == {0}


# ---- what the headers compute for themselves ----


@pytest.mark.skipif(not HAVE_NVRTC, reason=WITHOUT_NVRTC)
@pytest.mark.parametrize(("name", "ws"), [("sm_80", False), ("sm_90a", False), ("sm_90a", True)])
@pytest.mark.some(1)
@pytest.mark.extended
def test_shared_memory_and_threads_are_what_the_kernels_state(name: str, ws: bool) -> None:
    configs, arch = kernels(name)
    chosen = [config for config in configs if is_specialised(config, arch) == ws]
    if ws:
        chosen = [*chosen[::3], *swept()[::400]]
    parts = []
    for number, config in enumerate(chosen):
        stages = stages_of(config, arch) if ws or config.pipeline != "compv3" else 1
        expected = (
            f'static_assert(Kernel::shared_bytes == {shared_bytes(config, arch)}, "shared_bytes of {config.name}");\n'
            f'static_assert(Kernel::threads == {threads_of(config, arch)}, "threads of {config.name}");\n'
            f'static_assert({"Kernel" if ws else "Kernel::Loop"}::stages == {stages}, "stages of {config.name}");'
        )
        parts.append(statement_of(config, arch, number, expected))
    assert len(parts) > 50
    log = compile_text("\n".join(parts), arch, SM90_HEADERS if ws else HEADERS)
    assert log == "", log[:3000]


@pytest.mark.skipif(not HAVE_NVRTC, reason=WITHOUT_NVRTC)
def test_the_comparison_with_the_headers_can_fail() -> None:
    arch = tilewright_arch.load("sm_90a")
    wrong = statement_of(DECODE, arch, 0, 'static_assert(Kernel::shared_bytes == 1, "planted");')
    assert "planted" in compile_text(wrong, arch, SM90_HEADERS)


def test_units_of_the_same_kernel_are_equal() -> None:
    arch = tilewright_arch.load("sm_90a")
    assert render_gpu(DECODE, arch) == render_gpu(DECODE.replace(), arch)
