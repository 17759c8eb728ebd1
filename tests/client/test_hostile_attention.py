"""Requests for attention that would read or write where they must not: refused by name, and nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from client_helpers import random

import tilewright as tw

B, H, HK, D, PAGES, SIZE = 2, 4, 2, 32, 6, 16


@pytest.fixture(scope="module")
def client(real_server: Any) -> Iterator[tw.Client]:
    with tw.connect(real_server.target) as opened:
        yield opened
        # What was refused has harmed nothing.
        q, k, v = random(1, H, 3, D), random(1, HK, 5, D), random(1, HK, 5, D)
        assert np.isfinite(opened.attention(q, k, v)).all()


def paged(**changes: Any) -> dict[str, Any]:
    table = np.array([[3, 1, 5], [2, 0, 4]], np.int32)
    given = {"q": random(B, H, 1, D), "k_pages": random(PAGES, SIZE, HK, D), "v_pages": random(PAGES, SIZE, HK, D)}
    return {**given, "block_table": table, "seqlens_k": [40, 17], **changes}


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"block_table": np.array([[3, 6, 5], [2, 0, 4]], np.int32)}, "block_table[1]", "block_table_range"),
        ({"block_table": np.array([[3, 1, 5], [2, -1, 4]], np.int32)}, "block_table[4]", "block_table_range"),
        ({"seqlens_k": [49, 17]}, "seqlens_k[0]", "seqlen_range"),
        ({"seqlens_k": [40, -1]}, "seqlens_k[1]", "seqlen_range"),
        ({"seqlens_k": [40, 17, 3]}, "seqlens_k.shape", "batch_agrees"),
        ({"block_table": np.zeros((3, 3), np.int32)}, "block_table.shape", "lookup_operands"),
        ({"page_starts": [0, 3, 5]}, "block_table.shape", "lookup_operands"),
        (
            {"block_table": np.arange(5, dtype=np.int32), "page_starts": [0, 4, 3]},
            "page_starts",
            "cu_seqlens_ascending",
        ),
        ({"k_pages": random(PAGES, 12, HK, D), "v_pages": random(PAGES, 12, HK, D)}, "k.shape", "page_size_power"),
        ({"kv_lookup": "linked"}, "kv_lookup", ""),
        ({"q": random(B, 3, 1, D)}, "k.shape", "head_groups"),
        ({"q": random(B, H, 1, 40)}, "k.shape", "head_dims_agree"),
    ],
)
def test_pages_that_are_not_there_are_refused(client: tw.Client, changes: Any, field: str, rule: str) -> None:
    out = client.empty((B, H, 1, D))
    out[...] = np.nan
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.attention_paged(**paged(**changes), out=None if "q" in changes else out)
    assert caught.value.field == field
    assert rule in ("", caught.value.rule)
    assert caught.value.fix
    assert np.isnan(out).all()


def test_a_plan_looks_at_its_table_every_time(client: tw.Client) -> None:
    given = paged()
    table = client.asarray(given["block_table"])
    lengths = client.asarray(np.array(given["seqlens_k"], np.int32))
    q, k, v = (client.asarray(given[name]) for name in ("q", "k_pages", "v_pages"))
    plan = client.plan_attention_paged(q, k, v, table, lengths)
    out = client.empty((B, H, 1, D))
    bound = plan.bind(q=q, k=k, v=v, block_table=table, seqlens_k=lengths, out=out)
    bound()
    good = out.copy()
    table[0, 1], out[...] = 1000, np.nan
    for call in (bound, lambda: plan(q=q, k=k, v=v, block_table=table, seqlens_k=lengths, out=out)):
        with pytest.raises(tw.InvalidArgumentError) as caught:
            call()
        assert caught.value.rule == "block_table_range"
    assert np.isnan(out).all()
    table[0, 1] = 1
    table[1, 2] = -7  # beyond what the second sequence uses
    bound()
    np.testing.assert_array_equal(out, good)


@pytest.mark.parametrize(
    ("starts_q", "starts_k", "longest", "field"),
    [
        ([0, 9, 21], [0, 9, 20], 12, "cu_seqlens_q[2]"),
        ([0, 12, 10], [0, 9, 20], 12, "cu_seqlens_q[2]"),
        ([1, 9, 20], [0, 9, 20], 12, "cu_seqlens_q[0]"),
        ([0, 9, 20], [0, 5, 20], 12, "cu_seqlens_k[2]"),
    ],
)
def test_sequences_outside_of_their_tensor_are_refused(
    client: tw.Client, starts_q: Any, starts_k: Any, longest: int, field: str
) -> None:
    q, k = random(20, H, D), random(20, HK, D)
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.attention_varlen(q, k, k, starts_q, starts_k, longest, longest)
    assert caught.value.field == field
    assert caught.value.rule in ("cu_seqlens_ascending", "seqlen_range")


def appended(client: tw.Client, **changes: Any) -> dict[str, Any]:
    k, v = client.empty((PAGES, SIZE, HK, D)), client.empty((PAGES, SIZE, HK, D))
    k[...], v[...] = np.nan, np.nan
    given: dict[str, Any] = {"k_new": random(B, HK, 2, D), "v_new": random(B, HK, 2, D), "k_cache": k, "v_cache": v}
    table = np.array([[3, 1, 5], [2, 0, 4]], np.int32)
    return {**given, "block_table": table, "seqlens_k": [40, 15], **changes}


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"seqlens_k": [47, 15]}, "seqlens_k[0]", "cache_full"),
        ({"block_table": np.array([[3, 1, 5], [2, 5, 4]], np.int32)}, "block_table", "page_shared"),
        ({"block_table": np.array([[3, 1, 9], [2, 0, 4]], np.int32)}, "block_table[2]", "block_table_range"),
        (
            {"rotary_cos": np.ones((30, 16), np.float32), "rotary_sin": np.zeros((30, 16), np.float32)},
            "seqlens_k[0]",
            "rotary_positions",
        ),
        ({"k_new": random(B, HK, 2, D).astype(np.float16)}, "k_new.dtype", "dtype_combination"),
    ],
)
def test_appending_where_there_is_no_room_writes_nothing(
    client: tw.Client, changes: Any, field: str, rule: str
) -> None:
    given = appended(client, **changes)
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.kv_append(**given)
    assert (caught.value.field, caught.value.rule) == (field, rule)
    assert np.isnan(given["k_cache"]).all()
    assert np.isnan(given["v_cache"]).all()


def test_a_page_may_be_read_by_two_while_neither_writes_it(client: tw.Client) -> None:
    """A common prompt: both sequences have page 3, and write to pages of their own."""
    table = np.array([[3, 1, 5], [3, 0, 4]], np.int32)
    given = appended(client, block_table=table, seqlens_k=[16, 20])
    client.kv_append(**given)
    assert np.isnan(given["k_cache"][3]).all()
    np.testing.assert_array_equal(given["k_cache"][1, :2], given["k_new"][0].swapaxes(0, 1))
    np.testing.assert_array_equal(given["v_cache"][0, 4:6], given["v_new"][1].swapaxes(0, 1))


@pytest.mark.extended
def test_a_kernel_of_another_signature_is_refused(client: tw.Client) -> None:
    q, k, v = random(1, H, 3, D), random(1, HK, 5, D), random(1, HK, 5, D)
    client.attention(q, k, v)
    assert client.report is not None
    plain = client.report.kernels[0]
    with pytest.raises(tw.TilewrightError) as caught:
        client.attention(q, k, v, is_causal=True, kernel=plain)
    assert "mask" in str(caught.value)


def test_pages_have_no_gradients_and_features_without_a_kernel_name_what_there_is(client: tw.Client) -> None:
    q, k, v = random(1, H, 3, D), random(1, HK, 5, D), random(1, HK, 5, D)
    o, lse = client.attention(q, k, v, return_lse=True)
    eight = [tw.DTYPES["fp8"]] * 4
    small = [item.astype(kind) for item, kind in zip((o, q, k, v), eight, strict=True)]
    with pytest.raises(tw.TilewrightError) as caught:
        client.attention_backward(*small, small[0], lse)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"dropout_p": None}, "dropout_p", "attribute_type"),
        ({"dropout_p": True}, "dropout_p", "attribute_type"),
        ({"is_causal": "no"}, "is_causal", "attribute_type"),
        ({"return_lse": np.zeros((0,), np.int32)}, "return_lse", "attribute_type"),
        ({"enable_gqa": np.ones(2)}, "enable_gqa", "attribute_type"),
        ({"build": []}, "build", "build_policy"),
        ({"q_descale": ["a"]}, "q_descale", "array_like"),
        ({"q_descale": 10**400}, "q_descale", "array_like"),
        ({"scale": 10**400}, "scale", "attribute_type"),
        ({"seqlens_k": [1.5]}, "seqlens_k", "index_dtype"),
        ({"seqlens_k": ["a"]}, "seqlens_k", "index_dtype"),
        ({"seqlens_k": [[1], [2, 3]]}, "seqlens_k", "index_dtype"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_by_name(
    client: tw.Client, changes: Any, field: str, rule: str
) -> None:
    q, k, v = random(1, H, 3, D), random(1, HK, 5, D), random(1, HK, 5, D)
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.attention(q, k, v, **changes)
    assert (caught.value.field, caught.value.rule) == (field, rule)
    assert caught.value.fix


def test_pages_without_a_table_are_refused(client: tw.Client) -> None:
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.attention_paged(**paged(block_table=None))
    assert (caught.value.field, caught.value.rule) == ("block_table", "operand_missing")


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"page_size": 12}, "page_size", "page_size_power"),
        ({"hdim": 1025}, "hdim", "hdim_range"),
        ({"hdim_v": 1025}, "hdim_v", "hdim_range"),
        ({"dtype": "int8"}, "dtype", "dtype_combination"),
        ({"pages": 1 << 40}, "pages", "size"),
        ({"pages": 1 << 20, "page_size": 1, "sequences": 1 << 20}, "max_pages", "size"),
        ({"device": 3}, "device", "name"),
        ({"layout": np.zeros(2)}, "layout", "layout_known"),
    ],
)
def test_caches_that_no_kernel_reads_are_refused_when_they_are_made(
    client: tw.Client, changes: Any, field: str, rule: str
) -> None:
    given = {"pages": 4, "page_size": 16, "kv_heads": HK, "hdim": D, "dtype": "fp32", "sequences": 2, **changes}
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.kv_cache(**given)
    assert (caught.value.field, caught.value.rule) == (field, rule)
    assert caught.value.fix


@pytest.mark.parametrize("dtype", ["fp32", "fp8"])
@pytest.mark.parametrize("layout", ["linear", "vectorized"])
def test_a_cache_that_was_made_has_the_kernel_that_appends(client: tw.Client, dtype: str, layout: str) -> None:
    with client.kv_cache(4, 16, HK, 64, 32, dtype=dtype, sequences=2, layout=layout) as cache:
        before = client.kernels.statistics()["artifact_builds"]
        k, v = (random(1, HK, 3, size).astype(tw.DTYPES[dtype]) for size in (64, 32))
        cache.append([cache.add()], k, v)
        assert client.kernels.statistics()["artifact_builds"] == before


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"ids": None}, "ids[0]", "cache_sequence"),
        ({"ids": 1.5}, "ids[0]", "cache_sequence"),
        ({"window": 1.5}, "window", "window_pair"),
        ({"window": (1, 2, 3)}, "window", "window_pair"),
        ({"mask": ["causal"]}, "attributes.mask", "attribute_type"),
        ({"softcap": [1.0]}, "attributes.softcap", "attribute_type"),
        (
            {"k": None, "v": None, "rotary_cos": np.ones((30, 16)), "rotary_sin": np.zeros((30, 16))},
            "rotary_cos",
            "rotary_without_keys",
        ),
        ({"rotary_sin": np.zeros((30, 16), np.float32)}, "rotary_cos", "rotary_shape"),
    ],
)
def test_steps_that_mean_nothing_are_refused_and_the_cache_lives_on(
    client: tw.Client, changes: Any, field: str, rule: str
) -> None:
    with client.kv_cache(4, 16, HK, D, dtype="fp32", sequences=2) as cache:
        given = {"ids": [cache.add()], "q": random(1, H, 1, D), "k": random(1, HK, 1, D), "v": random(1, HK, 1, D)}
        with pytest.raises((tw.InvalidArgumentError, tw.NotFoundError)) as caught:
            cache.attend(**{**given, **changes})
        assert (caught.value.field, caught.value.rule) == (field, rule)
        assert np.isfinite(cache.attend(**given)).all()
        assert cache.lengths == {0: 1}
