"""Caches of keys and values on the GPU: pages, keys cut among workers, new rows in place, and a loop of decoding."""

from __future__ import annotations

import math
from typing import Any

import pytest
from attention_problem import DEVICE, FLOOR, attend, visible
from gpu_cases import relative, torch_dtype

import tilewright

LENGTHS = (700, 0, 33, 257)
"""Tokens of the sequences of a cache."""
TOLERANCE = {name: 1.5 * floor for name, floor in FLOOR.items()}


class Pages:
    """A cache in pages that lie in any order, with NaN wherever no token is, and its contents sequence by sequence."""

    def __init__(
        self, torch: Any, dtype: str, page: int, heads: int, sizes: tuple[int, int], lengths: Any = LENGTHS
    ) -> None:
        torch.manual_seed(5)
        self.torch, self.page, self.lengths = torch, page, lengths
        kind, most = torch_dtype(torch, dtype), max(-(-length // page) for length in lengths)
        count = sum(-(-length // page) for length in lengths) + 3
        order = torch.randperm(count).tolist()
        self.k, self.v = (
            torch.full((count, page, heads, size), float("nan"), device=DEVICE).to(kind) for size in sizes
        )
        self.table = torch.full((len(lengths), most), 2**30, dtype=torch.int32)
        self.tokens: list[tuple[Any, Any]] = []
        for row, length in enumerate(lengths):
            held = [torch.randn(length, heads, size, device=DEVICE).to(kind) for size in sizes]
            self.tokens.append((held[0].transpose(0, 1), held[1].transpose(0, 1)))
            for index in range(-(-length // page)):
                self.table[row, index] = number = order.pop()
                for pages, rows in zip((self.k, self.v), held, strict=True):
                    part = rows[index * page : (index + 1) * page]
                    pages[number, : len(part)] = part
        self.table = self.table.to(DEVICE)

    @property
    def seqlens(self) -> Any:
        return self.torch.tensor(self.lengths, dtype=self.torch.int32, device=DEVICE)

    def vectorized(self) -> tuple[Any, Any]:
        """Chunks of sixteen bytes together."""
        (pages, page, heads, d), width = self.k.shape, 16 // self.k.dtype.itemsize
        k = self.k.view(pages, page, heads, d // width, width).permute(0, 2, 3, 1, 4).contiguous()
        v = self.v.view(pages, page // width, width, heads, -1).permute(0, 3, 1, 4, 2).contiguous()
        return k, v

    def sglang(self) -> dict[str, Any]:
        """The table as one list."""
        used = [-(-length // self.page) for length in self.lengths]
        rows = [self.table[row, :count] for row, count in enumerate(used)]
        starts = self.torch.tensor([0, *used], dtype=self.torch.int32).cumsum(0).int().to(DEVICE)
        return {"block_table": self.torch.cat(rows), "page_starts": starts, "max_seqlen_k": max(self.lengths)}

    def truth(self, queries: list[Any], mask: str = "bottom") -> list[Any]:
        """What the queries [heads, rows, D] of each sequence get, in float64."""
        found = []
        for q, (k, v) in zip(queries, self.tokens, strict=True):
            seen = visible(self.torch, mask, q.shape[1], k.shape[1])
            found.append(attend(self.torch, q.double(), k.double(), v.double(), seen)[0])
        return found


def close(torch: Any, got: Any, want: Any, dtype: str, client: tilewright.Client) -> None:
    error, report = relative(torch, got, want), client.report
    assert error <= TOLERANCE[dtype], f"{error:.2e} with {report and report.kernels}"


@pytest.mark.parametrize(
    ("dtype", "page", "heads", "sizes", "form"),
    [
        ("bf16", 16, (8, 2), (128, 128), "vllm"),
        ("fp16", 64, (4, 4), (64, 64), "sglang"),
        ("bf16", 128, (8, 1), (128, 64), "vectorized"),
        ("fp16", 1, (2, 2), (72, 40), "vllm"),
        ("fp32", 32, (4, 2), (64, 64), "vllm"),
        ("bf16", 16, (6, 3), (256, 256), "vllm"),
    ],
)
@pytest.mark.parametrize("rows", [1, 5], ids=["one query", "five"])
def test_pages(
    torch: Any, client: tilewright.Client, dtype: str, page: int, heads: Any, sizes: Any, form: str, rows: int
) -> None:
    pages = Pages(torch, dtype, page, heads[1], sizes)
    q = torch.randn(len(LENGTHS), heads[0], rows, sizes[0], device=DEVICE).to(torch_dtype(torch, dtype))
    out = torch.full((*q.shape[:3], sizes[1]), float("nan"), device=DEVICE, dtype=q.dtype)
    words: dict[str, Any] = pages.sglang() if form == "sglang" else {"block_table": pages.table}
    words |= {"kv_layout": "vectorized"} if form == "vectorized" else {}
    k, v = pages.vectorized() if form == "vectorized" else (pages.k, pages.v)
    client.attention_paged(q, k, v, words.pop("block_table"), pages.seqlens, mask="bottom_right", out=out, **words)
    torch.cuda.synchronize()
    close(torch, out, torch.stack(pages.truth(list(q))), dtype, client)


@pytest.mark.parametrize("rows", [1, 4], ids=["one query", "four"])
@pytest.mark.parametrize(
    ("cache", "page", "hdim", "form"),
    [
        ("bf16", 16, 128, "vllm"),
        ("fp8", 64, 128, "sglang"),
        ("fp8", 16, 64, "vllm"),
        ("bf16", 8, 256, "sglang"),
        ("bf16", 1024, 128, "vllm"),
    ],
)
def test_few_queries_over_pages(
    torch: Any, client: tilewright.Client, cache: str, page: int, hdim: int, form: str, rows: int
) -> None:
    """Memory limits them: Hopper's own kernels read the pages, cut into parts."""
    pages = Pages(torch, cache, page, 2, (hdim, hdim), (3001, 0, 1, 2048))
    q = torch.randn(4, 8, rows, hdim, device=DEVICE).bfloat16()
    words: dict[str, Any] = pages.sglang() if form == "sglang" else {"block_table": pages.table}
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:3], float("nan"), device=DEVICE)
    client.attention_paged(
        q, pages.k, pages.v, words.pop("block_table"), pages.seqlens, mask="bottom_right", out=out, lse=lse, **words
    )
    torch.cuda.synchronize()
    close(torch, out, torch.stack(pages.truth(list(q))), "bf16", client)
    assert torch.equal(lse.isinf().all(-1), (out == 0).all(-1).all(-1))
    if torch.cuda.get_device_capability() == (9, 0):
        assert "splitkv" in str(client.report.kernels) and "_ws_" in str(client.report.kernels)


@pytest.mark.parametrize("varlen", [False, True], ids=["batch", "end to end"])
@pytest.mark.parametrize(
    ("dtype", "page", "hdim", "form"),
    [("bf16", 16, 128, "vllm"), ("fp16", 256, 64, "sglang"), ("bf16", 64, 256, "vllm"), ("fp16", 8, 128, "sglang")],
)
def test_prompts_over_pages(
    torch: Any, client: tilewright.Client, dtype: str, page: int, hdim: int, form: str, varlen: bool
) -> None:
    """Work for all units: Hopper's own kernels read the pages."""
    lengths, rows, heads = (1300, 0, 333, 700), 700, 24
    pages = Pages(torch, dtype, page, 4, (hdim, hdim), lengths)
    q = torch.randn(len(lengths), rows, heads, hdim, device=DEVICE).to(torch_dtype(torch, dtype))
    words: dict[str, Any] = pages.sglang() if form == "sglang" else {"block_table": pages.table}
    if varlen:
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE) * rows
        words |= {"cu_seqlens_q": starts, "max_seqlen_q": rows}
    given = q.flatten(0, 1) if varlen else q.transpose(1, 2)
    out = torch.full_like(given, float("nan"))
    client.attention_paged(
        given, pages.k, pages.v, words.pop("block_table"), pages.seqlens, mask="bottom_right", out=out, **words
    )
    torch.cuda.synchronize()
    want = torch.stack(pages.truth(list(q.transpose(1, 2)))).transpose(1, 2)
    close(torch, out.view(q.shape) if varlen else out.transpose(1, 2), want, dtype, client)
    if torch.cuda.get_device_capability() == (9, 0):
        assert "_ws_" in str(client.report.kernels)


@pytest.mark.parametrize(("dtype", "page"), [("bf16", 64), ("fp16", 16)])
def test_queries_of_different_numbers_over_pages(torch: Any, client: tilewright.Client, dtype: str, page: int) -> None:
    pages, rows = Pages(torch, dtype, page, 2, (64, 64)), (70, 0, 33, 1)
    q = torch.randn(sum(rows), 4, 64, device=DEVICE).to(torch_dtype(torch, dtype))
    starts = torch.tensor([0, 70, 70, 103, 104], dtype=torch.int32, device=DEVICE)
    out = torch.full_like(q, float("nan"))
    client.attention_paged(
        q, pages.k, pages.v, pages.table, pages.seqlens, mask="bottom_right", cu_seqlens_q=starts, max_seqlen_q=80,
        out=out,
    )  # fmt: skip
    torch.cuda.synchronize()
    want = pages.truth([part.transpose(0, 1) for part in q.split(rows)])
    close(torch, out, torch.cat([part.transpose(0, 1) for part in want]), dtype, client)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "heads", "size"), [("bf16", (8, 2), 128), ("fp16", (4, 4), 64), ("fp32", (4, 1), 64)]
)
@pytest.mark.parametrize("splits", [2, 7, 32])
def test_keys_cut_among_workers(
    torch: Any, client: tilewright.Client, dtype: str, heads: Any, size: int, splits: int, rows: int
) -> None:
    torch.manual_seed(7)
    kind = torch_dtype(torch, dtype)
    q = torch.randn(2, heads[0], rows, size, device=DEVICE).to(kind)
    k, v = (torch.randn(2, heads[1], 2500, size, device=DEVICE).to(kind) for _ in "kv")
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:3], float("nan"), device=DEVICE)
    lengths = torch.tensor([2500, 100], dtype=torch.int32, device=DEVICE)  # most parts of the second are empty
    client.attention(q, k, v, mask="bottom_right", seqlens_k=lengths, num_splits=splits, out=out, lse=lse)
    torch.cuda.synchronize()
    parts = [
        attend(torch, *(x[b, :, :n].double() for x, n in ((q, rows), (k, keys), (v, keys))),
               visible(torch, "bottom", rows, keys))
        for b, keys in enumerate((2500, 100))
    ]  # fmt: skip
    close(torch, out, torch.stack([o for o, _ in parts]), dtype, client)
    assert torch.allclose(lse.double(), torch.stack([right for _, right in parts]), rtol=1e-4, atol=1e-4)


def test_a_page_that_is_not_there_is_told_and_not_read(torch: Any, client: tilewright.Client) -> None:
    pages = Pages(torch, "bf16", 64, 2, (64, 64))
    q = torch.randn(4, 4, 1, 64, device=DEVICE).bfloat16()
    right = client.attention_paged(q, pages.k, pages.v, pages.table, pages.seqlens)
    table = pages.table.clone()
    table[0, 1] = 10**6  # in use, and beyond the cache
    wrong = client.attention_paged(q, pages.k, pages.v, table, pages.seqlens)
    torch.cuda.synchronize()
    assert torch.equal(right[1:], wrong[1:])
    assert torch.isfinite(wrong).all()


# ---- new rows ----


def rotated(torch: Any, x: Any, first: int, cos: Any, sin: Any, style: str) -> Any:
    """Rows [heads, rows, D] from position ``first`` on, their first elements rotated, in float64."""
    x, half = x.double().clone(), cos.shape[1]
    c, s = (table[first : first + x.shape[1]].double() for table in (cos, sin))
    one, two = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if style == "interleaved" else (
        slice(0, half), slice(half, 2 * half))  # fmt: skip
    a, b = x[..., one].clone(), x[..., two].clone()
    x[..., one], x[..., two] = a * c - b * s, b * c + a * s
    return x


@pytest.mark.parametrize("style", ["", "interleaved", "half"])
@pytest.mark.parametrize(("dtype", "paged"), [("bf16", True), ("fp16", False), ("fp32", True)])
def test_new_rows_are_appended_in_place(
    torch: Any, client: tilewright.Client, dtype: str, paged: bool, style: str
) -> None:
    torch.manual_seed(9)
    kind, lengths, rows = torch_dtype(torch, dtype), (30, 0, 61), 3
    k_new, v_new = (torch.randn(3, 2, rows, 64, device=DEVICE).to(kind) for _ in "kv")
    q = torch.randn(3, 4, rows, 64, device=DEVICE).to(kind)
    shape = (20, 16, 2, 64) if paged else (3, 2, 80, 64)
    caches = [torch.randn(shape, device=DEVICE).to(kind) for _ in "kv"]
    before = [cache.clone() for cache in caches]
    table = torch.randperm(20).int().view(4, 5)[:3].contiguous().to(DEVICE)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    angles = torch.arange(100, device=DEVICE)[:, None] * 10.0 ** -torch.arange(16, device=DEVICE)
    words: dict[str, Any] = {"block_table": table} if paged else {}
    if style:
        words |= {"rotary_cos": angles.cos().to(kind), "rotary_sin": angles.sin().to(kind), "rotary": style, "q": q}
    found = client.kv_append(k_new, v_new, *caches, seqlens, seqlens_out=seqlens, **words)
    torch.cuda.synchronize()
    assert seqlens.tolist() == [length + rows for length in lengths]
    for b, length in enumerate(lengths):
        for cache, old, new, turned in zip(caches, before, (k_new, v_new), (bool(style), False), strict=True):
            want = new[b].double()
            if turned:
                want = rotated(torch, new[b], length, words["rotary_cos"], words["rotary_sin"], style)
            for row in range(rows):
                at = length + row
                place = (int(table[b, at // 16]), at % 16) if paged else (b, slice(None), at)
                assert relative(torch, cache[place], want[:, row]) <= 2 * FLOOR[dtype]
                old[place] = cache[place]
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))  # and nothing else
    if style:
        want = torch.stack(
            [rotated(torch, q[b], n, words["rotary_cos"], words["rotary_sin"], style) for b, n in enumerate(lengths)]
        )
        assert relative(torch, found[2], want) <= 2 * FLOOR[dtype]


@pytest.mark.parametrize("style", ["", "half"])
def test_new_rows_are_rounded_to_a_cache_in_eight_bits(torch: Any, client: tilewright.Client, style: str) -> None:
    torch.manual_seed(11)
    lengths, rows, factors = (30, 0), 3, torch.tensor([0.01, 0.5], device=DEVICE)
    k_new, v_new = (torch.randn(2, 2, rows, 64, device=DEVICE).bfloat16() for _ in "kv")
    caches = [torch.zeros(2, 2, 80, 64, device=DEVICE).to(torch.float8_e4m3fn) for _ in "kv"]
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    angles = torch.arange(100, device=DEVICE)[:, None] * 10.0 ** -torch.arange(16, device=DEVICE)
    words: dict[str, Any] = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary": style} if style else {}
    client.kv_append(k_new, v_new, *caches, seqlens, k_descale=factors, v_descale=factors, **words)
    torch.cuda.synchronize()
    for b, length in enumerate(lengths):
        turned = k_new[b]
        if style:
            turned = rotated(torch, turned, length, words["rotary_cos"], words["rotary_sin"], style).bfloat16()
        for cache, new in zip(caches, (turned, v_new[b]), strict=True):
            want = (new.float() / factors[:, None, None]).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            have = cache[b, :, length : length + rows].float()
            assert relative(torch, have, want) <= 2e-3  # a tie may fall to the other side where keys were turned
            assert style or torch.equal(have, want)
    plain = [torch.randn(2, 2, rows, 64, device=DEVICE).to(torch.float8_e4m3fn) for _ in "kv"]
    if style:  # rows of 8 bits are turned as well
        client.kv_append(*plain, *caches, seqlens, **words)
        torch.cuda.synchronize()
        want = rotated(torch, plain[0][1], 0, words["rotary_cos"], words["rotary_sin"], style)
        assert relative(torch, caches[0][1, :, :rows].float(), want) <= 4e-2


def test_a_loop_of_decoding(torch: Any, client: tilewright.Client) -> None:
    torch.manual_seed(13)
    steps, prompts = 20, (37, 5)
    with client.kv_cache(
        pages=32, page_size=16, kv_heads=2, hdim=64, dtype="bf16", sequences=4, device="cuda:0"
    ) as cache:
        ids = [cache.add() for _ in prompts]
        rows = sum(prompts)
        q, k, v = (torch.randn(rows, heads, 64, device=DEVICE).bfloat16() for heads in (4, 2, 2))
        seen = [list(pair) for pair in zip(k.split(prompts), v.split(prompts), strict=True)]
        o = cache.attend(ids, q, k=k, v=v, cu_seqlens=[0, prompts[0], rows])
        torch.cuda.synchronize()
        want = [
            attend(torch, *(x.transpose(0, 1).double() for x in (part, *seen[b])),
                   visible(torch, "causal", prompts[b], prompts[b]))[0].transpose(0, 1)
            for b, part in enumerate(q.split(prompts))
        ]  # fmt: skip
        assert relative(torch, o, torch.cat(want)) < TOLERANCE["bf16"]
        for step in range(steps):
            q, k, v = (torch.randn(2, heads, 1, 64, device=DEVICE).bfloat16() for heads in (4, 2, 2))
            o = cache.attend(ids, q, k=k, v=v)
            torch.cuda.synchronize()
            for b in range(2):
                seen[b] = [torch.cat([old, new[b].transpose(0, 1)]) for old, new in zip(seen[b], (k, v), strict=True)]
                keys, values = (x.transpose(0, 1).double() for x in seen[b])
                everything = torch.ones(1, keys.shape[1], dtype=torch.bool, device=DEVICE)
                want_row = attend(torch, q[b].double(), keys, values, everything)[0]
                assert relative(torch, o[b], want_row) < TOLERANCE["bf16"], f"step {step}"
        assert cache.lengths == {number: length + steps for number, length in zip(ids, prompts, strict=True)}


@pytest.mark.parametrize("rows", [1, 40])
def test_a_cache_in_eight_bits(torch: Any, client: tilewright.Client, rows: int) -> None:
    torch.manual_seed(15)
    q = torch.randn(2, 4, rows, 64, device=DEVICE).bfloat16()
    k, v = (torch.randn(2, 2, 900, 64, device=DEVICE).to(torch.float8_e4m3fn) for _ in "kv")
    factors = [torch.tensor(math.pi / 4, device=DEVICE), torch.tensor(0.5, device=DEVICE)]
    o = client.attention(q, k, v, k_descale=factors[0], v_descale=factors[1], mask="bottom_right")
    torch.cuda.synchronize()
    seen = visible(torch, "bottom", rows, 900)
    want = [
        attend(torch, q[b].double(), k[b].double() * factors[0].double(), v[b].double() * factors[1].double(), seen)[0]
        for b in range(2)
    ]
    assert relative(torch, o, torch.stack(want)) < 4e-3
