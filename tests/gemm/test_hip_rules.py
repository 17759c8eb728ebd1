"""Rules of AMD GPUs: each says what is wrong, and what it asks for mends it; what has no template is dropped."""

from __future__ import annotations

from typing import Any

import pytest
from hip_cases import pipelines_of
from hip_units import HIP_ARCHS

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.cost.hip import resident_of
from tilewright_gemm.kernel_sets.sweeps import SWEEPS
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.vocabulary import LAYOUTS, Epilogue, Reduction
from tilewright_kit.tiles.footprint.workgroup import registers_of, shared_bytes, stages_of, threads_of
from tilewright_kit.types.dtypes import DType

COMPUTE = GemmConfig()
PACKED = COMPUTE.replace(pipeline="preshufflev2", preshuffle=True, scheduler="default")
DECODE = COMPUTE.replace(pipeline="mem", tile=(16, 64, 64), wave=(1, 4, 1), warp_tile=(16, 16, 32))
RDNA = COMPUTE.replace(wave=(2, 4, 1), warp_tile=(16, 16, 16))
FP32 = RDNA.replace(dtype_a=DType.FP32, tile=(128, 128, 16), warp_tile=(16, 8, 4))


@pytest.fixture(scope="module")
def cdna() -> ArchSpec:
    return tilewright_arch.load("gfx942")


@pytest.mark.parametrize("config", [COMPUTE, PACKED, DECODE], ids=lambda config: config.name)
def test_what_the_cases_begin_with_is_valid(config: GemmConfig, cdna: ArchSpec) -> None:
    assert RULES.check(config, cdna) == ()


@pytest.mark.parametrize("name", ["gfx1100", "gfx1201"])
@pytest.mark.parametrize("config", [RDNA, FP32], ids=lambda config: config.name)
def test_waves_of_32_have_kernels_of_their_own(config: GemmConfig, name: str, cdna: ArchSpec) -> None:
    assert RULES.check(config, tilewright_arch.load(name)) == ()
    broken = {violation.rule for violation in RULES.check(config, cdna)}
    assert {"wave_table", "warp_tile_table"} & broken


CASES: list[tuple[str, GemmConfig, dict[str, Any]]] = [
    ("gpu_waves", COMPUTE, {"wave": (2, 1, 2)}),
    ("stream_k", COMPUTE, {"reduction": Reduction.LINEAR}),
    ("stream_k", COMPUTE, {"reduction": Reduction.ATOMIC}),
    ("wave_groups", COMPUTE, {"num_wave_groups": 2}),
    ("transposed_fragments", COMPUTE, {"transpose_c": True}),
    ("pipeline", COMPUTE, {"pipeline": "compv6"}),
    ("trait", COMPUTE, {"pipeline": "compv3", "scheduler": "interwave"}),
    ("stage_count", DECODE, {"stages": 9}),
    ("stage_count", COMPUTE, {"stages": 3}),
    ("shared_memory", COMPUTE, {"tile": (256, 256, 32), "wave": (4, 4, 1)}),
    ("accumulators_fit_registers", COMPUTE, {"tile": (512, 256, 32)}),
    ("accumulators_fit_registers", COMPUTE, {"tile": (256, 256, 32), "wave": (1, 1, 1)}),
    ("accumulators_fit_registers", PACKED, {"tile": (64, 256, 64), "wave": (1, 1, 1), "warp_tile": (64, 4, 16)}),
    ("wave_table", COMPUTE, {"wave": (8, 2, 1)}),
    ("warp_tile_table", COMPUTE, {"warp_tile": (16, 16, 4)}),
    ("cluster", COMPUTE, {"cluster": (2, 1, 1)}),
    ("promotion", COMPUTE, {"promote": 4}),
    ("workgroup_threads", COMPUTE, {"block_size": 512}),
]


@pytest.mark.parametrize(("rule", "base", "changes"), CASES)
def test_each_rule_speaks_when_it_is_broken_and_what_it_asks_for_mends_it(
    rule: str, base: GemmConfig, changes: dict[str, Any], cdna: ArchSpec
) -> None:
    broken = base.replace(**changes)
    found = {violation.rule: violation for violation in RULES.check(broken, cdna)}
    assert rule in found and found[rule].reason
    mended = broken.replace(**found[rule].fix)
    assert mended != broken
    left = {(item.rule, item.field) for item in RULES.check(mended, cdna)}
    assert (rule, found[rule].field) not in left or rule == "accumulators_fit_registers"
    assert RULES.correct(broken, cdna).is_valid


def test_registers_are_shared_by_the_waves_of_a_simd() -> None:
    wide = tilewright_arch.load("gfx950")
    few, many = COMPUTE.replace(tile=(256, 256, 32)), COMPUTE.replace(tile=(256, 256, 32), wave=(4, 4, 1))
    assert (threads_of(few, wide), wide.registers_per_thread(threads_of(few, wide))) == (256, 512)
    assert (threads_of(many, wide), wide.registers_per_thread(threads_of(many, wide))) == (1024, 128)
    assert registers_of(few, wide) > 256 > registers_of(many, wide)


@pytest.mark.parametrize(
    ("config", "stages", "nbytes"),
    [
        (COMPUTE.replace(epilogue=Epilogue.DEFAULT), 2, 2 * 256 * 32 * 2),
        (COMPUTE.replace(pipeline="compv3"), 1, 4 * 32 * 72 * 4),  # strips of 32 rows and 64 columns for each wave
        (COMPUTE.replace(pipeline="compv3", epilogue=Epilogue.DEFAULT), 1, 256 * 32 * 2),
        (PACKED.replace(epilogue=Epilogue.DEFAULT), 2, 2 * 128 * 32 * 2),
        # 256 threads write 32 lines of A, of which the tile has 16.
        (DECODE, 4, (32 + 64) * 64 * 2),
        (COMPUTE.replace(tile=(256, 256, 32)), 2, 65536),
    ],
    ids=lambda value: value.name if isinstance(value, GemmConfig) else "",
)
def test_lds_is_tiles_or_strips(config: GemmConfig, stages: int, nbytes: int, cdna: ArchSpec) -> None:
    assert (stages_of(config, cdna), shared_bytes(config, cdna)) == (stages, nbytes)


def test_workgroups_of_a_unit_are_as_many_as_lds_and_registers_allow(cdna: ArchSpec) -> None:
    assert resident_of(COMPUTE.replace(tile=(256, 256, 32)), cdna) == 1
    assert resident_of(COMPUTE.replace(epilogue=Epilogue.DEFAULT), cdna) == 2  # 32 KiB of 64
    assert resident_of(DECODE, cdna) == 5


@pytest.mark.parametrize("name", HIP_ARCHS)
def test_the_essential_set_is_small_and_holds_every_kind_of_kernel(name: str) -> None:
    arch = tilewright_arch.load(name)
    kernels = KERNEL_SETS["essential"].expand(arch, RULES, strict=True)
    assert 20 <= len(kernels) <= 60
    assert not [config.name for config, _ in KERNEL_SETS["essential"].rejected(arch, RULES)]
    assert {config.table_key for config in kernels} == set(arch.warp_tiles)
    assert {config.pipeline for config in kernels} == set(pipelines_of(arch))
    assert {config.layout for config in kernels} == set(LAYOUTS)
    assert {config.epilogue.value for config in kernels} == {"cshuffle", "default"}
    assert {config.scheduler for config in kernels} >= {"intrawave", "interwave"}
    assert {"standard", "batched", "grouped", "multi_d"} <= {config.variant for config in kernels}
    assert any(config.split_k > 1 for config in kernels) and any(config.persistent for config in kernels)


@pytest.mark.extended
def test_sweeps_drop_what_no_template_computes(cdna: ArchSpec) -> None:
    stream = SWEEPS["stream_k"]
    assert not stream.expand(cdna, RULES)
    partial = GemmConfig(reduction=Reduction.LINEAR)
    (violation,) = (item for item in RULES.check(partial, cdna) if item.rule == "stream_k")
    assert "split_k" in violation.reason


@pytest.mark.parametrize(
    ("fields", "rule", "why"),
    [
        ({"pipeline": "compv5"}, "pipeline", "static bound"),
        ({"pipeline": "comp_v6"}, "pipeline", "static bound"),
        ({"pipeline": "wavelet"}, "pipeline", "static bound"),
        ({"pipeline": "basic_v1"}, "pipeline", "compv3"),
        ({"pipeline": "comp_tdm"}, "pipeline", "gfx1250"),
        ({"reduction": "linear"}, "stream_k", "split_k"),
        ({"structured_sparsity": True}, "structured_sparsity", "2:4"),
    ],
)
@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_forms_that_are_left_out_are_refused_with_the_reason(
    name: str, fields: dict[str, Any], rule: str, why: str
) -> None:
    arch = tilewright_arch.load(name)
    config = RULES.correct(GemmConfig(), arch).config.replace(
        **{key: GemmConfig.coerce(key, value) for key, value in fields.items()}
    )
    reasons = {item.rule: item.reason for item in RULES.check(config, arch)}
    assert why in reasons[rule]
    assert RULES.correct(config, arch).is_valid
