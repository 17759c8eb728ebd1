"""Configurations in the dictionaries of another dispatcher: read, and rejected where they are wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tilewright_grouped_conv.config.config import ConvBackwardWeightConfig, ConvConfig
from tilewright_grouped_conv.kernel_sets.composable_kernel import is_foreign, read_foreign
from tilewright_grouped_conv.vocabulary import VARIANT_ALIASES
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

JSON_OBJECT: dict[str, Any] = {
    "name": "any",
    "signature": {"variant": "forward", "dtype": "fp16", "ndim_spatial": 2, "layout": "nhwgc"},
    "algorithm": {
        "tile_m": 1, "tile_n": 128, "tile_k": 128, "wave": "2x2x1", "warp": "32x32x16", "pipeline": "compv4",
        "epilogue": "cshuffle", "scheduler": "intrawave", "vector_sizes": [4, 8, 8],
    },
    "arch": "gfx942",
}  # fmt: skip


def test_the_forms_are_told_from_our_own() -> None:
    assert is_foreign(NESTED) and is_foreign(JSON_OBJECT)
    assert not is_foreign(ConvConfig().to_dict())


def test_the_json_object_is_read() -> None:
    assert read_foreign(JSON_OBJECT).replace(pad_m=True) == ConvConfig(
        tile=(1, 128, 128), wave=(2, 2, 1), warp_tile=(32, 32, 16), pad_m=True
    )


def test_every_key_of_the_nested_form_reaches_its_field() -> None:
    assert read_foreign(NESTED) == ConvBackwardWeightConfig(
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
    assert read_foreign({**NESTED, "variant": alias}).direction == VARIANT_ALIASES[alias]


def test_single_values_need_no_list() -> None:
    flat = copy.deepcopy(NESTED)
    for section in ("tile_config", "trait_config"):
        flat[section] = {key: value[0] for key, value in flat[section].items()}
    assert read_foreign(flat) == read_foreign(NESTED)


def test_what_is_left_out_has_the_value_that_it_had_there() -> None:
    bare = {"tile_config": {}, "trait_config": {}, "variant": "forward", "ndim_spatial": 2, "arch": "gfx942"}
    config = read_foreign({**bare, "layout": "nhwgc"})
    assert (config.tile, config.wave, config.warp_tile) == ((1, 128, 128), (2, 2, 1), (32, 32, 16))
    assert (config.pipeline, config.vector_sizes, config.a) == ("compv4", (4, 8, 8), "fp16")


def test_a_double_buffer_is_read_as_asked_for() -> None:
    record = copy.deepcopy(NESTED)
    record["trait_config"]["double_smem_buffer"] = [True]
    assert read_foreign(record).double_smem_buffer is Switch.ON


@pytest.mark.parametrize(("key", "value"), [("wave", "2x2"), ("warp", "a"), ("vector_sizes", [4, 8])])
def test_sizes_of_the_json_object_are_three(key: str, value: Any) -> None:
    record = copy.deepcopy(JSON_OBJECT)
    record["algorithm"][key] = value
    with pytest.raises(InvalidArgumentError) as caught:
        read_foreign(record)
    assert (caught.value.field, caught.value.rule) == (f"algorithm.{key}", "foreign_sizes")
