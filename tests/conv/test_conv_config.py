"""Names, keys and units of configurations: a function of every field, and of nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_grouped_conv.codegen import exports_of, gpu_exports_of, render, render_gpu
from tilewright_grouped_conv.config.config import CONFIGS, ConvBackwardWeightConfig, ConvConfig
from tilewright_grouped_conv.kernel_sets.defaults import default_config
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import VARIANT_ALIASES, Direction, Kind, Scale, Specialization
from tilewright_kit.conformance.fields import neutral_source
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.vocabulary import Binary, Epilogue, Reduction, Switch, Unary

OTHER: dict[str, Any] = {
    "dtype_in": DType.BF16,
    "layout": "ngchw",
    "ndim": 3,
    "pipeline": "compv3",
    "epilogue": Epilogue.DEFAULT,
    "scheduler": "interwave",
    "tile": (128, 128, 64),
    "wave": (1, 4, 1),
    "warp_tile": (16, 16, 16),
    "dtype_wei": "bf8",
    "dtype_out": "fp32",
    "vector_sizes": (8, 8, 8),
    "num_wave_groups": 2,
    "num_groups_to_merge": 4,
    "double_smem_buffer": Switch.OFF,
    "two_stage": True,
    "specialization": Specialization.FILTER3X3,
    "explicit_gemm": True,
    "streamk": Reduction.TREE,
    "streamk_persistent": True,
    "split_image": True,
    "pad_m": False,
    "pad_n": False,
    "pad_k": False,
    "split_k": 4,
    "block_per_cu": 2,
    "stages": 3,
    "bias": "fp32",
    "unary": Unary.GELU,
    "binary": Binary.MULTI_D_ADD,
    "num_d_tensors": 2,
    "dtype_d": ("fp32", "bf16"),
    "scale": Scale.CHANNEL,
    "accumulate": True,
    "channel_tile": 64,
    "pixel_tile": (1, 2, 4),
    "filter": (1, 3, 3),
    "stride": (1, 2, 2),
    "dilation": (1, 1, 2),
    "mapped_rows": True,
}


@pytest.mark.parametrize("direction", Direction)
def test_names_begin_as_those_of_composable_kernel(direction: Direction) -> None:
    words = "fp16_nhwgc_2d_compv4_cshuffle_intrawave_128x128x32_2x2x1_32x32x16"
    assert CONFIGS[direction]().name == f"grouped_conv_{direction}_{words}"


def test_a_name_tells_every_choice_in_order() -> None:
    config = ConvBackwardWeightConfig(
        pipeline="compv3",
        vector_sizes=(8, 8, 8),
        num_groups_to_merge=2,
        two_stage=True,
        specialization=Specialization.FILTER1X1_STRIDE1_PAD0,
        split_k=4,
        pad_m=False,
    )
    assert config.name == (
        "grouped_conv_bwd_weight_fp16_nhwgc_2d_compv3_cshuffle_intrawave_128x128x32_2x2x1_32x32x16_vec8x8x8_gm2_2stage"
        "_filter1x1-stride1-pad0_padmoff_splitk4"
    )


def test_every_field_has_another_value_here() -> None:
    assert set(OTHER) == set(ConvConfig.field_names())


@pytest.mark.parametrize("field", ConvConfig.field_names())
def test_a_field_changed_alone_changes_name_key_and_unit(field: str) -> None:
    base = ConvConfig(num_d_tensors=2) if field == "dtype_d" else ConvConfig()
    changed = base.replace(**{field: OTHER[field]})
    assert changed != base
    assert changed.name != base.name
    assert changed.key("x").digest != base.key("x").digest
    one, other = render(base), render(changed)
    assert neutral_source(one) != neutral_source(other)
    assert set(one.entries.values()).isdisjoint(other.entries.values())


@given(st.fixed_dictionaries({}, optional={name: st.just(value) for name, value in OTHER.items()}))
@settings(max_examples=200)
@pytest.mark.extended
def test_configurations_come_back_from_their_dict(changes: dict[str, Any]) -> None:
    config = ConvConfig(**changes)
    assert ConvConfig.from_dict(config.to_dict()) == config


@given(*(st.sets(st.sampled_from(sorted(OTHER))) for _ in range(2)))
@settings(max_examples=200)
def test_different_sets_of_changes_have_different_names(one: set[str], other: set[str]) -> None:
    first, second = (ConvConfig(**{name: OTHER[name] for name in names}) for names in (one, other))
    assert (first == second) == (first.name == second.name)


def test_directions_never_share_a_key() -> None:
    keys = [config().key("x") for config in CONFIGS.values()]
    assert len({key.digest for key in keys}) == len(keys) == len({key.name for key in keys})


def test_what_follows_from_other_fields_is_stored_as_its_default() -> None:
    config = ConvConfig(dtype_in=DType.BF16, dtype_wei="bf16", dtype_out="bf16", num_d_tensors=1, dtype_d=("bf16",))
    assert (config.dtype_wei, config.dtype_out, config.dtype_d) == ("", "", ())
    assert (config.a, config.b, config.c, config.d) == ("bf16", "bf16", "bf16", ("bf16",))


@pytest.mark.parametrize(
    ("direction", "first", "letters", "image_is_b"),
    [
        (Direction.FORWARD, False, "rcr", False),
        (Direction.FORWARD, True, "rrr", True),
        (Direction.BACKWARD_DATA, False, "rrr", False),
        (Direction.BACKWARD_DATA, True, "crr", True),
        (Direction.BACKWARD_WEIGHT, False, "crr", True),
    ],
)
def test_each_direction_is_a_product_of_its_own_letters(
    direction: Direction, first: bool, letters: str, image_is_b: bool
) -> None:
    config = CONFIGS[direction](layout="ngchw" if first else "nhwgc", dtype_in=DType.FP8, dtype_wei="bf8")
    assert (config.letters, config.image_is_b) == (letters, image_is_b)
    assert (config.a, config.b) == (("bf8", "fp8") if image_is_b else ("fp8", "bf8"))
    text = render(config).text
    assert f"a_col = {str(letters[0] == 'c').lower()}, b_col = {str(letters[1] == 'c').lower()};" in text


def test_kinds_follow_from_the_specialization() -> None:
    kinds = {item: ConvConfig(specialization=item).kind for item in Specialization}
    assert kinds.pop(Specialization.DEPTHWISE) is Kind.DEPTHWISE
    assert kinds.pop(Specialization.DIRECT) is Kind.DIRECT
    assert set(kinds.values()) == {Kind.IMPLICIT}
    assert ConvConfig(explicit_gemm=True).kind is Kind.POINTWISE


@pytest.mark.parametrize(
    ("special", "ndim", "filter_", "stride", "unpadded"),
    [
        (Specialization.DEFAULT, 2, (0, 0, 0), (0, 0, 0), False),
        (Specialization.FILTER1X1_PAD0, 2, (1, 1, 1), (0, 0, 0), True),
        (Specialization.FILTER1X1_STRIDE1_PAD0, 3, (1, 1, 1), (1, 1, 1), True),
        (Specialization.FILTER3X3, 1, (1, 1, 3), (0, 0, 0), False),
        (Specialization.FILTER3X3, 2, (1, 3, 3), (0, 0, 0), False),
        (Specialization.FILTER3X3, 3, (3, 3, 3), (0, 0, 0), False),
    ],
)
def test_a_specialization_is_what_its_unit_may_rely_on(
    special: Specialization, ndim: int, filter_: tuple[int, ...], stride: tuple[int, ...], unpadded: bool
) -> None:
    config = ConvConfig(specialization=special, ndim=ndim)
    assert (config.fixed_filter, config.fixed_stride, config.unpadded) == (filter_, stride, unpadded)
    text = render(config).text
    assert f"filter[3] = {{{', '.join(map(str, filter_))}}}" in text
    assert f"stride[3] = {{{', '.join(map(str, stride))}}}" in text


@pytest.mark.parametrize("first", [False, True])
def test_scales_of_channels_lie_along_the_axis_of_channels(first: bool) -> None:
    config = ConvConfig(layout="ngchw" if first else "nhwgc", scale=Scale.CHANNEL)
    a, b = ("row", "none") if first else ("none", "column")
    assert f"scale_a = tw::Scale::{a}, scale_b = tw::Scale::{b};" in render(config).text
    whole = render(config.replace(scale=Scale.TENSOR)).text
    assert "scale_a = tw::Scale::none, scale_b = tw::Scale::tensor;" in whole


def test_a_unit_exports_what_its_kernel_is_used_for() -> None:
    assert exports_of(ConvConfig()) == ("TW_CONV_MAIN", "TW_CONV_WORKSPACE")
    sliced = ConvBackwardWeightConfig(split_k=4)
    assert set(render(sliced).entries) == {"main", "partial", "reduce", "workspace"}
    assert gpu_exports_of(sliced) == ("TW_CONV_KERNEL",)
    assert gpu_exports_of(sliced.replace(two_stage=True)) == ("TW_CONV_KERNEL", "TW_CONV_CONVERT")
    arch = tilewright_arch.load("gfx942")
    unit = render_gpu(sliced.replace(two_stage=True, pipeline="compv3"), arch)
    assert unit.entries["convert"] == unit.entries["main"] + "_convert"


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_the_default_kernel_is_valid_everywhere(arch: ArchSpec, ndim: int, dtype: str) -> None:
    for variant in VARIANT_ALIASES:
        config = default_config(variant, ndim, arch, dtype)
        assert RULES.check(config, arch) == ()
        assert (config.direction, config.ndim, config.dtype_in) == (VARIANT_ALIASES[variant], ndim, dtype)


def test_an_unknown_variant_has_no_default() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        default_config("sideways", 2, tilewright_arch.load("gfx942"))
    assert (caught.value.field, caught.value.rule) == ("variant", "variant_known")


def test_exports_count_kernels_by_direction_and_dimension() -> None:
    config = ConvBackwardWeightConfig(ndim=3, layout="ndhwgc")
    statistics = config.statistics()
    assert (statistics["by_variant"], statistics["by_ndim"]) == ("bwd_weight", "3d")
    assert (statistics["by_datatype"], statistics["by_layout"]) == ("fp16", "ndhwgc")
    assert config.algorithm()["pixel_tile"] == [0, 0, 0]
    assert config.algorithm()["tile_shape"] == {"m": 128, "n": 128, "k": 32}
