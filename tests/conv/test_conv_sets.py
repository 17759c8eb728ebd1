"""Kernel sets of convolution: what they hold on every arch, and what the generator's options select."""

from __future__ import annotations

from typing import Any

import pytest

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_grouped_conv.codegen import generate
from tilewright_grouped_conv.config.config import BULK_PIPELINE, CONFIGS, ConvConfig
from tilewright_grouped_conv.kernel_sets.generator import GENERATE_OPTIONS, select_set
from tilewright_grouped_conv.kernel_sets.sets import KERNEL_SETS, RULE_SETS
from tilewright_grouped_conv.kernel_sets.tile_table import COMPV4_TILES, TILES, table_fields
from tilewright_grouped_conv.plugin import ConvOperation
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import VARIANT_ALIASES, Direction, Kind, Specialization
from tilewright_kit.types.errors import ConfigInvalidError, InvalidArgumentError, NotFoundError

MOST = 80
"""Kernels of a default set, for an arch and a direction: who looks for one reads all names."""
TABLES_AND_RESOURCES = {
    "wave_table",
    "warp_tile_table",
    "workgroup_threads",
    "staging_budget",
    "accumulators_fit_registers",
    "shared_memory",
}
"""Rules by which an arch differs from the one that the default tile table was made for."""
MI = tilewright_arch.load("gfx942")
HOPPER = tilewright_arch.load("sm_90a")


@pytest.mark.parametrize("direction", Direction)
def test_every_arch_has_default_kernels_of_every_kind_of_its_own(arch: ArchSpec, direction: Direction) -> None:
    kernels = KERNEL_SETS[direction]["default"].expand(arch, RULES)
    assert 20 <= len(kernels) <= MOST
    assert {config.direction for config in kernels} == {direction}
    assert {config.ndim for config in kernels} == {1, 2, 3}
    kinds = {config.kind for config in kernels}
    assert {Kind.IMPLICIT, Kind.DEPTHWISE} <= kinds
    assert any(config.channels_first for config in kernels)
    assert {"fp32", "fp16", "bf16"} <= {config.a for config in kernels}
    if arch.kind == "cuda":
        assert {1, 2, 4, 8, 16, 32, 64} == {config.num_groups_to_merge for config in kernels}
        boxes = {config.num_groups_to_merge for config in kernels if config.pipeline == BULK_PIPELINE}
        has_boxes = arch.bulk_copy is not None and direction is not Direction.BACKWARD_WEIGHT
        assert boxes == ({2, 4, 8, 16, 32, 64} if has_boxes else set())
    if direction is Direction.BACKWARD_WEIGHT:
        assert any(config.split_k > 1 for config in kernels)
        assert any(config.two_stage for config in kernels) == (arch.kind != "cpu")


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", [name.replace("-", "_") for name in RULE_SETS])
@pytest.mark.some(20)
def test_rule_sets_have_valid_kernels_with_names_of_their_own(arch: ArchSpec, direction: Direction, name: str) -> None:
    kernels = KERNEL_SETS[direction][name].expand(arch, RULES)
    assert len({config.name for config in kernels}) == len(kernels)
    assert all(RULES.allows(config, arch) for config in kernels)
    # Waves of 32 have no row of the default tile table.
    assert kernels or (name == "profiler" and arch.kind == "hip" and arch.wave_size == 32)


@pytest.mark.extended
def test_no_two_kernels_of_any_set_and_arch_share_a_name() -> None:
    seen: dict[str, ConvConfig] = {}
    for name in tilewright_arch.names():
        arch = tilewright_arch.load(name)
        for sets in KERNEL_SETS.values():
            for kernels in sets.values():
                for config in kernels.expand(arch, RULES):
                    assert seen.setdefault(config.name, config) == config
    assert len(seen) > 2000


@pytest.mark.parametrize("direction", Direction)
def test_the_tiny_set_is_one_kernel(arch: ArchSpec, direction: Direction) -> None:
    assert len(KERNEL_SETS[direction]["tiny"].expand(arch, RULES)) == 1


@pytest.mark.some(3)
def test_larger_sets_hold_the_smaller_ones(arch: ArchSpec) -> None:
    for sets in KERNEL_SETS.values():
        names = {key: set(item.expand(arch, RULES)) for key, item in sets.items()}
        assert names["full"] <= names["full_tests"]
        assert names["default"] <= names["full_tests"]
        assert names["essential"] <= names["tests"]


@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_90a"])
def test_the_full_set_has_explicit_products_and_second_stages(name: str) -> None:
    arch = tilewright_arch.load(name)
    for direction in Direction:
        full = KERNEL_SETS[direction]["full"].expand(arch, RULES)
        wanted = {(a, ndim) for a in ("fp32", "fp16", "bf16") for ndim in (1, 2, 3)}
        assert {(config.a, config.ndim) for config in full if config.explicit_gemm} == wanted
        stages = {(config.a, config.ndim) for config in full if config.two_stage}
        assert stages == (wanted if direction is Direction.BACKWARD_WEIGHT else set())


# ---- the default tile table ----


def test_the_table_has_all_of_its_rows() -> None:
    assert (len(TILES), len(COMPV4_TILES)) == (10, 6)
    rows = {direction: list(table_fields(direction)) for direction in Direction}
    assert [len(rows[direction]) for direction in Direction] == [16, 20, 40]
    assert {row["pipeline"] for row in rows[Direction.FORWARD]} == {"compv3", "compv4"}
    assert {row["pipeline"] for row in rows[Direction.BACKWARD_DATA]} == {"compv3", "mem"}


def test_rows_of_the_table_are_dropped_only_by_what_the_arch_lacks() -> None:
    for direction in Direction:
        for fields in table_fields(direction):
            broken = {item.rule for item in RULES.check(CONFIGS[direction](**fields), MI)}
            assert broken <= TABLES_AND_RESOURCES, (fields, broken)
    kept = KERNEL_SETS[Direction.FORWARD]["profiler"].expand(MI, RULES)
    assert {config.tile[:2] for config in kept} >= {(16, 64), (32, 64), (64, 64), (32, 128), (64, 128)}


# ---- the generator's options ----


def test_a_rule_set_is_given_the_types_and_dimensions_that_are_asked_for() -> None:
    plain = select_set(MI, rule_set="tiny")
    assert [(config.a, config.ndim) for config in plain] == [("fp16", 2)]
    typed = select_set(MI, rule_set="tiny", datatype=["bf16", "fp32"], ndim=[1, 3])
    assert [(config.a, config.layout) for config in typed] == [("bf16", "nwgc"), ("bf16", "ndhwgc")] or len(typed) == 4
    assert {(config.a, config.ndim) for config in typed} <= {(a, n) for a in ("bf16", "fp32") for n in (1, 3)}


@pytest.mark.parametrize("alias", VARIANT_ALIASES)
def test_a_variant_picks_the_direction(alias: str) -> None:
    kernels = select_set(MI, variant=alias, rule_set="tiny")
    assert [config.direction.value for config in kernels] == [VARIANT_ALIASES[alias]]


def test_options_without_a_rule_set_describe_one_kernel() -> None:
    (config,) = select_set(
        MI,
        Direction.BACKWARD_WEIGHT,
        datatype="bf16",
        ndim=3,
        tile_m=64,
        tile_n=64,
        tile_k=64,
        warp_m=4,
        warp_n=1,
        warp_tile_m=16,
        warp_tile_n=16,
        warp_tile_k=16,
        pipeline="mem",
        vector_a=8,
        two_stage=True,
        pad_m=False,
    )
    assert (config.tile, config.wave, config.warp_tile) == ((64, 64, 64), (4, 1, 1), (16, 16, 16))
    assert (config.vector_sizes, config.two_stage, config.pad_m) == ((8, 8, 8), True, False)
    assert (config.a, config.layout, config.pipeline) == ("bf16", "ndhwgc", "mem")


def test_a_described_kernel_that_is_not_valid_is_refused_with_its_rule() -> None:
    with pytest.raises(ConfigInvalidError) as caught:
        select_set(MI, tile_m=100)
    assert caught.value.rule in ("tile_minimum", "tile_divisibility")
    assert caught.value.fix


def test_lists_of_options_give_every_valid_combination() -> None:
    kernels = select_set(HOPPER, tile_m=[64, 128, 100], tile_n=[64, 128])
    assert {config.tile[:2] for config in kernels} == {(m, n) for m in (64, 128) for n in (64, 128)}


def test_options_with_a_rule_set_keep_what_fits_them() -> None:
    every = select_set(HOPPER, rule_set="default")
    kept = select_set(HOPPER, rule_set="default", tile_n=64, pipeline="compv4")
    assert kept == [config for config in every if config.tile[1] == 64 and config.pipeline == "compv4"]
    assert 0 < len(kept) < len(every)
    merged = select_set(HOPPER, rule_set="default", num_groups_to_merge=8)
    assert merged
    assert {config.num_groups_to_merge for config in merged} == {8}


@pytest.mark.parametrize("option", ["pad_m", "two_stage", "double_smem_buffer", "streamk_enabled", "split_image"])
def test_a_text_is_no_flag(option: str) -> None:
    # In the original, the text "false" was true.
    with pytest.raises(InvalidArgumentError) as caught:
        select_set(MI, **{option: "false"})
    assert (caught.value.field, caught.value.rule) == (option, "option_boolean")


def test_unknown_sets_and_options_are_refused() -> None:
    with pytest.raises(NotFoundError):
        select_set(MI, rule_set="everything")
    with pytest.raises(InvalidArgumentError) as caught:
        select_set(MI, tile_q=3)
    assert caught.value.rule == "generate_option"


def test_stream_k_is_an_option_that_says_why_it_has_no_kernel() -> None:
    with pytest.raises(ConfigInvalidError) as caught:
        select_set(MI, Direction.BACKWARD_WEIGHT, streamk_enabled=True, streamk_reduction_strategy="TREE")
    rules: set[str] = {item.rule for item in caught.value.violations}
    assert "stream_k_template" in rules


def test_a_rule_set_without_kernels_for_an_arch_gives_way_to_its_default() -> None:
    rdna = tilewright_arch.load("gfx1201")
    assert select_set(rdna, rule_set="profiler") == select_set(rdna, rule_set="default")


def test_every_option_of_the_operation_is_understood() -> None:
    operation = ConvOperation(Direction.FORWARD)
    assert tuple(operation.generate_options) == GENERATE_OPTIONS
    sample: dict[str, Any] = {"specialization": Specialization.FILTER3X3.value, "tile_m": 64, "num_wave_groups": 1}
    for name, value in sample.items():
        assert operation.select_set(HOPPER, **{name: value})


@pytest.mark.parametrize("name", ["x86-64-v4", "aarch64", "sm_90a", "gfx1100"])
@pytest.mark.parametrize("direction", Direction)
def test_units_of_a_set_are_as_many_as_its_kernels(name: str, direction: Direction) -> None:
    arch = tilewright_arch.load(name)
    configs = select_set(arch, direction, rule_set="tests")
    assert configs and len({generate(config, arch).text for config in configs}) == len(configs)
