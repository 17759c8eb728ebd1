"""Attention, its gradients and appending to caches, through the service and back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import attention_by_hand as by_hand
import numpy as np
import pytest
from attention_by_hand import visible
from client_helpers import close, random

import tilewright as tw

B, H, HK, SQ, SK, D = 2, 4, 2, 17, 29, 32


@pytest.fixture(scope="module")
def client(real_server: Any) -> Iterator[tw.Client]:
    with tw.connect(real_server.target) as opened:
        yield opened


@pytest.fixture(scope="module")
def qkv() -> tuple[Any, Any, Any]:
    return random(B, H, SQ, D), random(B, HK, SK, D), random(B, HK, SK, D)


CALLS: dict[str, Any] = {
    "plain": ({}, {}),
    "scaled": ({"scale": 0.3}, {"scale": 0.3}),
    "causal": ({"is_causal": True}, {"seen": visible(SQ, SK, right=0)}),
    "bottom right": ({"mask": "bottom_right"}, {"seen": visible(SQ, SK, right=0, bottom=True)}),
    "window": ({"window": (5, 2)}, {"seen": visible(SQ, SK, right=2, left=5)}),
    "window below": (
        {"window": (5, 0), "mask_align": "bottom_right"},
        {"seen": visible(SQ, SK, right=0, left=5, bottom=True)},
    ),
    "one number": ({"window": 3}, {"seen": visible(SQ, SK, right=3, left=3)}),
}


@pytest.mark.parametrize("case", CALLS)
def test_masks_mean_what_they_say_in_both_layouts(client: tw.Client, qkv: Any, case: str) -> None:
    words, more = CALLS[case]
    want, _ = by_hand.attend(*qkv, **more)
    close(client.attention(*qkv, **words), want)
    rows_first = [client.asarray(np.ascontiguousarray(item.swapaxes(1, 2))) for item in qkv]
    y = client.attention(*rows_first, layout="bshd", **words)
    assert y.flags.c_contiguous
    close(y, want.swapaxes(1, 2))
    report = client.report
    assert report is not None
    assert report.staged_bytes == 0


@pytest.mark.extended
def test_masks_of_bools_and_of_numbers_are_added(client: tw.Client, qkv: Any) -> None:
    mask = np.random.default_rng(1).random((SQ, SK)) < 0.7
    mask[3] = False
    want, lse = by_hand.attend(*qkv, seen=mask)
    y, found = client.attention(*qkv, mask, return_lse=True)
    close(y, want)
    assert (y[:, :, 3] == 0).all()
    assert np.isneginf(found[:, :, 3]).all()
    close(np.delete(found, 3, 2), np.delete(lse, 3, 2))
    bias = random(H, 1, SK)
    close(client.attention(*qkv, bias), by_hand.attend(*qkv, bias=bias)[0])
    close(client.attention(*qkv, bias=bias[None]), by_hand.attend(*qkv, bias=bias)[0])


def test_numbers_of_python_are_fp32(client: tw.Client, qkv: Any) -> None:
    slopes, sinks, bias = [0.5, 0.25, 0.125, 0.0625], [0.1, 0.2, 0.3, 0.4], [float(j) / 9 for j in range(SK)]
    arrays = [np.array(item, np.float32) for item in (slopes, sinks, bias)]
    first = client.attention(*qkv, alibi_slopes=slopes, sinks=sinks)
    assert (first == client.attention(*qkv, alibi_slopes=arrays[0], sinks=arrays[1])).all()
    assert (client.attention(*qkv, bias) == client.attention(*qkv, arrays[2])).all()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_results_are_written_where_the_caller_wants_them(client: tw.Client, qkv: Any, layout: str) -> None:
    given = [item if layout == "bhsd" else np.ascontiguousarray(item.swapaxes(1, 2)) for item in qkv]
    shape = (B, H, SQ, D) if layout == "bhsd" else (B, SQ, H, D)
    want, sums = by_hand.attend(*qkv)
    for out in (client.empty(shape), np.empty(shape, np.float32), np.empty((*shape[:-1], 2 * D), np.float32)[..., ::2]):
        out[...] = np.nan
        lse = np.full((B, H, SQ), np.nan, np.float32)
        found = client.attention(*given, layout=layout, out=out, lse=lse)
        assert found[0] is out
        assert found[1] is lse
        close(out, want if layout == "bhsd" else want.swapaxes(1, 2))
        close(lse, sums)


@pytest.mark.extended
def test_dropout_follows_its_seeds(client: tw.Client, qkv: Any) -> None:
    first, rng = client.attention(*qkv, dropout_p=0.3, return_rng=True)
    again = client.attention(*qkv, dropout_p=0.3, rng=rng)
    other, values = client.attention(*qkv, dropout_p=0.3, return_randval=True)
    assert (first == again).all()
    assert not (first == other).all()
    assert values.shape == (B, H, SQ, SK)
    assert np.unique(values).size > 200
    seeded = client.attention(*qkv, dropout_p=0.3, seed=2**40 + 5, offset=9)
    assert (seeded == client.attention(*qkv, dropout_p=0.3, rng=[5, 2**8, 9, 0])).all()
    plan = client.plan_attention(*qkv, dropout_p=0.3)
    q, k, v = qkv
    assert (plan(q=q, k=k, v=v, rng=rng) == first).all()


def test_scores_and_a_bias_with_slopes_are_those_of_the_definition(client: tw.Client, qkv: Any) -> None:
    q, k, v = qkv
    slopes = np.linspace(0.1, 1, H, dtype=np.float32)
    bias, away = random(1, H, 1, SK), np.abs(np.arange(SQ)[:, None] - np.arange(SK))
    wide = np.repeat(k, H // HK, 1).astype(np.float64)
    scaled = q.astype(np.float64) @ wide.swapaxes(-1, -2) * D**-0.5
    seen = np.arange(SQ)[:, None] >= np.arange(SK)
    masked = np.where(seen, scaled + bias - slopes[:, None, None] * away, -np.inf)
    words = {"bias": bias, "alibi_slopes": slopes, "is_causal": True}
    for stage, want in (("scaled", scaled), ("masked", masked)):
        _, found = client.attention(q, k, v, return_scores=stage, **words)
        assert found.dtype == np.float32
        assert np.allclose(found, want, atol=1e-4)
    o, lse, p = client.attention(q, k, v, return_lse=True, return_scores="probabilities", **words)
    assert np.allclose(p, np.exp(masked - lse[..., None]), atol=1e-5)
    close(o, p.astype(np.float64) @ np.repeat(v, H // HK, 1))
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.attention(q, k, v, return_scores=True)
    assert (caught.value.field, caught.value.rule) == ("return_scores", "attribute_type")


def test_gradients_give_the_random_values_of_the_forward_pass(client: tw.Client, qkv: Any) -> None:
    o, lse, values, rng = client.attention(*qkv, dropout_p=0.3, return_lse=True, return_randval=True, return_rng=True)
    found = client.attention_backward(o, *qkv, o, lse, dropout_p=0.3, rng=rng, return_randval=True)
    assert len(found) == 4
    assert (found[3] == values).all()


def test_blocks_of_rows_have_factors_of_their_own(client: tw.Client) -> None:
    q, k, v = (random(1, heads, 24, D).astype(tw.DTYPES["fp8"]) for heads in (H, HK, HK))
    factors = [(np.abs(random(1, heads, count)) + 0.5) for heads, count in ((H, 3), (HK, 2), (HK, 2))]
    rows = [8, 12, 12]
    wide = [
        item.astype(np.float32) * np.repeat(factor, block, 2)[..., None]
        for item, factor, block in zip((q, k, v), factors, rows, strict=True)
    ]
    words = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    o = client.attention(q, k, v, **words, scale_block_q=8, scale_block_k=12, out_dtype="fp32")
    close(o, by_hand.attend(*wide)[0], 3e-2)


@pytest.mark.extended
def test_as_many_pages_as_sequences_want_a_word(client: tw.Client) -> None:
    pages = [random(2, 16, HK, D).astype(tw.DTYPES["fp8"]) for _ in "kv"]
    q, table, factors = random(2, H, 1, D).astype(tw.DTYPES["fp8"]), [[1], [0]], np.array([[1, 1], [2, 2]], np.float32)
    given = {"block_table": table, "seqlens_k": [16, 9], "v_descale": factors, "out_dtype": "fp32"}
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.attention_paged(q, *pages, **given)
    assert (caught.value.field, caught.value.rule) == ("v_descale.shape", "descale_shape")
    plain = client.attention_paged(q, *pages, table, [16, 9], out_dtype="fp32")
    by_page = client.attention_paged(q, *pages, **given, qscale="kv_blockscale")
    by_sequence = client.attention_paged(q, *pages, **given, qscale="pertensor")
    close(by_page, plain * np.array([2, 1], np.float32)[:, None, None, None])
    close(by_sequence, plain * np.array([1, 2], np.float32)[:, None, None, None])


def test_kernels_say_what_they_found_wrong(client: tw.Client, qkv: Any) -> None:
    o, lse, status = client.attention(*qkv, return_lse=True, return_status=True)
    assert o.shape[:3] == lse.shape
    assert status.tolist() == [0, 0, 0, 0]


def sequences() -> tuple[Any, Any, Any, Any, Any]:
    starts_q, starts_k = np.array([0, 9, 9, 20], np.int32), np.array([0, 14, 20, 20], np.int32)
    return random(20, H, D), random(20, HK, D), random(20, HK, D), starts_q, starts_k


def test_sequences_end_to_end_are_attended_each_by_itself(client: tw.Client) -> None:
    q, k, v, starts_q, starts_k = sequences()
    y, lse = client.attention_varlen(
        q, k, v, starts_q.tolist(), starts_k.astype(np.int64), 11, 14, mask="bottom_right", return_lse=True
    )
    want, sums = by_hand.attend(
        *(item.swapaxes(0, 1)[None] for item in (q[:9], k[:14], v[:14])), seen=visible(9, 14, right=0, bottom=True)
    )
    close(y[:9], want[0].swapaxes(0, 1))
    close(lse[:, :9], sums[0])
    assert (y[9:] == 0).all(), "the last sequence has no keys"
    assert np.isneginf(lse[:, 9:]).all()


@pytest.mark.extended
def test_gradients_are_those_of_the_definition(client: tw.Client, qkv: Any) -> None:
    q, k, v = qkv
    do = random(B, H, SQ, D)
    seen = visible(SQ, SK, right=0, bottom=True)
    want = by_hand.gradients(do, q, k, v, seen)
    o, lse = client.attention(q, k, v, mask="bottom_right", return_lse=True)
    found = client.attention_backward(do, q, k, v, o, lse, mask="bottom_right")
    for got, right in zip(found, want, strict=True):
        close(got, right)
    turned = [np.ascontiguousarray(item.swapaxes(1, 2)) for item in (do, q, k, v, o)]
    dq = client.empty((B, SQ, H, D))
    again = client.attention_backward(*turned, lse, mask="bottom_right", layout="bshd", dq=dq)
    assert again[0] is dq
    for got, right in zip(again, found, strict=True):
        assert (got.swapaxes(1, 2) == right).all()
    plan = client.plan_attention_backward(do, q, k, v, o, lse, mask="bottom_right")
    results = plan(q=q, k=k, v=v, o=o, do=do, lse=lse)
    assert all((results[name] == right).all() for name, right in zip(("dq", "dk", "dv"), found, strict=True))


@pytest.mark.extended
def test_gradients_with_dropout_need_the_seeds_of_the_forward_pass(client: tw.Client, qkv: Any) -> None:
    q, k, v = qkv
    do = random(B, H, SQ, D)
    o, lse, rng = client.attention(q, k, v, dropout_p=0.3, return_lse=True, return_rng=True)
    with pytest.raises(tw.InvalidArgumentError, match="seeds") as caught:
        client.attention_backward(do, q, k, v, o, lse, dropout_p=0.3)
    assert caught.value.rule == "seed_given_once"
    _, _, dv = client.attention_backward(do, q, k, v, o, lse, dropout_p=0.3, rng=rng)
    # The output is linear in the values: the same weights are dropped both times.
    close(np.vdot(dv, v), np.vdot(do, o), 1e-3)


def test_pages_are_read_by_either_table(client: tw.Client) -> None:
    k, v = random(6, 16, HK, D), random(6, 16, HK, D)
    k[4], v[4] = np.nan, np.nan
    q = random(2, H, 1, D)
    lengths = [40, 17]
    table = np.array([[3, 1, 5], [2, 0, 4]], np.int32)
    want = [by_hand.attend(q[b : b + 1], by_hand.paged(k, table[b], n), by_hand.paged(v, table[b], n))[0]
            for b, n in enumerate(lengths)]  # fmt: skip
    y = client.attention_paged(q, k, v, table, lengths)
    close(y, np.concatenate(want))
    flat = client.attention_paged(q, k, v, [3, 1, 5, 2, 0], lengths, page_starts=[0, 3, 5])
    close(flat, np.concatenate(want))
    plan = client.plan_attention_paged(q, k, v, table, np.array(lengths))
    close(plan(q=q, k=k, v=v, block_table=table, seqlens_k=np.array([40, 17], np.int32)), np.concatenate(want))
    rows = random(5, H, D)
    prompt = client.attention_paged(
        rows, k, v, table, lengths, cu_seqlens_q=[0, 2, 5], max_seqlen_q=3, mask="bottom_right"
    )
    seen = visible(3, 17, right=0, bottom=True)
    pages = [by_hand.paged(item, table[1], 17) for item in (k, v)]
    close(prompt[2:], by_hand.attend(rows[2:].swapaxes(0, 1)[None], *pages, seen)[0][0].swapaxes(0, 1))


def test_new_rows_are_appended_in_place_and_lengths_advance(client: tw.Client) -> None:
    k, v = client.empty((3, HK, 12, D)), client.empty((3, HK, 12, D))
    k[...], v[...] = np.nan, np.nan
    lengths = client.asarray(np.array([0, 4], np.int32))
    place = [2, 0]
    new_k, new_v = random(2, HK, 5, D), random(2, HK, 5, D)
    found = client.kv_append(new_k, new_v, k, v, lengths, cache_index=place, seqlens_out=lengths)
    assert found[0] is k
    assert lengths.tolist() == [5, 9]
    assert client.report is not None
    np.testing.assert_array_equal(k[2, :, :5], new_k[0])
    np.testing.assert_array_equal(v[0, :, 4:9], new_v[1])
    assert np.isnan(k[1]).all()
    assert int(np.isfinite(k).sum()) == new_k.size


@pytest.mark.parametrize("rotary", ["interleaved", "half"])
def test_keys_and_queries_are_rotated_by_their_position(client: tw.Client, rotary: str) -> None:
    angles = np.arange(20)[:, None] * 10.0 ** (-np.arange(8) / 8)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    k, v = client.zeros((1, 12, HK, D)), client.zeros((1, 12, HK, D))
    new = random(1, 3, HK, D)
    q = random(1, 3, H, D)
    _, _, turned = client.kv_append(
        new, random(1, 3, HK, D), k, v, [6], layout="bshd", q=q, rotary_cos=cos, rotary_sin=sin, rotary=rotary
    )
    for given, found in ((new, k[:, 6:9]), (q, turned)):
        want = given.astype(np.float64)
        first, second = (slice(0, 16, 2), slice(1, 16, 2)) if rotary == "interleaved" else (slice(0, 8), slice(8, 16))
        c, s = np.cos(angles[6:9])[None, :, None], np.sin(angles[6:9])[None, :, None]
        want[..., first] = given[..., first] * c - given[..., second] * s
        want[..., second] = given[..., first] * s + given[..., second] * c
        close(found, want, 1e-5)


def test_one_plan_serves_all_lengths(client: tw.Client) -> None:
    q, k, v, starts_q, starts_k = sequences()
    plan = client.plan_attention_varlen(q, k, v, starts_q, starts_k, 20, 20)
    for cut in (1, 7, 20):
        ends = np.array([0, cut, cut, 20], np.int32)
        y = plan(q=q, k=k, v=v, cu_seqlens_q=ends, cu_seqlens_k=ends)
        want, _ = by_hand.attend(*(item[:cut].swapaxes(0, 1)[None] for item in (q, k, v)))
        close(y[:cut], want[0].swapaxes(0, 1))


def test_the_asyncio_client_has_the_same_calls(real_server: Any, qkv: Any) -> None:
    async def both() -> tuple[Any, Any]:
        async with tw.aio.connect(real_server.target) as client:
            o, lse = await client.attention(*qkv, mask="bottom_right", return_lse=True)
            dq, *_ = await client.attention_backward(np.ones_like(o), *qkv, o, lse, mask="bottom_right")
            return o, dq

    o, dq = asyncio.run(both())
    seen = visible(SQ, SK, right=0, bottom=True)
    close(o, by_hand.attend(*qkv, seen)[0])
    close(dq, by_hand.gradients(np.ones_like(o), *qkv, seen)[0])


@pytest.mark.parametrize(
    ("words", "field", "rule"),
    [
        ({"layout": "sbhd"}, "layout", "layout_known"),
        ({"window": (1, 2, 3)}, "window", "window_pair"),
        ({"scale": 0}, "scale", "scale_nonzero"),
        ({"enable_gqa": False}, "k.shape", "head_groups"),
        ({"dropout_p": 0.1, "seed": -1}, "seed", "seed_range"),
        ({"dropout_p": 0.1, "seed": 3, "rng": [1, 2, 3, 4]}, "seed", "seed_given_once"),
        ({"attn_mask": np.ones((SQ, SK)), "bias": np.ones((SQ, SK))}, "attn_mask", "one_bias"),
        ({"seqlens_k": [2**40, 1]}, "seqlens_k", "index_range"),
        ({"dropout_p": 1.0}, "dropout_p", "dropout_range"),
        ({"softcap": 0.0}, "softcap", "softcap_positive"),
        ({"mask": "diagonal"}, "mask", "mask_word"),
        ({"bias": np.zeros((3, SK), np.float32)}, "bias.shape", "bias_shape"),
        ({"seqlens_k": [30, 1]}, "seqlens_k[0]", "seqlen_range"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks.shape", "sinks_shape"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(
    client: tw.Client, qkv: Any, words: Any, field: str, rule: str
) -> None:
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.attention(*qkv, **words)
    assert (caught.value.field, caught.value.rule) == (field, rule)
    assert caught.value.fix
