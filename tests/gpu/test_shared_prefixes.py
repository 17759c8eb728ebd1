"""Prefixes that sequences share on the GPU, and tiles of many rows over parts of the keys, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
from gpu_cases import relative, torch_dtype

import tilewright

BOUND = {"bf16": 8e-3, "fp16": 1.5e-3}
"""Both parts are rounded to the type of the results, and so is their sum."""

Tensor = Any


class Cache:
    """Pages in any order, with NaN wherever no token is; ``rows(name)`` has the keys and values of each table row."""

    def __init__(self, torch: Any, kind: Any, page: int, heads: int, hdim: int, lengths: dict[str, list[int]]) -> None:
        self.torch, columns = torch, {name: -(-max(found) // page) + 1 for name, found in lengths.items()}
        count = sum(len(found) * columns[name] for name, found in lengths.items()) + 5
        order, at = torch.randperm(count, device="cuda").int(), 0
        self.pages = [torch.full((count, page, heads, hdim), math.nan, device="cuda").to(kind) for _ in "kv"]
        self.tables: dict[str, Tensor] = {}
        self.tokens: dict[str, list[list[Tensor]]] = {}
        for name, found in lengths.items():
            table = order[at : at + len(found) * columns[name]].view(len(found), -1)
            at += table.numel()
            self.tables[name], self.tokens[name] = table.contiguous(), []
            for row, length in zip(table.tolist(), found, strict=True):
                held = [torch.randn(length, heads, hdim, device="cuda").to(kind) for _ in "kv"]
                for first in range(0, length, page):
                    for pool, rows in zip(self.pages, held, strict=True):
                        pool[row[first // page], : len(rows[first : first + page])] = rows[first : first + page]
                self.tokens[name].append(held)

    def lengths(self, name: str) -> Tensor:
        found = [len(keys) for keys, _ in self.tokens[name]]
        return self.torch.tensor(found, dtype=self.torch.int32, device="cuda")


def truth(torch: Any, q: Tensor, parts: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """[heads, D] of one row of queries over all parts of its keys, and the logarithm of the sum, in float64."""
    k, v = (torch.cat([part[place] for part in parts]).double() for place in (0, 1))
    group = q.shape[0] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("hd,khd->hk", q.double(), k) * q.shape[-1] ** -0.5
    return torch.einsum("hk,khd->hd", torch.softmax(s, 1), v), torch.logsumexp(s, 1)


CASES = {
    # Heads, elements, type, page, rows of each group, lengths of prefixes.
    "packed": ((32, 8), 128, "bf16", 16, [64], [4999]),
    "two groups": ((16, 2), 128, "fp16", 64, [40, 40], [3000, 129]),
    "ragged groups": ((8, 2), 64, "bf16", 16, [70, 0, 3, 19], [2049, 500, 0, 1000]),
    "group of five": ((10, 2), 128, "bf16", 32, [33, 33], [1500, 2100]),
    "large heads": ((8, 2), 256, "bf16", 16, [48], [2500]),
    "many rows": ((16, 2), 128, "bf16", 16, [300], [1200]),
    "few": ((8, 2), 128, "bf16", 16, [4, 4], [3000, 700]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_prefix_and_what_follows_it_are_one(torch: Any, client: tilewright.Client, name: str) -> None:
    (heads, key_heads), hdim, dtype, page, rows, shared = CASES[name]
    torch.manual_seed(len(name))
    kind, batch, equal = torch_dtype(torch, dtype), sum(rows), len(set(rows)) == 1
    own = [0, *torch.randint(1, 200, (batch - 1,)).tolist()]
    cache = Cache(torch, kind, page, key_heads, hdim, {"prefix": shared, "rest": own})
    q = torch.randn(batch, heads, 1, hdim, device="cuda").to(kind)
    of = {"prefix_table": cache.tables["prefix"], "prefix_seqlens": cache.lengths("prefix")}
    if not equal:
        starts = torch.tensor([0, *rows]).cumsum(0)
        of["prefix_starts"] = starts.int().cuda()
    for status in (False, True):
        out = torch.full_like(q, math.nan)
        found = client.attention_paged(
            q, *cache.pages, cache.tables["rest"], cache.lengths("rest"), out=out, return_lse=True,
            return_status=status, **of,
        )  # fmt: skip
        torch.cuda.synchronize()
        group_of = [group for group, count in enumerate(rows) for _ in range(count)]
        want = [
            truth(torch, q[b, :, 0], [cache.tokens["prefix"][group_of[b]], cache.tokens["rest"][b]])
            for b in range(batch)
        ]
        error = relative(torch, out[:, :, 0], torch.stack([o for o, _ in want]))
        report = client.report
        assert error <= BOUND[dtype], f"{error:.2e} with {report and report.kernels}"
        sums = torch.stack([lse for _, lse in want])
        assert torch.allclose(found[1][:, :, 0].double(), sums, rtol=1e-3, atol=2e-3)
        if status:
            assert not found[2].any()


@pytest.mark.parametrize("splits", [None, 1, 3, 7, 40])
@pytest.mark.parametrize(
    ("heads", "hdim", "rows", "varlen"),
    [((16, 2), 128, 24, False), ((16, 4), 64, 100, True), ((4, 4), 128, 90, False), ((6, 2), 192, 64, True)],
)
def test_many_rows_over_parts_of_the_keys(
    torch: Any,
    client: tilewright.Client,
    heads: tuple[int, int],
    hdim: int,
    rows: int,
    varlen: bool,
    splits: int | None,
) -> None:
    torch.manual_seed(rows)
    keys = [4000, 0, 777]
    cache = Cache(torch, torch.bfloat16, 16, heads[1], hdim, {"all": keys})
    counts = [rows, rows // 2, 1] if varlen else [rows] * 3
    q = torch.randn(sum(counts), heads[0], hdim, device="cuda").bfloat16()
    given = {"num_splits": splits}
    if varlen:
        given |= {"cu_seqlens_q": torch.tensor([0, *counts]).cumsum(0).int().cuda(), "max_seqlen_q": rows}
    asked = q if varlen else q.view(3, rows, *q.shape[1:])
    out = torch.full_like(asked, math.nan)
    layout = {} if varlen else {"layout": "bshd"}
    client.attention_paged(asked, *cache.pages, cache.tables["all"], cache.lengths("all"), out=out, **layout, **given)
    torch.cuda.synchronize()
    got, first = out.reshape(-1, *q.shape[1:]), 0
    for count, part in zip(counts, cache.tokens["all"], strict=True):
        mine = got[first : first + count]
        if len(part[0]):
            want = torch.stack([truth(torch, q[first + i], [part])[0] for i in range(count)])
            error, report = relative(torch, mine, want), client.report
            assert error <= BOUND["bf16"], f"{error:.2e} with {report and report.kernels}"
        else:
            assert not mine.any()
        first += count
