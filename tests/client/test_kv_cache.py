"""Caches of keys and values that the server keeps: pages, lengths, and one message for a step of decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import attention_by_hand as by_hand
import numpy as np
import pytest
from attention_by_hand import visible
from client_helpers import close, objects, random

import tilewright as tw

H, HK, D = 4, 2, 32


@pytest.fixture(scope="module")
def client(real_server: Any) -> Iterator[tw.Client]:
    with tw.connect(real_server.target) as opened:
        yield opened


class Told:
    """What a cache should hold: every row that was appended, by sequence."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[Any, Any]] = {}

    def append(self, ids: list[int], k: Any, v: Any) -> None:
        for place, item in enumerate(ids):
            old = self.rows.get(item, (np.zeros((HK, 0, D)), np.zeros((HK, 0, D))))
            self.rows[item] = tuple(np.concatenate([a, b[place]], 1) for a, b in zip(old, (k, v), strict=True))

    def attend(self, item: int, q: Any) -> Any:
        k, v = (array[None] for array in self.rows[item])
        seen = visible(q.shape[1], k.shape[2], right=0, bottom=True)
        return by_hand.attend(q[None], k, v, seen)[0][0]


@pytest.mark.extended
def test_a_step_appends_and_attends_whatever_sequences_it_is_for(client: tw.Client) -> None:
    told = Told()
    with client.kv_cache(20, 16, HK, D, dtype="fp32", sequences=5, max_pages=6) as cache:
        a, b, c = (cache.add() for _ in range(3))
        steps = [([a, b], 17), ([c], 5), ([a, c], 1), ([a, b, c], 1), ([b], 1), ([c, a], 1), ([a, b, c], 17)]
        for ids, count in steps:
            q, k, v = random(len(ids), H, count, D), random(len(ids), HK, count, D), random(len(ids), HK, count, D)
            y = cache.attend(ids, q, k=k, v=v)
            told.append(ids, k, v)
            for place, item in enumerate(ids):
                close(y[place], told.attend(item, q[place]))
            assert cache.lengths == {item: told.rows.get(item, (np.zeros((0, 0)),))[0].shape[1] for item in (a, b, c)}
        used = sum(-(-length // 16) for length in cache.lengths.values())
        assert cache.free_pages == 20 - used
        # Without new rows it only reads.
        q = random(1, H, 1, D)
        close(cache.attend(b, q)[0], told.attend(b, q[0]))
        assert cache.lengths[b] == told.rows[b][0].shape[1]


def test_prompts_of_different_lengths_go_in_together(client: tw.Client) -> None:
    told = Told()
    with client.kv_cache(8, 16, HK, D, dtype="fp32", sequences=2) as cache:
        a, b = cache.add(), cache.add()
        k, v, q = random(22, HK, D), random(22, HK, D), random(22, H, D)
        y = cache.attend([a, b], q, k=k, v=v, cu_seqlens=[0, 3, 22])
        for item, part in ((a, slice(0, 3)), (b, slice(3, 22))):
            told.append([item], k[part].swapaxes(0, 1)[None], v[part].swapaxes(0, 1)[None])
            close(y[part].swapaxes(0, 1), told.attend(item, q[part].swapaxes(0, 1)))
        cache.append([b, a], random(2, HK, 1, D), random(2, HK, 1, D))
        assert cache.lengths == {a: 4, b: 20}


def test_rotated_queries_meet_rotated_keys(client: tw.Client) -> None:
    angles = np.arange(40)[:, None] * 10.0 ** (-np.arange(16) / 16)
    tables = {"rotary_cos": np.cos(angles).astype(np.float32), "rotary_sin": np.sin(angles).astype(np.float32)}

    def turned(rows: Any, first: int) -> Any:
        c, s = (np.repeat(f(angles[first : first + rows.shape[1]]), 1, -1) for f in (np.cos, np.sin))
        x, y = rows[..., :16], rows[..., 16:]
        return np.concatenate([x * c - y * s, x * s + y * c], -1)

    told = Told()
    with client.kv_cache(4, 16, HK, D, dtype="fp32", sequences=1) as cache:
        a = cache.add()
        for count in (20, 1, 1):
            q, k, v = random(1, H, count, D), random(1, HK, count, D), random(1, HK, count, D)
            first = cache.lengths[a]
            y = cache.attend(a, q, k=k, v=v, rotary="half", **tables)
            told.append([a], turned(k[0], first)[None], v)
            close(y[0], told.attend(a, turned(q[0], first)))


def test_pages_are_given_out_and_taken_back(client: tw.Client) -> None:
    with client.kv_cache(3, 16, HK, D, dtype="fp32", sequences=2, max_pages=2) as cache:
        a, b = cache.add(), cache.add()
        with pytest.raises(tw.ResourceExhaustedError) as caught:
            cache.add()
        assert caught.value.rule == "cache_sequences"
        cache.append([a, b], random(2, HK, 16, D), random(2, HK, 16, D))
        with pytest.raises(tw.ResourceExhaustedError) as caught:
            cache.append([a, b], random(2, HK, 1, D), random(2, HK, 1, D))
        assert caught.value.rule == "cache_full"
        assert cache.lengths == {a: 16, b: 16}
        assert cache.free_pages == 1
        cache.append(a, random(1, HK, 16, D), random(1, HK, 16, D))
        with pytest.raises(tw.ResourceExhaustedError) as caught:
            cache.append(a, random(1, HK, 1, D), random(1, HK, 1, D))
        assert caught.value.field == "max_pages"
        cache.free(a)
        assert cache.free_pages == 2
        with pytest.raises(tw.NotFoundError) as missing:
            cache.append(a, random(1, HK, 1, D), random(1, HK, 1, D))
        assert missing.value.rule == "cache_sequence"
        again = cache.add()
        told = Told()
        k, v, q = random(1, HK, 2, D), random(1, HK, 2, D), random(1, H, 2, D)
        told.append([again], k, v)
        close(cache.attend(again, q, k=k, v=v)[0], told.attend(again, q[0]))


def test_a_call_that_fails_leaves_the_cache_as_it_was(client: tw.Client) -> None:
    told = Told()
    with client.kv_cache(8, 16, HK, D, dtype="fp32", sequences=1) as cache:
        a = cache.add()
        k, v = random(1, HK, 5, D), random(1, HK, 5, D)
        cache.append(a, k, v)
        told.append([a], k, v)
        with pytest.raises(tw.InvalidArgumentError):
            cache.attend(a, random(1, 3, 1, D), k=random(1, HK, 1, D), v=random(1, HK, 1, D))
        with pytest.raises(tw.InvalidArgumentError):
            cache.append(a, random(1, HK, 1, D + 8), random(1, HK, 1, D))
        assert cache.lengths == {a: 5}
        q = random(1, H, 1, D)
        close(cache.attend(a, q)[0], told.attend(a, q[0]))


def test_as_many_keys_as_queries_are_appended(client: tw.Client) -> None:
    told = Told()
    with client.kv_cache(8, 16, HK, D, dtype="fp32", sequences=2) as cache:
        a, b = cache.add(), cache.add()
        k, v, q = random(2, HK, 2, D), random(2, HK, 2, D), random(2, H, 1, D)
        with pytest.raises(tw.InvalidArgumentError) as caught:
            cache.attend([a, b], q, k=k, v=v)
        assert (caught.value.field, caught.value.rule) == ("k.shape", "rows_agree")
        assert cache.lengths == {a: 0, b: 0}
        cache.append(iter([a, b]), k, v)
        told.append([a, b], k, v)
        y = cache.attend([a, b], q)
        for place, item in enumerate((a, b)):
            close(y[place], told.attend(item, q[place]))


@pytest.mark.extended
def test_the_server_frees_a_cache_when_it_is_closed(client: tw.Client) -> None:
    before = objects(client)
    cache = client.kv_cache(4, 16, HK, D, dtype="fp32", sequences=1)
    cache.append(cache.add(), random(1, HK, 1, D), random(1, HK, 1, D))
    assert objects(client)[1] == before[1] + 4
    cache.close()
    assert objects(client) == before
    with pytest.raises(tw.InvalidArgumentError, match="closed"):
        cache.add()


@pytest.mark.extended
def test_a_cache_ends_with_its_session(own_real_server: Any) -> None:
    with tw.connect(own_real_server.target) as client:
        cache = client.kv_cache(4, 16, HK, D, dtype="fp32", sequences=1)
        a = cache.add()
        cache.append(a, random(1, HK, 1, D), random(1, HK, 1, D))
        client.reconnect()
        with pytest.raises(tw.NotFoundError) as caught:
            cache.append(a, random(1, HK, 1, D), random(1, HK, 1, D))
        assert caught.value.rule == "session_owner"
        assert objects(client)[1] == 0


@pytest.mark.parametrize(
    ("sizes", "words", "field"),
    [
        ((0, 16, HK, D), {}, "pages"),
        ((4, 16, HK, D), {"layout": "tiled"}, "layout"),
        ((4, 16, HK, D), {"dtype": "fp128"}, "dtype"),
        ((4, 2, HK, D), {"layout": "vectorized"}, "page_size"),
        ((np.int32(1 << 20), 16, HK, D), {"sequences": np.int32(1 << 20)}, "max_pages"),
    ],
)
def test_sizes_that_make_no_cache_are_refused(client: tw.Client, sizes: Any, words: Any, field: str) -> None:
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.kv_cache(*sizes, **words)
    assert caught.value.field == field


def test_the_asyncio_client_has_caches_too(real_server: Any) -> None:
    async def decode() -> tuple[Any, Any]:
        told = Told()
        async with (
            tw.aio.connect(real_server.target) as client,
            await client.kv_cache(4, 16, HK, D, dtype="fp32", sequences=1) as cache,
        ):
            a = cache.add()
            for count in (17, 1):
                q, k, v = random(1, H, count, D), random(1, HK, count, D), random(1, HK, count, D)
                told.append([a], k, v)
                y = await cache.attend(a, q, k=k, v=v)
            return y[0], told.attend(a, q[0])

    found, want = asyncio.run(decode())
    close(found, want)


# ---- caches in fp8, and what attend takes ----

BF16 = tw.DTYPES["bf16"]


def stored(rows: Any, factor: Any) -> Any:
    """Rows [B, Hk, N, D] as a cache of fp8 gives them back."""
    wide = rows.astype(np.float32) / np.asarray(factor, np.float32).reshape(-1, 1, 1)
    held = np.clip(wide, -448, 448).astype(tw.DTYPES["fp8"]).astype(np.float64)
    return held * np.asarray(factor, np.float64).reshape(-1, 1, 1)


def test_a_cache_of_fp8_rounds_what_is_appended_and_gives_it_back_times_its_factors(client: tw.Client) -> None:
    told, factor = Told(), [0.02, 0.5]
    words: dict[str, Any] = {"dtype": "fp8", "sequences": 2, "k_descale": factor, "v_descale": 0.03}
    with client.kv_cache(8, 16, HK, D, **words) as cache:
        ids = [cache.add(), cache.add()]
        for count in (5, 1):
            k, v, q = (random(2, heads, count, D).astype(BF16) for heads in (HK, HK, H))
            told.append(ids, stored(k, factor), stored(v, [0.03] * HK))
            y = cache.attend(ids, q, k=k, v=v)
            for place, item in enumerate(ids):
                close(y[place], told.attend(item, q[place]), 2e-2)
        cache.append(ids, k, v)
        told.append(ids, stored(k, factor), stored(v, [0.03] * HK))
        k8, v8 = (item.astype(tw.DTYPES["fp8"]) for item in (k, v))  # stored as they come
        cache.append(ids, k8, v8)
        told.append(ids, *(item.astype(np.float64) * scale for item, scale in
                           ((k8, np.reshape(factor, (-1, 1, 1))), (v8, 0.03))))  # fmt: skip
        y = cache.attend(ids, q)
        for place, item in enumerate(ids):
            close(y[place], told.attend(item, q[place]), 2e-2)


def test_a_step_has_slopes_learned_sinks_windows_and_logarithms(client: tw.Client) -> None:
    told, slopes, sinks = Told(), np.array([0.5, 0.25, 0.125, 0.0625]), np.array([0.1, 0.2, 0.3, 0.4])
    with client.kv_cache(8, 16, HK, D, dtype="fp32", sequences=1) as cache:
        a = cache.add()
        for count in (9, 1):  # also one query alone stands for the last token
            q, k, v = (random(1, heads, count, D) for heads in (H, HK, HK))
            told.append([a], k, v)
            keys, values = (array[None] for array in told.rows[a])
            rows, length = np.arange(count)[:, None], keys.shape[2]
            distance = np.abs(rows + length - count - np.arange(length))
            y, lse = cache.attend(a, q, k=k, v=v, alibi_slopes=slopes.tolist(), return_lse=True)
            bias = -slopes[:, None, None] * distance
            want, sums = by_hand.attend(q, keys, values, visible(count, length, right=0, bottom=True), bias=bias)
            close(y, want)
            close(lse, sums)
        y, lse = cache.attend(a, q, sinks=sinks.tolist(), window=(2, 0), sink_size=1, return_lse=True)
        seen = visible(1, length, right=0, left=2, bottom=True)
        seen[:, 0] = True
        want, sums = by_hand.attend(q, keys, values, seen)
        total = np.logaddexp(sums, sinks[:, None])
        close(lse, total)
        close(y, want * np.exp(sums - total)[..., None])


@pytest.mark.parametrize(
    ("words", "field", "rule"),
    [
        ({"dtype": "bf16", "k_descale": 0.5}, "k_descale", "scale_dtype"),
        ({"dtype": "fp8", "v_descale": [1.0, 2.0, 3.0]}, "v_descale", "descale_shape"),
        ({"dtype": "fp8", "k_descale": 0.0}, "k_descale", "descale_shape"),
        ({"dtype": "fp8", "k_descale": "large"}, "k_descale", "descale_shape"),
    ],
)
def test_factors_that_mean_nothing_are_refused(client: tw.Client, words: Any, field: str, rule: str) -> None:
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.kv_cache(4, 16, HK, D, **words)
    assert (caught.value.field, caught.value.rule) == (field, rule)
    assert caught.value.fix


def test_steps_without_effect_are_refused(client: tw.Client) -> None:
    with client.kv_cache(4, 16, HK, D, dtype="fp8", sequences=1) as cache:
        a = cache.add()
        k = random(1, HK, 1, D)
        with pytest.raises(tw.InvalidArgumentError) as caught:
            cache.append(a, k.astype(tw.DTYPES["fp8"]), k.astype(tw.DTYPES["fp8"]), k_descale=0.5)
        assert (caught.value.field, caught.value.rule) == ("k_descale", "scale_dtype")
        cache.append(a, k.astype(BF16), k.astype(BF16), k_descale=0.5)  # as the fix says
        with pytest.raises(tw.InvalidArgumentError) as caught:
            cache.attend(a, random(1, H, 1, D).astype(BF16), sink_size=2)
        assert (caught.value.field, caught.value.rule) == ("sink_size", "no_effect")
