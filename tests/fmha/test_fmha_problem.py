"""What requests mean: sizes, places, families and features, and how much work they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fmha_requests import (
    ROTARY,
    VARLEN,
    append_of,
    append_paged_of,
    backward_of,
    batch_of,
    desc,
    ints,
    paged_of,
    parsed,
    prefill_of,
    varlen_of,
    vectorized_of,
)

from tilewright_fmha.problem.masks import Mask
from tilewright_fmha.problem.problem import Strides
from tilewright_fmha.problem.resize import resized_fmha
from tilewright_fmha.problem.signature import signature_of
from tilewright_fmha.references.samples import fmha_samples
from tilewright_fmha.vocabulary import (
    ATTENTION,
    ATTENTION_BACKWARD,
    KV_APPEND,
    OPERATIONS,
    BiasKind,
    Family,
    FmhaDType,
    KvLayout,
    KvLookup,
    MaskKind,
    QScale,
    Rope,
    SmallType,
    VLayout,
)
from tilewright_kit.contract.problem import Role
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError


@pytest.mark.parametrize(
    "tensors, words, family",
    [
        (batch_of(), {}, Family.FWD),
        (varlen_of(), VARLEN, Family.FWD),
        (paged_of(), {}, Family.PAGEDKV),
        (prefill_of(), {"max_seqlen_q": 4}, Family.BATCH_PREFILL),
    ],
)
def test_the_family_follows_from_the_operands(tensors: Any, words: Any, family: Family) -> None:
    assert parsed(ATTENTION, tensors, **words).family is family


def test_sizes_are_read_from_items_of_one_size() -> None:
    problem = parsed(ATTENTION, batch_of())
    sizes = (problem.batch, problem.heads_q, problem.heads_k, problem.seq_q, problem.seq_k)
    assert sizes == (2, 4, 2, 5, 7)
    assert (problem.hdim_q, problem.hdim_v, problem.group, problem.total_q) == (16, 24, 2, 10)
    assert problem.scale == 16**-0.5
    output = problem.operand("o")
    assert (output.role, output.desc.shape, output.desc.dtype) == (Role.OUTPUT, (2, 4, 5, 24), DType.FP16)


def test_sequences_end_to_end_have_capacities_by_attribute() -> None:
    problem = parsed(ATTENTION, varlen_of(), **VARLEN, return_lse=True)
    assert (problem.varlen, problem.batch, problem.seq_q, problem.seq_k) == (True, 3, 8, 12)
    assert (problem.total_q, problem.total_k) == (20, 30)
    assert problem.operand("o").desc.shape == (20, 4, 24)
    assert problem.operand("lse").desc.shape == (4, 20)
    assert problem.place("q") == Strides("q", 0, 16, 64, 1)
    assert problem.place("lse") == Strides("lse", 0, 20, 1, 1)


def test_pages_say_how_many_tokens_a_sequence_may_have() -> None:
    problem = parsed(ATTENTION, paged_of())
    paging = problem.paging
    assert paging is not None
    assert (paging.page_size, paging.pages, paging.lookup, paging.table_stride) == (8, 10, KvLookup.VLLM, 4)
    assert (problem.seq_k, problem.heads_k, problem.hdim_v) == (32, 2, 24)
    assert problem.place("k") == Strides("k", 8 * 2 * 16, 16, 2 * 16, 1)
    assert parsed(ATTENTION, paged_of(), max_seqlen_k=20).seq_k == 20


def test_a_flat_table_is_looked_up_through_where_sequences_begin() -> None:
    tensors = {**paged_of(), "block_table": ints(9), "page_starts": ints(4)}
    paging = parsed(ATTENTION, tensors).paging
    assert paging is not None
    assert (paging.lookup, paging.table_stride) == (KvLookup.SGLANG, 9)
    assert parsed(ATTENTION, tensors).seq_k == 72


def test_chunks_of_a_vectorized_cache_have_a_stride() -> None:
    problem = parsed(ATTENTION, vectorized_of(), kv_layout="vectorized")
    assert problem.paging is not None
    assert problem.paging.layout is KvLayout.VECTORIZED
    assert problem.place("k") == Strides("k", 2 * 16 * 8, 16 * 8, 8, 1, 8 * 8)
    assert problem.place("v") == Strides("v", 2 * 24 * 8, 24 * 8, 0, 8, 0)
    assert problem.v_layout is VLayout.VR


def test_strides_are_kept_and_broadcasting_is_a_stride_of_zero() -> None:
    rows_first = desc("fp16", 2, 4, 5, 16, strides=(320, 16, 64, 1))
    bias = desc("fp32", 1, 4, 1, 7)
    problem = parsed(ATTENTION, {**batch_of(), "q": rows_first, "bias": bias})
    assert problem.place("q") == Strides("q", 320, 16, 64, 1)
    assert problem.place("bias") == Strides("bias", 0, 7, 0, 1)
    output = problem.operand("o").desc
    assert output.strides == (4 * 5 * 24, 24, 4 * 24, 1), "the output lies as the queries do"
    assert (problem.bias, problem.dtype_bias) == (BiasKind.ELEMENTWISE, DType.FP32)


def test_values_may_lie_column_by_column() -> None:
    columns = desc("fp16", 2, 2, 7, 24, strides=(2 * 24 * 7, 24 * 7, 1, 7))
    problem = parsed(ATTENTION, {**batch_of(), "v": columns})
    assert problem.v_layout is VLayout.VC
    assert signature_of(problem)["v_layout"] is VLayout.VC


@pytest.mark.parametrize(
    "words, mask, kind",
    [
        ({}, Mask(), MaskKind.NONE),
        ({"causal": True}, Mask(right=0), MaskKind.CAUSAL),
        ({"mask": "causal"}, Mask(right=0), MaskKind.CAUSAL),
        ({"mask": "t"}, Mask(right=0), MaskKind.CAUSAL),
        ({"mask": "b"}, Mask(right=0, bottom_right=True), MaskKind.CAUSAL),
        ({"causal": True, "mask_align": "bottom_right"}, Mask(right=0, bottom_right=True), MaskKind.CAUSAL),
        ({"mask": "top_left", "window_left": 3}, Mask(3, 0), MaskKind.WINDOW),
        ({"mask": "g", "window_left": 3, "window_right": 2}, Mask(3, 2), MaskKind.WINDOW),
        ({"window_left": 3, "sink_size": 2}, Mask(3, -1, sink=2), MaskKind.WINDOW),
        ({"window_right": 4}, Mask(-1, 4), MaskKind.CAUSAL),
        ({"causal": True, "sink_size": 2}, Mask(right=0), MaskKind.CAUSAL),
    ],
)
def test_masks_have_one_form_however_they_are_said(words: dict[str, Any], mask: Mask, kind: MaskKind) -> None:
    problem = parsed(ATTENTION, batch_of(), **words)
    assert problem.mask == mask
    assert problem.mask.kind is kind
    assert signature_of(problem)["mask"] is kind


def test_visible_pairs_are_counted_exactly() -> None:
    rng = np.random.default_rng(3)
    for _ in range(400):
        left, right, sink, queries, keys = (int(number) for number in rng.integers(-1, 11, 5))
        mask = Mask(left, right, bool(rng.integers(2)), max(sink, 0))
        queries, keys = max(queries, 0), max(keys, 0)
        assert mask.pairs(queries, keys) == int(mask.visible(queries, keys).sum()), (mask, queries, keys)


def test_flops_count_what_is_seen_and_num_ops_everything() -> None:
    plain, causal = parsed(ATTENTION, batch_of()), parsed(ATTENTION, batch_of(), causal=True)
    assert plain.flops == plain.num_ops == 2 * 2 * 4 * 5 * 7 * (16 + 24)
    assert causal.flops == 2 * 2 * 4 * (1 + 2 + 3 + 4 + 5) * (16 + 24)
    backward = parsed(ATTENTION_BACKWARD, backward_of())
    assert backward.flops == 2 * 2 * 4 * 5 * 7 * (3 * 16 + 2 * 24)
    huge = parsed(ATTENTION, {name: desc("fp16", 1, 1, 2**28, 8) for name in "qkv"}, causal=True)
    assert huge.flops == 2 * (2**28 * (2**28 + 1) // 2) * 16, "no loop over rows"


@pytest.mark.parametrize(
    "q, k, o, word",
    [
        ("fp32", "fp32", None, "fp32"),
        ("fp8", "fp8", None, "fp8fp16"),
        ("fp8", "fp8", "bf16", "fp8bf16"),
        ("fp8", "fp8", "fp32", "fp8fp32"),
        ("fp16", "fp8", None, "fp16fp8"),
        ("bf16", "fp8", None, "bf16fp8"),
        ("bf8", "bf8", None, "bf8"),
    ],
)
def test_element_types_have_one_word(q: str, k: str, o: str | None, word: str) -> None:
    tensors = {**batch_of(q), "k": desc(k, 2, 2, 7, 16), "v": desc(k, 2, 2, 7, 24)}
    problem = parsed(ATTENTION, tensors, **({"out_dtype": o} if o else {}))
    assert problem.dtype is FmhaDType(word)
    assert problem.operand("o").desc.dtype == problem.dtype.o


@pytest.mark.parametrize(
    "shapes, words, kind",
    [
        ({"q": (), "k": (), "v": ()}, {}, QScale.PERTENSOR),
        ({"k": (2, 2)}, {}, QScale.PERTENSOR),
        ({"q": (2, 4, 1), "k": (2, 2, 1), "v": (2, 2, 1)}, {}, QScale.BLOCKSCALE),
        ({"k": (2, 2, 2)}, {"scale_block_k": 4}, QScale.BLOCKSCALE),
        ({}, {"qscale": "pertensor"}, QScale.PERTENSOR),
        ({}, {}, QScale.NONE),
    ],
)
def test_how_fp8_is_scaled_follows_from_the_factors(shapes: Any, words: Any, kind: QScale) -> None:
    factors = {f"{name}_descale": desc("fp32", *shape) for name, shape in shapes.items()}
    problem = parsed(ATTENTION, {**batch_of("fp8"), **factors}, **words)
    assert problem.qscale is kind


def test_factors_of_pages_are_told_from_factors_of_heads() -> None:
    factors = {"k_descale": desc("fp32", 10, 2), "v_descale": desc("fp32", 10, 2)}
    problem = parsed(ATTENTION, {**paged_of("fp8"), **factors})
    assert problem.scaling is not None
    assert problem.qscale is QScale.KV_BLOCKSCALE
    assert problem.scaling.k == Strides("k_descale", 2, 1, 0, 0)
    assert not problem.scaling.q.operand


def test_as_many_pages_as_sequences_have_factors_of_whom_the_caller_says() -> None:
    tensors = {**paged_of("fp8"), "k": desc("fp8", 3, 8, 2, 16), "v": desc("fp8", 3, 8, 2, 24)}
    tensors["k_descale"] = desc("fp32", 3, 2)
    with pytest.raises(InvalidArgumentError, match="qscale=kv_blockscale") as caught:
        parsed(ATTENTION, tensors)
    assert (caught.value.field, caught.value.rule) == ("k_descale.shape", "descale_shape")
    for kind in (QScale.KV_BLOCKSCALE, QScale.PERTENSOR):
        assert parsed(ATTENTION, tensors, qscale=kind.value).qscale is kind


def test_a_signature_names_exactly_what_the_problem_has() -> None:
    extra = {"sinks": desc("fp32", 4), "bias": desc("fp16", 2, 4, 5, 7)}
    words = {"dropout_p": 0.5, "return_randval": True, "return_lse": True, "window_left": 2, "sink_size": 1}
    found = signature_of(parsed(ATTENTION, {**batch_of(), **extra}, **words, min_seqlen_q=2))
    on = {name for name, value in found.items() if value is True}
    assert on == {"dropout", "randval", "lse", "sink", "learned_sinks", "skip_min_seqlen_q"}
    assert (found["bias"], found["dtype_bias"]) == (BiasKind.ELEMENTWISE, SmallType.AS_Q)
    plain = signature_of(parsed(ATTENTION, batch_of()))
    assert not any(value is True for value in plain.values())


def test_backward_gives_gradients_that_lie_as_their_tensors_do() -> None:
    tensors = {**backward_of(), "bias": desc("fp32", 1, 4, 5, 7), "sinks": desc("fp32", 4)}
    problem = parsed(ATTENTION_BACKWARD, tensors, return_dbias=True)
    names = [item.name for item in problem.operands if item.role is Role.OUTPUT]
    assert names == ["dq", "dk", "dv", "dbias", "dsinks"]
    assert problem.place("dk").row == problem.place("k").row
    assert signature_of(problem)["deterministic"] is True
    assert signature_of(parsed(ATTENTION_BACKWARD, backward_of(), deterministic=False))["deterministic"] is False


def test_appending_writes_a_cache_of_the_same_form() -> None:
    problem = parsed(KV_APPEND, {**append_of(), **ROTARY, "q": desc("fp16", 2, 4, 3, 16)}, rope="half")
    assert (problem.new_rows, problem.seq_k, problem.seq_q, problem.heads_q) == (3, 20, 3, 4)
    assert (problem.rope, problem.rotary_dim, problem.rotary_rows) == (Rope.HALF, 8, 32)
    assert [item.name for item in problem.operands if item.role is Role.OUTPUT] == ["k_cache", "v_cache", "q_out"]
    assert problem.operand("k_cache").desc == problem.operand("k_past").desc
    paged = parsed(KV_APPEND, append_paged_of(), {"seqlens_out": ints(3), "status": ints(4)})
    assert (paged.seq_k, paged.rope, paged.status, paged.has("seqlens_out")) == (32, Rope.NONE, True, True)


def test_items_of_a_cache_may_be_chosen() -> None:
    tensors = {**batch_of(), "k": desc("fp16", 6, 2, 7, 16), "v": desc("fp16", 6, 2, 7, 24), "cache_index": ints(2)}
    assert parsed(ATTENTION, tensors).cache_items == 6


def test_a_problem_of_no_queries_or_no_keys_is_legal() -> None:
    assert parsed(ATTENTION, {**batch_of(), "q": desc("fp16", 2, 4, 0, 16)}).is_empty
    none = {"k": desc("fp16", 2, 2, 0, 16), "v": desc("fp16", 2, 2, 0, 24)}
    problem = parsed(ATTENTION, {**batch_of(), **none})
    assert not problem.is_empty, "zeros must be written"
    assert problem.flops == 0
    assert parsed(ATTENTION, {name: desc("fp16", 0, 2, 3, 16) for name in "qkv"}).is_empty


def test_problems_are_equal_exactly_if_one_plan_serves_both() -> None:
    first, second = parsed(ATTENTION, batch_of(), scale=0.5), parsed(ATTENTION, batch_of(), scale=0.5)
    assert first == second
    assert hash(first) == hash(second)
    for words in ({"scale": 0.25}, {"scale": 0.5, "causal": True}, {"scale": 0.5, "dropout_p": 0.1}):
        assert parsed(ATTENTION, batch_of(), **words) != first
    seeded = [parsed(ATTENTION, {**batch_of(), "rng": ints(4)}, dropout_p=0.1) for _ in range(2)]
    assert seeded[0] == seeded[1]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_problems_of_other_sizes_keep_their_features(operation: str) -> None:
    for request in fmha_samples(operation):
        problem = parsed(operation, request.inputs, **request.attributes)
        sizes = {name: value for name, value in problem.describe().items() if type(value) is int}
        if operation == KV_APPEND:
            assert resized_fmha(problem, sizes) is None
            continue
        same = resized_fmha(problem, sizes)
        assert same is not None
        assert same.describe() == problem.describe()
        assert signature_of(same) == signature_of(problem)  # type: ignore[arg-type]
        larger = resized_fmha(problem, {**sizes, "batch": sizes["batch"] + 3, "seq_k": 2 * sizes["seq_k"]})
        assert larger is not None
        assert larger.describe()["batch"] == sizes["batch"] + 3
        assert resized_fmha(problem, {**sizes, "heads_k": 0}) is None
        assert resized_fmha(problem, {"batch": 1}) is None
