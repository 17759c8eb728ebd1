"""Kernel sets: Composable Kernel's names and counts, which of their kernels never were valid, and what the
generator selects.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_gemm.codegen import generate
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.kernel_sets.preselected import DEFAULT_KERNEL, ORIGINALS, REFERENCE_ARCH, REFUSED, mended
from tilewright_gemm.kernel_sets.sweeps import SWEEPS
from tilewright_gemm.pipelines.generator import select_set
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS, PACK_B_SETS, SPACES
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.vocabulary import LAYOUTS
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError

COUNTS = {
    "fp16_rcr_compute": 7,
    "fp16_rcr_memory": 8,
    "fp16_rcr_latency": 2,
    "fp16_rcr_multi_d": 8,
    "fp16_rcr_preshuffle": 2,
    "fp16_rcr_all": 27,
    "fp16_rcr_essential": 6,
    "bf16_rcr_essential": 2,
    "int8_rcr_essential": 2,
    "fp8_rcr_essential": 2,
    "mixed_precision": 2,
    "default_kernel": 1,
}
ARCH = tilewright_arch.load(REFERENCE_ARCH)


def test_originals_are_as_many_as_the_seeds_say() -> None:
    assert {name: len(configs) for name, configs in ORIGINALS.items()} == COUNTS
    assert set(KERNEL_SETS) == {"default", "essential", "block_scaled", "int4", *COUNTS}


def test_refused_originals_are_exactly_those_that_the_rules_refuse() -> None:
    computed: dict[str, dict[int, tuple[str, ...]]] = {}
    for name, configs in ORIGINALS.items():
        if name in ("fp16_rcr_all", "fp16_rcr_essential"):
            continue
        for place, config in enumerate(configs):
            broken = tuple(violation.rule for violation in RULES.check(config, ARCH))
            if broken:
                computed.setdefault(name, {})[place] = broken
    assert computed == REFUSED


@pytest.mark.parametrize("name", COUNTS)
def test_mended_kernels_are_what_correction_makes_of_the_originals(name: str) -> None:
    for config in ORIGINALS[name]:
        corrected = RULES.correct(config, ARCH)
        assert corrected.is_valid
        assert corrected.config.replace(block_size=0) == mended(config)
    kernels = KERNEL_SETS[name].expand(ARCH, RULES, strict=True)
    assert set(kernels) == {mended(config) for config in ORIGINALS[name]}


def test_the_default_kernel_is_valid_as_it_stands() -> None:
    assert RULES.allows(DEFAULT_KERNEL, ARCH)


@pytest.mark.some(2)
def test_the_default_set_has_kernels_for_every_type_of_every_arch(arch: ArchSpec) -> None:
    kernels = KERNEL_SETS["default"].expand(arch, RULES)
    wanted = {dtype for dtype in DType if dtype != DType.INT32 and arch.acc_dtype(dtype.value, dtype.value)}
    assert {config.dtype_a for config in kernels} == wanted
    assert all(RULES.allows(config, arch) for config in kernels[::17])
    if arch.kind == "cuda":
        assert not KERNEL_SETS["default"].rejected(arch, RULES) or arch.acc_dtype("fp8", "fp8") is None
        assert {"standard", "batched", "grouped", "multi_d"} <= {config.variant for config in kernels}
        assert {config.pipeline for config in kernels} == set(arch.pipelines)
        assert {(config.a, config.layout) for config in kernels} >= {
            (dtype.value, layout) for dtype in wanted for layout in ("rcr", "rrr", "crr", "ccr")
        }
    if arch.kind == "cpu":
        assert {"standard", "preshuffle", "batched", "grouped", "multi_d"} <= {config.variant for config in kernels}
        assert {config.pipeline for config in kernels} == set(arch.pipelines)
        assert PACK_B_SETS["default"].expand(arch, RULES)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_the_default_sets_of_amd_gpus_have_every_layout_alike(name: str) -> None:
    arch = tilewright_arch.load(name)
    counts: dict[str, Counter[str]] = {}
    for config in KERNEL_SETS["default"].expand(arch, RULES):
        if config.variant == "standard" and config.pipeline != "comp_async":
            counts.setdefault(f"{config.a} {config.b}", Counter())[config.layout] += 1
    for pair, layouts in counts.items():
        assert set(layouts) == set(LAYOUTS), (pair, layouts)
        assert max(layouts.values()) <= 2 * min(layouts.values()), (pair, layouts)


@pytest.mark.extended
def test_sweeps_cover_the_variants_of_the_generator() -> None:
    assert set(SWEEPS) == {"standard", "preshuffle", "multi_d", "batched", "grouped", "stream_k"}
    assert set(SPACES) == {"tune_hopper", "sweep_hopper", *(f"sweep_{name}" for name in SWEEPS)}
    kernels = select_set(tilewright_arch.load("gfx1100"), ["bf16"], ["rrr"], ["standard"])
    assert kernels and {(config.a, config.layout, config.variant) for config in kernels} == {
        ("bf16", "rrr", "standard")
    }
    assert len(set(kernels)) == len(kernels)


def test_a_tile_configuration_is_read_flat_or_in_sections() -> None:
    flat: dict[str, Any] = {
        "tile_m": [128, 256], "tile_n": 128, "tile_k": 32, "warp_m": 2, "warp_n": 2, "warp_k": 1,
        "warp_tile_m": 32, "warp_tile_n": 32, "warp_tile_k": 16, "pipeline": ["compv3", "compv4"],
    }  # fmt: skip
    found = select_set(ARCH, tile_config=flat)
    assert [(config.tile, config.pipeline) for config in found] == [
        ((128, 128, 32), "compv3"),
        ((128, 128, 32), "compv4"),
        ((256, 128, 32), "compv3"),
        ((256, 128, 32), "compv4"),
    ]
    assert not found[0].pad_m and not found[0].persistent and found[0].wave == (2, 2, 1)
    sections = {
        "tile_config": {key: value for key, value in flat.items() if key != "pipeline"},
        "trait_config": {"pipeline": ["compv3", "compv4"]},
    }
    assert select_set(ARCH, tile_config=sections) == found
    multi_d = {"multi_d_config": {"elementwise_ops": ["MultiDAdd"], "num_d_tensors": [1, 2]}} | flat
    assert len(select_set(ARCH, variants=["multi_d"], tile_config=multi_d)) == 8


def test_what_the_generator_cannot_do_it_says() -> None:
    with pytest.raises(NotFoundError):
        select_set(ARCH, preselected="no_such_set")
    with pytest.raises(NotFoundError):
        select_set(ARCH, variants=["no_such_variant"])
    with pytest.raises(InvalidArgumentError):
        select_set(ARCH, tile_config={"tile_q": 1})
    with pytest.raises(InvalidArgumentError):
        select_set(ARCH, datatypes=["fp99"], tile_config={"tile_m": 128})


def test_units_of_a_preselected_set_are_for_the_arch() -> None:
    (unit,) = (generate(config, ARCH) for config in select_set(ARCH, preselected="default_kernel"))
    assert unit.language == "hip" and unit.name == DEFAULT_KERNEL.name and list(unit.entries) == ["main"]


def test_units_of_a_cpu_set_are_distinct() -> None:
    arch = tilewright_arch.load("x86-64-v3")
    units = [generate(config, arch) for config in select_set(arch, datatypes=["fp32", "bf16"], layouts=["rcr"])]
    assert len({unit.name for unit in units}) == len(units) == len({unit.text for unit in units}) > 20
    assert all(isinstance(unit.text, str) and "$" not in unit.text for unit in units)


def test_config_type_is_the_operations_own() -> None:
    assert all(declaration.config_type is GemmConfig for kernels in KERNEL_SETS.values() for declaration in kernels)
