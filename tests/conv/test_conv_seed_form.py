"""The seeds' forms of a configuration: read, written, and refused where they are wrong."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_grouped_conv.compat.dictionaries import from_seed, to_seed, to_seed_json
from tilewright_grouped_conv.config.config import ConvBackwardWeightConfig, ConvConfig
from tilewright_grouped_conv.kernel_sets.defaults import default_config
from tilewright_grouped_conv.kernel_sets.sets import KERNEL_SETS
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import VARIANT_ALIASES, Direction
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.vocabulary import Switch

NESTED: dict[str, Any] = {
    "tile_config": {
        "tile_m": [64], "tile_n": [128], "tile_k": [64],
        "wave_m": [2], "wave_n": [2], "wave_k": [1],
        "warp_tile_m": [32], "warp_tile_n": [32], "warp_tile_k": [16],
    },
    "trait_config": {
        "pipeline": ["compv3"], "epilogue": ["cshuffle"], "scheduler": ["intrawave"],
        "pad_m": [True], "pad_n": [True], "pad_k": [False],
        "vector_size_a": [8], "vector_size_b": [8], "vector_size_c": [4],
        "block_per_cu": [2], "num_wave_groups": [1], "num_groups_to_merge": [4],
        "double_smem_buffer": [False], "split_image": [True], "explicit_gemm": [False], "two_stage": [True],
    },
    "variant": "bwdw", "ndim_spatial": 3, "arch": "gfx942", "layout": "nhwgc", "dtype": "bf16",
}  # fmt: skip


def test_every_key_of_the_nested_form_reaches_its_field() -> None:
    assert from_seed(NESTED) == ConvBackwardWeightConfig(
        dtype_in=DType.BF16,
        layout="ndhwgc",
        ndim=3,
        pipeline="compv3",
        tile=(64, 128, 64),
        wave=(2, 2, 1),
        warp_tile=(32, 32, 16),
        vector_sizes=(8, 8, 4),
        num_groups_to_merge=4,
        split_image=True,
        two_stage=True,
        pad_k=False,
    )


@pytest.mark.parametrize("alias", VARIANT_ALIASES)
def test_every_spelling_of_a_variant_is_read(alias: str) -> None:
    assert from_seed({**NESTED, "variant": alias}).direction == VARIANT_ALIASES[alias]


def test_single_values_need_no_list() -> None:
    flat = copy.deepcopy(NESTED)
    for section in ("tile_config", "trait_config"):
        flat[section] = {key: value[0] for key, value in flat[section].items()}
    assert from_seed(flat) == from_seed(NESTED)


def test_what_is_left_out_has_the_seeds_values() -> None:
    bare = {"tile_config": {}, "trait_config": {}, "variant": "forward", "ndim_spatial": 2, "arch": "gfx942"}
    config = from_seed({**bare, "layout": "nhwgc"})
    assert (config.tile, config.wave, config.warp_tile) == ((1, 128, 128), (2, 2, 1), (32, 32, 16))
    assert (config.pipeline, config.vector_sizes, config.a) == ("compv4", (4, 8, 8), "fp16")


@pytest.mark.parametrize("key", ["tile_config", "trait_config", "variant", "ndim_spatial", "arch", "layout"])
def test_required_keys_are_required(key: str) -> None:
    record = {name: value for name, value in NESTED.items() if name != key}
    with pytest.raises(InvalidArgumentError) as caught:
        from_seed(record)
    assert (caught.value.field, caught.value.rule) == (key, "seed_keys")


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"variant": "sideways"}, "variant", "variant_known"),
        ({"ndim_spatial": "2"}, "ndim_spatial", "seed_integer"),
        ({"ndim_spatial": True}, "ndim_spatial", "seed_integer"),
        ({"tile_config": [64]}, "tile_config", "seed_section"),
        ({"trait_config": {"pad_m": "false"}}, "trait_config.pad_m", "seed_boolean"),
        ({"trait_config": {"two_stage": 1}}, "trait_config.two_stage", "seed_boolean"),
        ({"tile_config": {"tile_m": [64, 128]}}, "tile_config.tile_m", "seed_integer"),
        ({"dtype": "fp64"}, "config.dtype_in", "config_type"),
        ({"trait_config": {"epilogue": "sideways"}}, "config.epilogue", "config_type"),
    ],
)
def test_what_is_wrong_is_refused_by_name(changes: dict[str, Any], field: str, rule: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        from_seed({**NESTED, **changes})
    assert (caught.value.field, caught.value.rule) == (field, rule)
    assert caught.value.fix


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_default_kernels_come_back_from_both_forms(arch: ArchSpec, dtype: str) -> None:
    for variant in ("forward", "bwd_data", "bwd_weight"):
        for ndim in (1, 2, 3):
            config = default_config(variant, ndim, arch, dtype)
            assert from_seed(json.loads(json.dumps(to_seed(config, arch)))) == config
            assert from_seed(json.loads(json.dumps(to_seed_json(config, arch)))) == config


def test_kernels_of_sets_come_back_from_the_nested_form() -> None:
    arch, seen = tilewright_arch.load("gfx942"), 0
    for direction in Direction:
        for config in KERNEL_SETS[direction]["profiler"].expand(arch, RULES):
            assert from_seed(to_seed(config, arch)) == config
            seen += 1
    assert seen > 50


def test_the_seeds_print_the_number_of_workgroups_that_they_deduce() -> None:
    four, three = ConvConfig(), ConvConfig(pipeline="compv3")
    assert to_seed(four, "gfx942")["trait_config"]["block_per_cu"] == [1]
    assert to_seed_json(three, "gfx942")["algorithm"]["block_per_cu"] == 2
    assert to_seed(three.replace(block_per_cu=3), "gfx942")["trait_config"]["block_per_cu"] == [3]


def test_a_double_buffer_is_read_as_asked_for() -> None:
    record = copy.deepcopy(NESTED)
    record["trait_config"]["double_smem_buffer"] = [True]
    assert from_seed(record).double_smem_buffer is Switch.ON


def test_the_json_object_has_the_seeds_keys() -> None:
    record = to_seed_json(ConvConfig(), "gfx942")
    assert set(record) == {"name", "signature", "algorithm", "arch"}
    assert record["signature"] == {"variant": "forward", "dtype": "fp16", "ndim_spatial": 2, "layout": "nhwgc"}
    assert record["algorithm"]["wave"] == "2x2x1" and record["algorithm"]["warp"] == "32x32x16"
    assert record["algorithm"]["vector_sizes"] == [4, 8, 8]


@pytest.mark.parametrize(("key", "value"), [("wave", "2x2"), ("warp", "a"), ("vector_sizes", [4, 8])])
def test_sizes_of_the_json_object_are_three(key: str, value: Any) -> None:
    record = to_seed_json(ConvConfig(), "gfx942")
    record["algorithm"][key] = value
    with pytest.raises(InvalidArgumentError) as caught:
        from_seed(record)
    assert (caught.value.field, caught.value.rule) == (f"algorithm.{key}", "seed_sizes")
