"""Problems said with the seeds' setters: what is missing is named, and what was said is what is requested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilewright_fmha.compat.builder import FmhaProblemBuilder, FmhaSpec
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.references.sample_inputs import PARSERS
from tilewright_fmha.vocabulary import BiasKind, Family, FmhaDType, KvLayout, KvLookup, MaskWord, QScale, Rope, VLayout
from tilewright_kit.types.errors import InvalidArgumentError

SETTERS = (
    "api_family", "kernel_family", "gfx_arch", "data_type", "dims", "nheads", "mask_type", "bias_type", "lse",
    "dropout", "qscale_type", "rope_type", "logits_soft_cap", "v_rowmajor", "group_mode", "paged_kv",
    "fp8_static_quant", "skip_min_seqlen_q", "sink", "kv_cache", "window", "sink_size", "max_seqlen",
    "num_splits", "bwd_flags",
)  # fmt: skip


def builder(dtype: str = "bf16") -> FmhaProblemBuilder:
    return FmhaProblemBuilder().data_type(dtype).dims(64, 32, 2, 48, 80).nheads(8, 2)


def problem_of(spec: FmhaSpec) -> FmhaProblem:
    return PARSERS[spec.operation](spec.request())


def test_every_setter_of_the_seeds_is_there_and_returns_the_builder() -> None:
    assert len(SETTERS) == 25
    arguments: dict[str, tuple[Any, ...]] = {
        "api_family": ("fwd",), "kernel_family": ("fwd",), "gfx_arch": ("gfx942",), "data_type": ("fp16",),
        "dims": (64, 64, 1, 8, 8), "nheads": (2, 1), "mask_type": ("no",), "bias_type": ("no",),
        "qscale_type": ("no",), "rope_type": ("none",), "kv_cache": ("linear", "vllm", 16), "window": (1, 1),
        "sink_size": (1,), "max_seqlen": (8, 8), "num_splits": (2,),
    }  # fmt: skip
    made = FmhaProblemBuilder()
    for name in SETTERS:
        assert getattr(made, name)(*arguments.get(name, ())) is made, name


@pytest.mark.parametrize(
    "said, field, rule",
    [
        (lambda b: b, "data_type", "problem_incomplete"),
        (lambda b: b.data_type("fp16"), "batch", "problem_incomplete"),
        (lambda b: b.data_type("fp16").dims(64, 64, 1, 8, 8), "nhead_q", "problem_incomplete"),
        (lambda b: b.data_type("fp16").dims(64, 0, 1, 8, 8).nheads(1, 1), "hdim_v", "problem_incomplete"),
        (lambda b: b.data_type("fp61"), "data_type", "attribute_choice"),
        (lambda b: b.api_family("forward"), "api_family", "attribute_choice"),
        (lambda b: b.mask_type("diagonal"), "mask_type", "attribute_choice"),
        (lambda b: b.kv_cache("linear", "hash", 16), "kv_lookup_table", "attribute_choice"),
        (lambda b: b.data_type("fp16").dims(8, 8, 1, 8, 8).nheads(1, 1).api_family("bwd"), "has_lse", "lse_required"),
        (
            lambda b: b.data_type("fp16").dims(8, 8, 1, 8, 8).nheads(1, 1).group_mode(),
            "max_seqlen_q",
            "max_seqlen_given",
        ),
        (
            lambda b: b.data_type("fp16").dims(8, 8, 1, 8, 8).nheads(1, 1).api_family("batch_prefill"),
            "max_seqlen_q",
            "max_seqlen_given",
        ),
    ],
)
def test_what_is_missing_or_unknown_is_named(
    said: Callable[[FmhaProblemBuilder], FmhaProblemBuilder], field: str, rule: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        said(FmhaProblemBuilder()).build()
    assert (caught.value.field, caught.value.rule) == (field, rule)
    assert caught.value.fix


def test_numbers_stand_for_words_as_in_the_seeds() -> None:
    spec = builder().mask_type(2).bias_type(2).qscale_type(1).rope_type(2).kv_cache(0, 1, 64).build()
    words = (spec.mask_type, spec.bias_type, spec.qscale_type, spec.rope_type)
    assert words == (MaskWord.BOTTOM_RIGHT, BiasKind.ALIBI, QScale.PERTENSOR, Rope.HALF)
    assert (spec.kv_memory_layout, spec.kv_lookup_table, spec.page_size) == (KvLayout.VECTORIZED, KvLookup.SGLANG, 64)
    assert builder("fp8").build().data_type is FmhaDType.FP8FP16
    assert builder("fp8").fp8_static_quant().build().qscale_type is QScale.PERTENSOR
    assert builder().sink_size(4).build().has_sink


@pytest.mark.parametrize(
    "family, group, wanted",
    [
        ("fwd", False, Family.FWD),
        ("fwd", True, Family.FWD),
        ("fwd_splitkv", False, Family.FWD),
        ("fwd_pagedkv", False, Family.PAGEDKV),
        ("batch_prefill", False, Family.BATCH_PREFILL),
        ("fwd_appendkv", False, Family.APPENDKV),
        ("fwd_appendkv", True, Family.APPENDKV),
        ("bwd", False, Family.DQ_DK_DV),
        ("bwd", True, Family.DQ_DK_DV),
    ],
)
@pytest.mark.parametrize("layout", ["linear", "vectorized"])
@pytest.mark.parametrize("lookup", ["vllm", "sglang"])
def test_every_family_is_requested_in_the_sizes_that_were_said(
    family: str, group: bool, wanted: Family, layout: str, lookup: str
) -> None:
    made = builder().api_family(family).lse().max_seqlen(48, 80).group_mode(group).mask_type("causal")
    made = made.kv_cache(layout, lookup, 16).paged_kv(family == "fwd_appendkv")
    spec = made.build()
    problem = problem_of(spec)
    assert problem.family is wanted
    assert (problem.batch, problem.heads_k, problem.seq_k) == (
        2,
        2,
        80 if lookup == "vllm" or not problem.paged else 160,
    )
    assert (problem.hdim_q, problem.hdim_v, problem.varlen) == (64, 32, group or family == "batch_prefill")
    if problem.paging is not None:
        assert (problem.paging.layout.value, problem.paging.lookup.value) == (layout, lookup)
    if family == "fwd":
        assert problem.num_ops == spec.num_ops
        assert problem.lse


def test_features_reach_the_request() -> None:
    made = builder("fp16").mask_type("generic").window(7, 3).sink_size(2).bias_type("bias").dropout().lse()
    problem = problem_of(made.bwd_flags(store_randval=True).skip_min_seqlen_q().num_splits(3).v_rowmajor(False).build())
    mask = problem.mask
    assert (mask.left, mask.right, mask.sink) == (7, 3, 2)
    assert problem.dropout and problem.lse and problem.randval and problem.min_q
    assert (problem.bias, problem.num_splits, problem.v_layout) == (BiasKind.ELEMENTWISE, 3, VLayout.VC)
    capped = problem_of(builder().logits_soft_cap().sink().bias_type("alibi").build())
    assert capped.softcap > 0 and capped.learned_sinks and capped.bias is BiasKind.ALIBI
    backward = builder().api_family("bwd").lse().bias_type("bias").bwd_flags(dbias=True, deterministic=True)
    assert problem_of(backward.build()).dbias
    assert not problem_of(builder().api_family("bwd").lse().build()).deterministic
    rotated = problem_of(builder().api_family("fwd_appendkv").rope_type("half").build())
    assert (rotated.rope, rotated.has("q_out")) == (Rope.HALF, True)


@pytest.mark.parametrize("kind", ["pertensor", "blockscale", "kv_blockscale"])
def test_factors_are_requested_in_their_shapes(kind: str) -> None:
    made = builder("fp8bf16").qscale_type(kind).kv_cache("linear", "vllm", 16)
    made = made.api_family("fwd_pagedkv") if kind == "kv_blockscale" else made
    problem = problem_of(made.build())
    assert problem.qscale is QScale(kind)
    assert problem.dtype is FmhaDType.FP8BF16


def test_the_key_has_every_feature_and_no_size() -> None:
    base = builder().build()
    assert base.key == builder().dims(64, 32, 7, 99, 11).nheads(6, 3).max_seqlen(99, 99).num_splits(4).build().key
    others = {
        builder().dims(64, 64, 2, 48, 80).build().key, builder("fp16").build().key, builder().lse().build().key,
        builder().mask_type("b").build().key, builder().dropout().build().key, builder().sink().build().key,
        builder().gfx_arch("gfx950").build().key, builder().kernel_family("fwd_splitkv").build().key,
        builder().kv_cache("linear", "vllm", 64).build().key, builder().paged_kv().build().key,
        builder().logits_soft_cap().build().key, builder().v_rowmajor(False).build().key,
        builder().skip_min_seqlen_q().build().key, builder().bwd_flags(dbias=True).build().key, base.key,
    }  # fmt: skip
    assert len(others) == 15


def test_lengths_at_most_are_those_said_or_the_sizes() -> None:
    assert (builder().build().effective_max_seqlen_q, builder().build().effective_max_seqlen_k) == (48, 80)
    assert builder().max_seqlen(50, 90).build().effective_max_seqlen_k == 90
