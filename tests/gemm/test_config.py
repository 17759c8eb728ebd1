"""Names, keys and units of configurations: a function of every field, and of nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright_gemm.codegen import render
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.vocabulary import Binary, Epilogue, Reduction, ScaleA, ScaleB, Switch, Unary
from tilewright_kit.conformance.fields import neutral_source
from tilewright_kit.types.dtypes import DType

OTHER: dict[str, Any] = {
    "dtype_a": DType.BF16,
    "layout": "crr",
    "pipeline": "mem",
    "epilogue": Epilogue.DEFAULT,
    "scheduler": "interwave",
    "pad_m": False,
    "pad_n": False,
    "pad_k": False,
    "persistent": True,
    "tile": (128, 128, 64),
    "wave": (1, 4, 1),
    "warp_tile": (16, 16, 16),
    "dtype_b": "bf8",
    "dtype_c": "fp32",
    "dtype_acc": "fp16",
    "transpose_a": True,
    "transpose_b": True,
    "structured_sparsity": True,
    "binary": Binary.MULTI_D_ADD,
    "num_d_tensors": 2,
    "dtype_d": ("fp32", "bf16"),
    "unary": Unary.GELU,
    "bias": "fp32",
    "scale_a": ScaleA.ROW,
    "scale_b": ScaleB.COLUMN,
    "split_k": 4,
    "batched": True,
    "grouped": True,
    "reduction": Reduction.TREE,
    "preshuffle": True,
    "block_size": 128,
    "num_wave_groups": 2,
    "double_buffer": Switch.OFF,
    "transpose_c": True,
    "cluster": (2, 1, 1),
    "stages": 4,
    "promote": 4,
}


def test_defaults_and_name_are_those_of_composable_kernel() -> None:
    config = GemmConfig()
    assert config.name == ("gemm_fp16_rcr_compv4_cshuffle_intrawave_True_True_True_False_128x128x32_2x2x1_32x32x16")
    assert (config.a, config.b, config.c, config.acc) == ("fp16", "fp16", "fp16", "fp32")
    assert config.variant == "standard"


def test_every_field_has_another_value_here() -> None:
    assert set(OTHER) == set(GemmConfig.field_names())


@pytest.mark.parametrize("field", GemmConfig.field_names())
def test_a_field_changed_alone_changes_name_key_and_unit(field: str) -> None:
    base = GemmConfig(num_d_tensors=2) if field == "dtype_d" else GemmConfig()
    changed = base.replace(**{field: OTHER[field]})
    assert changed != base
    assert changed.name != base.name
    assert changed.key("x").digest != base.key("x").digest
    one, other = render(base), render(changed)
    assert neutral_source(one) != neutral_source(other)
    assert set(one.entries.values()).isdisjoint(other.entries.values())


def test_what_follows_from_other_fields_is_stored_once() -> None:
    explicit = GemmConfig(
        dtype_b="fp16",
        dtype_c="fp16",
        dtype_acc="fp32",
        num_d_tensors=2,
        dtype_d=("fp16", "fp16"),
        binary=Binary.MULTI_D_ADD,
    )
    assert explicit == GemmConfig(num_d_tensors=2, binary=Binary.MULTI_D_ADD)
    assert GemmConfig(transpose_a=True) == GemmConfig(layout="ccr")
    assert GemmConfig(layout="crr", transpose_a=True, transpose_b=True) == GemmConfig(layout="rcr")
    assert GemmConfig(dtype_a=DType.INT8, dtype_c="int32", dtype_acc="int32") == GemmConfig(dtype_a=DType.INT8)


triples = st.tuples(*[st.sampled_from([1, 2, 4, 12, 128])] * 3)
configs = st.builds(
    GemmConfig,
    dtype_a=st.sampled_from(list(DType)),
    layout=st.sampled_from(["rcr", "rrr", "crr", "ccr"]),
    pipeline=st.sampled_from(["mem", "compv3", "compv4"]),
    tile=triples,
    wave=triples,
    warp_tile=triples,
    dtype_b=st.sampled_from(["", "fp8", "bf8"]),
    dtype_c=st.sampled_from(["", "fp32", "fp16"]),
    binary=st.sampled_from(list(Binary)),
    num_d_tensors=st.integers(0, 3),
    dtype_d=st.lists(st.sampled_from(["fp32", "bf16"]), max_size=3).map(tuple),
    unary=st.sampled_from(list(Unary)),
    bias=st.sampled_from(["", "fp32", "bf16"]),
    scale_a=st.sampled_from(list(ScaleA)),
    scale_b=st.sampled_from(list(ScaleB)),
    split_k=st.integers(1, 12),
    batched=st.booleans(),
    grouped=st.booleans(),
    reduction=st.sampled_from(list(Reduction)),
    preshuffle=st.booleans(),
    block_size=st.sampled_from([0, 1, 12, 128]),
    num_wave_groups=st.integers(1, 2),
    double_buffer=st.sampled_from(list(Switch)),
    transpose_c=st.booleans(),
    cluster=st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1)]),
    stages=st.integers(0, 12),
    promote=st.integers(0, 12),
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(configs, min_size=2, max_size=30))
@pytest.mark.extended
def test_names_are_injective_and_records_come_back(drawn: list[GemmConfig]) -> None:
    assert len({config.name for config in drawn}) == len(set(drawn))
    for config in drawn:
        again = GemmConfig.from_dict(config.to_dict())
        assert again == config and again.name == config.name
        assert len(config.signature()) + len(config.algorithm()) == len(dataclasses.fields(config))


@pytest.mark.parametrize(
    ("config", "roles"),
    [
        (GemmConfig(), {"main", "workspace"}),
        (GemmConfig(split_k=4), {"main", "partial", "reduce", "workspace"}),
        (PackBConfig(preshuffle=True), {"pack_b"}),
    ],
)
def test_a_unit_exports_what_its_kernel_is_used_for(config: GemmConfig, roles: set[str]) -> None:
    assert set(render(config).entries) == roles
