"""Bad requests are refused with the field, the value, the rule that they break, and what would mend them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, KV_APPEND
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc


def refused(operation: str, tensors: Mapping[str, TensorDesc | None], field: str, rule: str, words: Any = None) -> None:
    """``tensors``: None takes one out; outputs are named ``out:name``."""
    inputs = {name: item for name, item in tensors.items() if item is not None and not name.startswith("out:")}
    outputs = {name[4:]: item for name, item in tensors.items() if item is not None and name.startswith("out:")}
    with pytest.raises(InvalidArgumentError) as caught:
        parsed(operation, inputs, outputs, **(words or {}))
    error = caught.value
    assert (error.field, error.rule) == (field, rule), str(error)
    assert error.reason and error.fix, "every error says what is wrong and what would do"


def test_the_requests_that_are_broken_below_are_good() -> None:
    parsed(ATTENTION, batch_of())
    parsed(ATTENTION, varlen_of(), **VARLEN)
    parsed(ATTENTION, paged_of())
    parsed(ATTENTION, prefill_of(), max_seqlen_q=4)
    parsed(ATTENTION, vectorized_of(), kv_layout="vectorized")
    parsed(ATTENTION_BACKWARD, backward_of())
    parsed(KV_APPEND, append_of())
    parsed(KV_APPEND, append_paged_of())
    parsed(KV_APPEND, {**append_of(), **ROTARY})


@pytest.mark.parametrize(
    "change, field, rule",
    [
        ({"q": None}, "q", "operand_missing"),
        ({"v": None}, "v", "operand_missing"),
        ({"queries": ints(1)}, "queries", "operand_known"),
        ({"out:y": desc("fp16", 1)}, "y", "operand_known"),
        (
            {"q": TensorDesc(desc("fp16", 2, 4, 5, 16).dtype, (2, 4, 5, 16), (), "p", 640)},
            "q.packing",
            "packed_operand",
        ),
        ({"q": desc("fp16", 4, 5, 16)}, "q.shape", "tensor_rank"),
        ({"k": desc("fp16", 2, 7, 16)}, "k.shape", "tensor_rank"),
        ({"v": desc("fp16", 2, 2, 8, 24)}, "v.shape", "kv_lengths_agree"),
        ({"v": desc("fp16", 2, 4, 7, 24)}, "v.shape", "kv_lengths_agree"),
        ({"q": desc("fp16", 2, 3, 5, 16)}, "k.shape", "head_groups"),
        ({"q": desc("fp16", 2, 0, 5, 16)}, "k.shape", "head_groups"),
        ({"q": desc("fp16", 3, 4, 5, 16)}, "k.shape", "batch_agrees"),
        ({"q": desc("fp16", 2, 4, 5, 24)}, "k.shape", "head_dims_agree"),
        ({"v": desc("fp16", 2, 2, 7, 1025)}, "v.shape", "hdim_range"),
        ({"q": desc("fp16", 2, 4, 5, 0), "k": desc("fp16", 2, 2, 7, 0)}, "q.shape", "hdim_range"),
        ({"q": desc("fp16", 2, 4, 2**33, 16)}, "q.shape", "size_overflow"),
        ({"k": desc("fp32", 2, 2, 7, 16)}, "v.dtype", "dtype_combination"),
        ({"q": desc("fp32", 2, 4, 5, 16)}, "k.dtype", "dtype_combination"),
        ({name: desc("int8", 2, 2, 7, 16) for name in "qkv"}, "k.dtype", "dtype_combination"),
        ({"out:o": desc("fp32", 2, 4, 5, 24)}, "o.dtype", "output_dtype"),
        ({"out:o": desc("fp16", 2, 4, 5, 16)}, "o.shape", "output_shape"),
        ({"out:o": desc("fp16", 2, 4, 5, 24, strides=(480, 120, 0, 1))}, "o.strides", "output_overlap"),
        ({"out:lse": desc("fp32", 2, 4, 24)}, "lse.shape", "output_shape"),
        ({"out:lse": desc("fp16", 2, 4, 5)}, "lse.dtype", "output_dtype"),
        ({"out:randval": desc("int8", 2, 4, 5, 7)}, "randval", "randval_without_dropout"),
        ({"out:status": desc("int32", 4, strides=(2,))}, "status.strides", "index_strides"),
        ({"cu_seqlens_k": ints(3)}, "cu_seqlens_k", "varlen_operands"),
        ({"page_starts": ints(3)}, "page_starts", "lookup_operands"),
        ({"seqlens_k": ints(3)}, "seqlens_k.shape", "batch_agrees"),
        ({"seqlens_k": desc("fp32", 2)}, "seqlens_k.dtype", "index_dtype"),
        ({"seqlens_q": desc("int32", 2, strides=(3,))}, "seqlens_q.strides", "index_strides"),
        ({"cache_index": ints(3)}, "cache_index.shape", "batch_agrees"),
        ({"bias": desc("fp16", 2, 4, 5, 8)}, "bias.shape", "bias_shape"),
        ({"bias": desc("fp16", 5, 7)}, "bias.shape", "bias_shape"),
        ({"bias": desc("bf16", 2, 4, 5, 7)}, "bias.dtype", "bias_dtype"),
        ({"alibi_slopes": desc("fp32", 2)}, "alibi_slopes.shape", "slopes_shape"),
        ({"alibi_slopes": desc("fp16", 4)}, "alibi_slopes.dtype", "option_dtype"),
        ({"out:scores": desc("fp32", 2, 4, 5, 7)}, "scores", "scores_given"),
        ({"sinks": desc("fp32", 2)}, "sinks.shape", "sinks_shape"),
        ({"sinks": desc("bf16", 4)}, "sinks.dtype", "option_dtype"),
        ({"q_descale": desc("fp32")}, "q_descale", "scale_dtype"),
        ({"rng": ints(4)}, "rng", "randval_without_dropout"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict[str, Any], field: str, rule: str) -> None:
    refused(ATTENTION, {**batch_of(), **change}, field, rule)


@pytest.mark.parametrize(
    "words, field, rule",
    [
        ({"casual": True}, "attributes.casual", "attribute_known"),
        ({"causal": 1}, "attributes.causal", "attribute_type"),
        ({"scale": "large"}, "attributes.scale", "attribute_type"),
        ({"scale": float("nan")}, "attributes.scale", "attribute_range"),
        ({"mask": "diagonal"}, "attributes.mask", "mask_word"),
        ({"mask": 1}, "attributes.mask", "attribute_type"),
        ({"mask_align": "middle"}, "attributes.mask_align", "mask_word"),
        ({"window_left": -2}, "attributes.window_left", "window_range"),
        ({"window_right": 1.0}, "attributes.window_right", "attribute_type"),
        ({"causal": True, "mask": "no"}, "attributes.causal", "mask_conflict"),
        ({"causal": True, "window_right": 3}, "attributes.causal", "mask_conflict"),
        ({"mask": "top_left", "window_right": 3}, "attributes.window_right", "mask_conflict"),
        ({"mask": "bottom_right", "mask_align": "top_left"}, "attributes.mask_align", "mask_conflict"),
        ({"mask": "no", "window_left": 3}, "attributes.window_left", "mask_conflict"),
        ({"sink_size": -1}, "attributes.sink_size", "attribute_range"),
        ({"softcap": 0.0}, "attributes.softcap", "softcap_positive"),
        ({"softcap": -30.0}, "attributes.softcap", "softcap_positive"),
        ({"softcap": float("inf")}, "attributes.softcap", "attribute_range"),
        ({"dropout_p": 1.0}, "attributes.dropout_p", "dropout_range"),
        ({"dropout_p": -0.1}, "attributes.dropout_p", "dropout_range"),
        ({"dropout_p": float("nan")}, "attributes.dropout_p", "dropout_range"),
        ({"dropout_p": "half"}, "attributes.dropout_p", "attribute_type"),
        ({"dropout_p": 0.5, "seed": -1}, "attributes.seed", "attribute_range"),
        ({"dropout_p": 0.5, "offset": 2**32}, "attributes.offset", "attribute_range"),
        ({"return_randval": True}, "attributes.return_randval", "randval_without_dropout"),
        ({"max_seqlen_q": 5}, "attributes.max_seqlen_q", "varlen_operands"),
        ({"max_seqlen_k": 5}, "attributes.max_seqlen_k", "varlen_operands"),
        ({"page_size": 16}, "attributes.page_size", "lookup_operands"),
        ({"kv_layout": "linear"}, "attributes.kv_layout", "lookup_operands"),
        ({"kv_layout": "tiled"}, "attributes.kv_layout", "attribute_choice"),
        ({"qscale": "pertensor"}, "attributes.qscale", "scale_dtype"),
        ({"scale": 1e39}, "attributes.scale", "attribute_range"),
        ({"scale": -1e-46}, "attributes.scale", "attribute_range"),
        ({"softcap": 1e300}, "attributes.softcap", "attribute_range"),
        ({"qscale": "rows"}, "attributes.qscale", "attribute_choice"),
        ({"num_splits": 5000}, "attributes.num_splits", "attribute_range"),
        ({"min_seqlen_q": -1}, "attributes.min_seqlen_q", "attribute_range"),
        ({"out_dtype": "fp32"}, "attributes.out_dtype", "output_dtype"),
        ({"out_dtype": "fp15"}, "attributes.out_dtype", "attribute_choice"),
        ({"alignment": 3}, "attributes.alignment", "attribute_range"),
        ({"rope": "half"}, "attributes.rope", "attribute_known"),
    ],
)
def test_attributes_that_mean_nothing_are_refused(words: dict[str, Any], field: str, rule: str) -> None:
    refused(ATTENTION, batch_of(), field, rule, words)


@pytest.mark.parametrize(
    "change, words, field, rule",
    [
        ({"cu_seqlens_q": ints(2, 2)}, {}, "cu_seqlens_q.shape", "varlen_operands"),
        ({"cu_seqlens_q": ints(0)}, {}, "cu_seqlens_q.shape", "varlen_operands"),
        ({"cu_seqlens_q": desc("fp32", 4)}, {}, "cu_seqlens_q.dtype", "index_dtype"),
        ({"cu_seqlens_k": ints(5)}, {}, "cu_seqlens_k.shape", "batch_agrees"),
        ({"cu_seqlens_k": None}, {}, "cu_seqlens_k", "varlen_operands"),
        ({"cache_index": ints(3)}, {}, "cache_index", "varlen_operands"),
        ({"q": desc("fp16", 1, 20, 4, 16)}, {}, "q.shape", "tensor_rank"),
        ({"k": desc("fp16", 3, 30, 2, 16)}, {}, "k.shape", "tensor_rank"),
        ({}, {"max_seqlen_q": None}, "attributes.max_seqlen_q", "max_seqlen_given"),
        ({}, {"max_seqlen_k": None}, "attributes.max_seqlen_k", "max_seqlen_given"),
        ({}, {"max_seqlen_k": 0}, "attributes.max_seqlen_k", "attribute_range"),
        ({"bias": desc("fp16", 3, 4, 8, 12)}, {}, "bias.shape", "bias_shape"),
        ({"bias": desc("fp16", 1, 4, 20, 12)}, {}, "bias.shape", "bias_shape"),
    ],
)
def test_sequences_end_to_end_that_do_not_fit_are_refused(change: Any, words: Any, field: str, rule: str) -> None:
    given = {name: value for name, value in {**VARLEN, **words}.items() if value is not None}
    refused(ATTENTION, {**varlen_of(), **change}, field, rule, given)


@pytest.mark.parametrize(
    "change, words, field, rule",
    [
        ({"seqlens_k": None}, {}, "seqlens_k", "paged_needs_lengths"),
        ({"k": desc("fp16", 2, 3, 7, 8, 16)}, {}, "k.shape", "paged_shape"),
        ({}, {"kv_layout": "vectorized"}, "k.shape", "paged_shape"),
        ({"k": desc("fp16", 10, 12, 2, 16), "v": desc("fp16", 10, 12, 2, 24)}, {}, "k.shape", "page_size_power"),
        ({"k": desc("fp16", 2, 2048, 2, 16), "v": desc("fp16", 2, 2048, 2, 24)}, {}, "k.shape", "page_size_power"),
        ({}, {"page_size": 16}, "attributes.page_size", "paged_shape"),
        ({}, {"page_size": 12}, "attributes.page_size", "page_size_power"),
        ({}, {"page_size": "big"}, "attributes.page_size", "attribute_type"),
        ({"v": desc("fp16", 9, 8, 2, 24)}, {}, "v.shape", "kv_lengths_agree"),
        ({"block_table": ints(2, 4)}, {}, "block_table.shape", "lookup_operands"),
        ({"block_table": ints(12)}, {}, "block_table.shape", "lookup_operands"),
        ({"block_table": desc("int8", 3, 4)}, {}, "block_table.dtype", "index_dtype"),
        ({"block_table": desc("int32", 3, 4, strides=(8, 2))}, {}, "block_table.strides", "index_strides"),
        ({"block_table": desc("int32", 3, 4, strides=(0, 1))}, {}, "block_table.strides", "index_strides"),
        ({}, {"kv_lookup": "sglang"}, "page_starts", "lookup_operands"),
        ({"page_starts": ints(4)}, {}, "block_table.shape", "lookup_operands"),
        ({"page_starts": ints(4)}, {"kv_lookup": "vllm"}, "page_starts", "lookup_operands"),
        ({"page_starts": ints(3), "block_table": ints(12)}, {}, "page_starts.shape", "batch_agrees"),
        ({"cache_index": ints(3)}, {}, "cache_index", "lookup_operands"),
        ({"cu_seqlens_k": ints(4)}, {}, "cu_seqlens_k", "lookup_operands"),
        ({"q": desc("fp16", 3, 3, 1, 16)}, {}, "k.shape", "head_groups"),
        ({"q": desc("fp16", 3, 4, 1, 24)}, {}, "k.shape", "head_dims_agree"),
    ],
)
def test_pages_that_do_not_fit_are_refused(change: Any, words: Any, field: str, rule: str) -> None:
    refused(ATTENTION, {**paged_of(), **change}, field, rule, words)


@pytest.mark.parametrize(
    "change, field, rule",
    [
        ({"k": desc("fp16", 10, 2, 4, 8, 4)}, "k.shape", "paged_shape"),
        ({"v": desc("fp16", 10, 2, 1, 24, 4)}, "v.shape", "paged_shape"),
        ({"v": desc("fp16", 10, 1, 1, 24, 8)}, "v.shape", "paged_shape"),
        ({"k": desc("fp16", 10, 2, 2, 4, 8), "v": desc("fp16", 10, 2, 1, 24, 8)}, "k.shape", "vectorized_page"),
        ({"k": desc("fp16", 10, 2, 2, 8, 8, strides=(512, 256, 128, 16, 2))}, "k.strides", "paged_shape"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(change: Any, field: str, rule: str) -> None:
    refused(ATTENTION, {**vectorized_of(), **change}, field, rule, {"kv_layout": "vectorized"})


@pytest.mark.parametrize(
    "change, words, field, rule",
    [
        ({"k_descale": desc("fp16")}, {}, "k_descale.dtype", "scale_dtype"),
        ({"k_descale": desc("fp32", 2, 4)}, {}, "k_descale.shape", "descale_shape"),
        ({"k_descale": desc("fp32", 2, 2, 3)}, {}, "k_descale.shape", "descale_shape"),
        ({"q_descale": desc("fp32", 2, 4, 1), "k_descale": desc("fp32", 2, 2)}, {}, "k_descale.shape", "descale_shape"),
        ({"k_descale": desc("fp32")}, {"qscale": "no"}, "attributes.qscale", "descale_shape"),
        ({}, {"qscale": "kv_blockscale"}, "attributes.qscale", "kv_blockscale_paged"),
        ({}, {"scale_block_k": 0}, "attributes.scale_block_k", "attribute_range"),
        ({"bias": desc("fp8", 2, 4, 5, 7)}, {}, "bias.dtype", "bias_dtype"),
        ({}, {"out_dtype": "fp8"}, "attributes.out_dtype", "output_dtype"),
    ],
)
def test_factors_that_do_not_fit_are_refused(change: Any, words: Any, field: str, rule: str) -> None:
    refused(ATTENTION, {**batch_of("fp8"), **change}, field, rule, words)


def test_random_seeds_are_given_once() -> None:
    tensors = {**batch_of(), "rng": ints(4)}
    refused(ATTENTION, tensors, "attributes.seed", "seed_given_once", {"dropout_p": 0.1, "seed": 3})
    refused(ATTENTION, tensors, "attributes.offset", "seed_given_once", {"dropout_p": 0.1, "offset": 3})
    refused(ATTENTION, {**tensors, "rng": ints(2)}, "rng.shape", "rng_shape", {"dropout_p": 0.1})


@pytest.mark.parametrize(
    "change, words, field, rule",
    [
        ({"lse": None}, {}, "lse", "lse_required"),
        ({"do": None}, {}, "do", "operand_missing"),
        ({"o": desc("fp16", 2, 4, 5, 16)}, {}, "o.shape", "gradient_shape"),
        ({"do": desc("fp16", 2, 4, 7, 24)}, {}, "do.shape", "gradient_shape"),
        ({"do": desc("fp32", 2, 4, 5, 24)}, {}, "do.dtype", "gradient_dtype"),
        ({"lse": desc("fp32", 2, 5, 4)}, {}, "lse.shape", "gradient_shape"),
        ({"lse": desc("fp16", 2, 4, 5)}, {}, "lse.dtype", "gradient_dtype"),
        ({"o": desc("fp32", 2, 4, 5, 24)}, {}, "o.dtype", "output_dtype"),
        ({}, {"return_dbias": True}, "attributes.return_dbias", "dbias_bias"),
        ({"out:dbias": desc("fp16", 2, 4, 5, 7)}, {}, "dbias", "dbias_bias"),
        ({"out:dsinks": desc("fp32", 4)}, {}, "dsinks", "sinks_shape"),
        ({"out:dq": desc("fp32", 2, 4, 5, 16)}, {}, "dq.dtype", "output_dtype"),
        ({"out:dk": desc("fp16", 2, 4, 7, 16)}, {}, "dk.shape", "output_shape"),
        ({"out:dv": desc("fp16", 2, 2, 7, 24, strides=(0, 168, 24, 1))}, {}, "dv.strides", "output_overlap"),
        ({"block_table": ints(2, 3)}, {}, "block_table", "operand_known"),
        ({}, {"return_lse": True}, "attributes.return_lse", "attribute_known"),
        ({}, {"deterministic": "yes"}, "attributes.deterministic", "attribute_type"),
        ({}, {"return_randval": True}, "attributes.return_randval", "randval_without_dropout"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(change: Any, words: Any, field: str, rule: str) -> None:
    refused(ATTENTION_BACKWARD, {**backward_of(), **change}, field, rule, words)


@pytest.mark.parametrize(
    "change, words, field, rule",
    [
        ({"seqlens_k": None}, {}, "seqlens_k", "operand_missing"),
        ({"v_new": desc("fp16", 2, 3, 24)}, {}, "v_new.shape", "tensor_rank"),
        ({"v_new": desc("fp16", 2, 2, 4, 24)}, {}, "v_new.shape", "kv_lengths_agree"),
        ({"v_new": desc("fp16", 2, 2, 3, 16)}, {}, "v_new.shape", "head_dims_agree"),
        ({"k_new": desc("fp16", 2, 2, 3, 24)}, {}, "k_past.shape", "head_dims_agree"),
        (
            {"k_new": desc("fp16", 2, 1, 3, 16), "v_new": desc("fp16", 2, 1, 3, 24)},
            {},
            "k_new.shape",
            "head_dims_agree",
        ),
        (
            {"k_past": desc("fp16", 3, 2, 20, 16), "v_past": desc("fp16", 3, 2, 20, 24)},
            {},
            "k_past.shape",
            "batch_agrees",
        ),
        ({"k_past": desc("fp16", 2, 20, 16)}, {}, "k_past.shape", "tensor_rank"),
        ({"k_new": desc("bf16", 2, 2, 3, 16)}, {}, "k_new.dtype", "dtype_combination"),
        ({"v_past": desc("bf16", 2, 2, 20, 24)}, {}, "v_past.dtype", "dtype_combination"),
        ({"seqlens_k": ints(3)}, {}, "seqlens_k.shape", "batch_agrees"),
        ({"out:k_cache": desc("fp16", 2, 2, 24, 16)}, {}, "k_cache.shape", "in_place_shape"),
        ({"out:v_cache": desc("fp32", 2, 2, 20, 24)}, {}, "v_cache.shape", "in_place_shape"),
        ({"out:q_out": desc("fp16", 2, 2, 3, 16)}, {}, "q_out", "operand_missing"),
        ({"out:seqlens_out": ints(3)}, {}, "seqlens_out.shape", "output_shape"),
        ({"q": desc("fp16", 2, 4, 3, 16)}, {}, "q", "rotary_shape"),
        ({}, {"rotary_dim": 8}, "attributes.rotary_dim", "rotary_shape"),
        ({}, {"rope": "half"}, "rotary_cos", "rotary_shape"),
        ({"rotary_cos": desc("fp32", 32, 4)}, {}, "rotary_sin", "rotary_shape"),
        ({**ROTARY}, {"rope": "none"}, "attributes.rope", "rotary_shape"),
        ({**ROTARY}, {"rope": "whole"}, "attributes.rope", "attribute_choice"),
        ({**ROTARY, "rotary_sin": desc("fp32", 30, 4)}, {}, "rotary_sin.shape", "rotary_shape"),
        ({**ROTARY, "rotary_cos": desc("fp32", 32)}, {}, "rotary_cos.shape", "rotary_shape"),
        ({**ROTARY}, {"rotary_dim": 16}, "attributes.rotary_dim", "rotary_shape"),
        ({name: desc("fp32", 32, 9) for name in ROTARY}, {}, "rotary_cos.shape", "rotary_dim_range"),
        ({name: desc("bf16", 32, 4) for name in ROTARY}, {}, "rotary_cos.dtype", "rotary_dtype"),
        ({**ROTARY, "rotary_sin": desc("fp32", 32, 4, strides=(8, 2))}, {}, "rotary_sin.strides", "rotary_shape"),
        ({**ROTARY, "q": desc("fp16", 2, 4, 2, 16)}, {}, "q.shape", "batch_agrees"),
        ({**ROTARY, "q": desc("fp16", 2, 3, 3, 16)}, {}, "k_past.shape", "head_groups"),
        ({"page_starts": ints(3)}, {}, "page_starts", "lookup_operands"),
        ({}, {"page_size": 8}, "attributes.page_size", "lookup_operands"),
        ({}, {"max_seqlen_k": 21}, "attributes.max_seqlen_k", "max_seqlen_given"),
        ({}, {"causal": True}, "attributes.causal", "attribute_known"),
    ],
)
def test_appends_that_do_not_fit_are_refused(change: Any, words: Any, field: str, rule: str) -> None:
    refused(KV_APPEND, {**append_of(), **change}, field, rule, words)


def test_gradients_of_8_bit_operands_are_refused_with_a_fix_that_holds() -> None:
    refused(ATTENTION_BACKWARD, {**backward_of("fp8"), "lse": desc("fp32", 2, 4, 5)}, "q.dtype", "backward_dtype")
    parsed(ATTENTION_BACKWARD, backward_of("bf16"))
