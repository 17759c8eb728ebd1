"""Attention over latent caches on the GPU, in pages and not, against float64; lengths are data in a graph too."""

from __future__ import annotations

import math
from typing import Any

import pytest

import tilewright

KEYS, VALUES, PAGE = 576, 512, 64
BOUND = {"bf16": 8e-3, "fp16": 2e-3}


def paged(torch: Any, cache: Any) -> tuple[Any, Any]:
    """Pages in any order, and their table."""
    batch, room, wide = cache.shape
    count = batch * room // PAGE
    order = torch.randperm(count, device="cuda")
    pages = torch.empty(count, PAGE, 1, wide, device="cuda", dtype=cache.dtype)
    pages[order] = cache.view(count, PAGE, 1, wide)
    return pages, order.view(batch, -1).int()


def truth(torch: Any, q: Any, keys: Any) -> Any:
    """One sequence ``[H, S, D]``, causal from the last query and key on."""
    q, keys = q.double(), keys.double()
    i, j = torch.arange(q.shape[1], device="cuda")[:, None], torch.arange(len(keys), device="cuda")
    s = (q @ keys.T * KEYS**-0.5).masked_fill(j > i + len(keys) - q.shape[1], -math.inf)
    return torch.softmax(s, -1).nan_to_num(0.0) @ keys[:, :VALUES]


def check(torch: Any, out: Any, q: Any, cache: Any, lengths: list[int], bound: float) -> None:
    for b, length in enumerate(lengths):
        want, have = truth(torch, q[b], cache[b, :length]), out[b].double()
        if length == 0:
            assert not have.any()
        else:
            assert float((have - want).norm() / want.norm()) < bound


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("heads", "queries"), [(8, 1), (16, 1), (16, 2), (40, 1), (128, 3)])
def test_a_cache_of_pages(torch: Any, client: tilewright.Client, heads: int, queries: int, dtype: str) -> None:
    torch.manual_seed(heads + queries)
    kind, lengths = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], [700, 0, 1003, 64]
    cache = torch.randn(4, 1024, KEYS, device="cuda").to(kind)
    for b, length in enumerate(lengths):
        cache[b, length:] = math.nan
    pages, table = paged(torch, cache)
    q = torch.randn(4, heads, queries, KEYS, device="cuda").to(kind)
    seen = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    for splits in (None, 1, 3, 12):
        out = torch.full((4, heads, queries, VALUES), math.nan, device="cuda", dtype=kind)
        client.attention_paged(
            q, pages, None, table, seen, head_dim_v=VALUES, mask="bottom_right", num_splits=splits, out=out
        )
        torch.cuda.synchronize()
        check(torch, out, q, cache, lengths, BOUND[dtype])


def test_a_graph_is_replayed_with_other_lengths(torch: Any, client: tilewright.Client) -> None:
    torch.manual_seed(5)
    cache = torch.randn(3, 4096, KEYS, device="cuda").to(torch.bfloat16)
    pages, table = paged(torch, cache)
    q = torch.randn(3, 16, 1, KEYS, device="cuda").to(torch.bfloat16)
    seen = torch.tensor([4096, 17, 100], dtype=torch.int32, device="cuda")
    out = torch.empty(3, 16, 1, VALUES, device="cuda", dtype=torch.bfloat16)
    call = lambda: client.attention_paged(q, pages, None, table, seen, head_dim_v=VALUES, out=out)  # noqa: E731
    call()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            call()
    for lengths in ([4096, 17, 100], [3, 2000, 4095]):
        seen.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        check(torch, out, q, cache, lengths, BOUND["bf16"])
