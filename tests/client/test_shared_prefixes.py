"""Prefixes that sequences share, by calls and in caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attention_by_hand as by_hand
import numpy as np
import pytest
from attention_by_hand import visible
from client_helpers import close, random

import tilewright as tw

H, HK, D, PAGE = 4, 2, 32, 16


@pytest.fixture(scope="module")
def client(real_server: Any) -> Iterator[tw.Client]:
    with tw.connect(real_server.target) as opened:
        yield opened


class Rows:
    """Keys and values of each sequence, those of its prefix first."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[Any, Any]] = {}

    def begin(self, item: int, prefix: int | None = None) -> None:
        empty = np.zeros((HK, 0, D), np.float32)
        self.of[item] = (empty, empty) if prefix is None else self.of[prefix]

    def append(self, ids: list[int], k: Any, v: Any) -> None:
        for place, item in enumerate(ids):
            self.of[item] = tuple(np.concatenate([a, b[place]], 1) for a, b in zip(self.of[item], (k, v), strict=True))

    def attend(self, item: int, q: Any) -> Any:
        k, v = (array[None] for array in self.of[item])
        return by_hand.attend(q[None], k, v, visible(q.shape[1], k.shape[2], right=0, bottom=True))[0][0]


def step(count: int, rows: int = 1) -> list[Any]:
    return [random(count, heads, rows, D) for heads in (H, HK, HK)]


def test_sequences_of_a_cache_rest_on_a_prefix(client: tw.Client) -> None:
    rows = Rows()
    with client.kv_cache(16, PAGE, HK, D, dtype="fp32", sequences=6, max_pages=4) as cache:
        first, other = cache.add(), cache.add()
        for item, count in ((first, 37), (other, 5)):
            rows.begin(item)
            _, k, v = step(1, count)
            cache.append(item, k, v)
            rows.append([item], k, v)
        a, b, c = (cache.add(prefix=item) for item in (first, first, other))
        alone = cache.add()
        for item, prefix in ((a, first), (b, first), (c, other), (alone, None)):
            rows.begin(item, prefix)
        for ids in ([a, b], [a, b, c, alone], [c, a], [alone], [b, alone]):
            q, k, v = step(len(ids))
            y, lse = cache.attend(ids, q, k=k, v=v, return_lse=True)
            rows.append(ids, k, v)
            for place, item in enumerate(ids):
                close(y[place], rows.attend(item, q[place]))
            assert lse.shape == (len(ids), H, 1)
        assert cache.lengths == {item: found[0].shape[1] for item, found in rows.of.items()}
        # Several rows of each, end to end.
        q, k, v = random(7, H, D), random(7, HK, D), random(7, HK, D)
        y = cache.attend([b, a], q, k=k, v=v, cu_seqlens=[0, 4, 7])
        for item, part in ((b, slice(0, 4)), (a, slice(4, 7))):
            rows.append([item], k[part].swapaxes(0, 1)[None], v[part].swapaxes(0, 1)[None])
            close(y[part].swapaxes(0, 1), rows.attend(item, q[part].swapaxes(0, 1)))
        used = 16 - cache.free_pages
        assert used == 3 + 1 + 1 + 1 + 1 + 1  # what is shared lies there once
        for call in (lambda: cache.append(first, *step(1)[1:]), lambda: cache.free(first)):
            with pytest.raises(tw.InvalidArgumentError) as caught:
                call()
            assert caught.value.rule == "cache_prefix" and caught.value.fix
        with pytest.raises(tw.InvalidArgumentError) as nested:
            cache.add(prefix=a)
        assert (nested.value.rule, nested.value.field) == ("cache_prefix", "prefix")
        cache.free([first, a, b])
        assert cache.free_pages == 16 - 3


def test_rows_behind_a_prefix_are_rotated_by_their_position(client: tw.Client) -> None:
    angles = np.arange(40)[:, None] * 10.0 ** (-np.arange(16) / 16)
    tables = {"rotary_cos": np.cos(angles).astype(np.float32), "rotary_sin": np.sin(angles).astype(np.float32)}
    with client.kv_cache(8, PAGE, HK, D, dtype="fp32", sequences=4) as cache:
        whole, first, other = (cache.add() for _ in range(3))
        _, k, v = step(1, 20)
        for item in (whole, first):
            cache.append(item, k, v, rotary="half", **tables)
        behind = cache.add(prefix=first)
        q, k, v = step(1)
        close(*(cache.attend(item, q, k=k, v=v, rotary="half", **tables) for item in (whole, behind)))
        with pytest.raises(tw.InvalidArgumentError) as caught:
            cache.append([behind, other], *step(2)[1:], rotary="half", **tables)
        assert (caught.value.rule, caught.value.field) == ("rotary_positions", "ids")


def test_a_call_over_pages_takes_prefixes(client: tw.Client) -> None:
    k, v = random(8, PAGE, HK, D), random(8, PAGE, HK, D)
    q = random(4, 3, H, D)
    table, lengths = np.array([[6], [7], [6], [5]], np.int32), np.array([3, 16, 5, 3], np.int32)
    prefixes = {"prefix_table": [[0, 1], [2, 3]], "prefix_seqlens": [20, 32]}
    given = (k, v, table, lengths)
    y, status = client.attention_paged(q, *given, mask="bottom_right", layout="bshd", return_status=True, **prefixes)
    assert status.tolist() == [0] * 4
    for b in range(4):
        pages = [0, 1] if b < 2 else [2, 3]
        keys, values = (
            np.concatenate([pool[pages].reshape(-1, HK, D)[: (20, 32)[b // 2]], pool[table[b, 0]][: lengths[b]]])
            for pool in (k, v)
        )
        seen = visible(3, len(keys), right=0, bottom=True)
        wanted = by_hand.attend(q[b : b + 1].swapaxes(1, 2), *(x.swapaxes(0, 1)[None] for x in (keys, values)), seen)
        close(y[b].swapaxes(0, 1), wanted[0][0])
    for changed, field, rule in (
        ({"prefix_seqlens": [20, 33]}, "prefix_seqlens[1]", "seqlen_range"),
        ({"prefix_table": [[0, 1], [2, 8]]}, "prefix_table[3]", "block_table_range"),
        ({"prefix_starts": [0, 6, 13]}, "prefix_starts[2]", "cu_seqlens_ascending"),
    ):
        with pytest.raises(tw.InvalidArgumentError) as caught:
            client.attention_paged(q, *given, mask="bottom_right", layout="bshd", **{**prefixes, **changed})
        assert (caught.value.field, caught.value.rule) == (field, rule)
