"""Steps of decoding over sequences of any lengths on the GPU, against float64: lengths are data, in a graph too."""

from __future__ import annotations

import math
from typing import Any

import pytest
from gpu_cases import relative, torch_dtype

import tilewright

BOUND = {"bf16": 6e-3, "fp16": 1e-3}
LENGTHS = {
    "mixed": [700, 0, 33, 4096, 1, 64, 65, 2000],
    "one long": [1] * 39 + [4096],
    "short": list(range(1, 130)),
    "alone": [4001],
    "many": [(37 * i) % 900 for i in range(300)],
    "none": [0, 0, 0],
}


def cache_of(torch: Any, kind: Any, lengths: list[int], heads: int, hdim: int, page: int) -> tuple[Any, Any, Any, Any]:
    """Keys and values of every sequence, NaN behind its tokens; and the same as pages in any order, and their table."""
    batch, columns = len(lengths), -(-max(max(lengths), 1) // page) + 1
    dense = torch.randn(2, batch, columns * page, heads, hdim, device="cuda").to(kind)
    behind = torch.arange(columns * page, device="cuda")[None] >= torch.tensor(lengths, device="cuda")[:, None]
    dense.masked_fill_(behind[None, :, :, None, None], math.nan)
    order = torch.randperm(batch * columns, device="cuda")
    pages = torch.empty(2, batch * columns, page, heads, hdim, device="cuda", dtype=kind)
    pages[:, order] = dense.view(2, batch * columns, page, heads, hdim)
    return dense, pages[0], pages[1], order.view(batch, columns).int()


def truth(torch: Any, q: Any, dense: Any, lengths: list[int], window: int, sinks: Any) -> Any:
    """[B, H, S, D] in float64: the queries are the last tokens of their sequences."""
    found = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
    for b, length in enumerate(lengths):
        k, v = (x[b, :length].double().transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[2], 0) for x in dense)
        s = torch.einsum("hsd,hkd->hsk", q[b].double(), k) * q.shape[-1] ** -0.5
        i = torch.arange(q.shape[2], device="cuda")[:, None] + length - q.shape[2]
        j = torch.arange(length, device="cuda")
        s = s.masked_fill((j > i) | (j < i - window if window else j < 0), -math.inf)
        if sinks is not None:
            s = torch.cat([s, sinks.double()[:, None, None].expand(-1, s.shape[1], 1)], 2)
        if s.shape[2]:
            found[b] = torch.softmax(s, 2).nan_to_num(0.0)[:, :, :length] @ v
    return found


CASES = [
    # Heads, elements, type, page, queries of a step, window, learned sinks.
    ((32, 8), 128, "bf16", 16, 1, 0, False),
    ((16, 2), 64, "fp16", 32, 1, 0, False),
    ((8, 8), 128, "bf16", 64, 2, 0, True),
    ((16, 2), 256, "bf16", 16, 3, 300, False),
    ((24, 2), 128, "fp16", 128, 2, 0, False),
]


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0][0]}x{case[1]}-{case[4]}")
def test_every_sequence_sees_its_own_keys(torch: Any, client: tilewright.Client, case: Any, name: str) -> None:
    (heads, key_heads), hdim, dtype, page, queries, window, has_sinks = case
    torch.manual_seed(hdim + queries + len(name))
    kind, lengths = torch_dtype(torch, dtype), LENGTHS[name]
    dense, k, v, table = cache_of(torch, kind, lengths, key_heads, hdim, page)
    q = torch.randn(len(lengths), heads, queries, hdim, device="cuda").to(kind)
    sinks = torch.randn(heads, device="cuda") if has_sinks else None
    mask: dict[str, Any] = {"mask": "bottom_right"}
    if window:
        mask = {"window": (window, 0), "mask_align": "bottom_right"}
    if sinks is not None:
        mask["sinks"] = sinks
    seen = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    want = truth(torch, q, dense, lengths, window, sinks)
    for splits in (None, None, 3):  # twice: counters are as they were
        out = torch.full_like(q, math.nan)
        _, status = client.attention_paged(
            q, k, v, table, seen, out=out, num_splits=splits, return_status=True, **mask
        )  # fmt: skip
        torch.cuda.synchronize()
        assert not status.any() and not out.isnan().any()
        if want.any():
            error, report = relative(torch, out, want), client.report
            assert error < BOUND[dtype], f"{error:.2e} with {report and report.kernels}"
        else:
            assert not out.any()


def test_a_graph_follows_lengths_that_change(torch: Any, client: tilewright.Client) -> None:
    torch.manual_seed(3)
    room, (heads, key_heads), hdim = 2048, (32, 8), 128
    dense, k, v, table = cache_of(torch, torch.bfloat16, [room] * 24, key_heads, hdim, 16)
    q = torch.randn(24, heads, 1, hdim, device="cuda").bfloat16()
    seen = torch.full((24,), 5, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)
    client.attention_paged(q, k, v, table, seen, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # layers of a step
            client.attention_paged(q, k, v, table, seen, out=out)
    for turn in range(6):
        lengths = torch.randint(0, room + 1 if turn % 2 else 100, (24,)).tolist()
        seen.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        want = truth(torch, q, dense[:, :, :room], lengths, 0, None)
        assert relative(torch, out, want) < BOUND["bf16"]
