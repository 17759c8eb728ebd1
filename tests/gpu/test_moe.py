"""Products of experts on the GPU, on tensors of another process: any counts, in a CUDA graph too."""

from __future__ import annotations

from typing import Any

import pytest

import tilewright

COUNTS = [
    (0, 1, 63, 64, 65, 129, 300, 78),
    (700, 0, 0, 0, 0, 0, 0, 0),
    (0, 0, 0, 0, 0, 0, 0, 0),
    (1, 2, 3, 4, 5, 6, 7, 8),
]
WRONG = [((-5, 100, 800, 3, 0, 9, 1, 1), 5), ((2**31 - 1, 1, 0, 0, 0, 0, 0, 0), 4)]
"""Counts, and the bits of what is wrong with them."""


def operands(torch: Any, dtype: Any, *x: int, n: int = 328) -> tuple[Any, Any, Any]:
    w = torch.randn(8, n, x[-1], device="cuda").to(dtype)
    counts = torch.zeros(8, dtype=torch.int32, device="cuda")
    return (torch.randn(*x, device="cuda") / x[-1] ** 0.5).to(dtype), w, counts


def check(torch: Any, x: Any, w: Any, counts: tuple[int, ...], out: Any) -> None:
    """Rows of experts are right, and all others NaN, as they were."""
    torch.cuda.synchronize()
    first, own = 0, torch.zeros(out.shape[:-1], dtype=torch.bool, device="cuda")
    for expert, count in enumerate(counts):
        rows = min(max(count, 0), x.shape[-2] - (first if x.dim() == 2 else 0))
        place: Any = slice(first, first + rows) if x.dim() == 2 else (expert, slice(0, rows))
        want = x[place].double() @ w[expert].double().T
        if rows:
            error = (out[place].double() - want).norm() / want.norm()
            assert float(error) < 4e-3, (counts, expert)
        own[place] = True
        first += rows
    assert bool(torch.isnan(out[~own]).all()), counts


@pytest.mark.parametrize("shape", [(700, 264), (8, 700, 264), (700, 259)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_every_count_is_right(torch: Any, client: tilewright.Client, shape: tuple[int, ...], dtype: str) -> None:
    x, w, counts = operands(torch, getattr(torch, dtype), *shape)
    for given in COUNTS:
        out = torch.full((*shape[:-1], 328), float("nan"), device="cuda", dtype=torch.bfloat16)
        counts.copy_(torch.tensor(given, dtype=torch.int32))
        assert client.moe_gemm(x, w, counts, out=out) is out
        check(torch, x, w, given, out)


@pytest.mark.parametrize("columns", [1, 128])
@pytest.mark.parametrize("shape", [(700, 272), (8, 700, 1040)], ids=str)
def test_each_block_is_scaled_by_its_own_factor(
    torch: Any, client: tilewright.Client, shape: tuple[int, ...], columns: int
) -> None:
    x, w, counts = operands(torch, torch.float8_e4m3fn, *shape)
    k, blocks, lines = shape[-1], -(-shape[-1] // 128), -(-328 // columns)
    scale_x = torch.exp2(4 * torch.randn(*shape[:-2], blocks, shape[-2], device="cuda")).mT  # by blocks of k first
    scale_w = torch.exp2(4 * torch.randn(8, lines, blocks, device="cuda"))
    wide_x = x.double() * scale_x.repeat_interleave(128, -1)[..., :k].double()
    wide_w = w.double() * scale_w.repeat_interleave(columns, -2)[:, :328].repeat_interleave(128, -1)[..., :k].double()
    words = {"scale_x": scale_x, "scale_w": scale_w, "scale_block": ((1, 128), (columns, 128))}
    for given in COUNTS:
        out = torch.full((*shape[:-1], 328), float("nan"), device="cuda", dtype=torch.bfloat16)
        counts.copy_(torch.tensor(given, dtype=torch.int32))
        client.moe_gemm(x, w, counts, out=out, **words)
        check(torch, wide_x, wide_w, given, out)


@pytest.mark.parametrize(
    ("gated", "quantised"), [(True, False), (False, True), (True, True)], ids=["swiglu", "fp8", "swiglu-fp8"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(700, 272), (8, 400, 1040)], ids=str)
def test_steps_behind_the_sums_are_right(
    torch: Any, client: tilewright.Client, shape: tuple[int, ...], dtype: str, gated: bool, quantised: bool
) -> None:
    columns = 328
    x, w, counts = operands(torch, getattr(torch, dtype), *shape, n=columns * (2 if gated else 1))
    words: dict[str, Any] = {"activation": "swiglu"} if gated else {}
    for given in COUNTS:
        counts.copy_(torch.tensor(given, dtype=torch.int32))
        out = torch.zeros((*shape[:-1], columns), device="cuda").to(
            torch.float8_e4m3fn if quantised else torch.bfloat16
        )
        out.view(torch.uint8).fill_(255)  # NaN
        more = dict(words)
        if quantised:
            more["out_scale_block"] = (1, 128)
            more["out_scale"] = torch.full((*shape[:-1], 3), float("nan"), device="cuda")
        client.moe_gemm(x, w, counts, out=out, **more)
        torch.cuda.synchronize()
        wide = out.double()
        if quantised:
            wide = wide * more["out_scale"].repeat_interleave(128, -1)[..., :columns].double()
        check_steps(torch, (x, w), given, wide, gated, 0.04 if quantised else 4e-3)


def check_steps(
    torch: Any, operands: tuple[Any, Any], counts: tuple[int, ...], out: Any, gated: bool, limit: float
) -> None:
    """Rows of experts are as near as ``limit`` to silu(gate) * up, and all others NaN, as they were."""
    x, w = operands
    first, own = 0, torch.zeros(out.shape[:-1], dtype=torch.bool, device="cuda")
    for expert, count in enumerate(counts):
        rows = min(max(count, 0), x.shape[-2] - (first if x.dim() == 2 else 0))
        place: Any = slice(first, first + rows) if x.dim() == 2 else (expert, slice(0, rows))
        want = x[place].double() @ w[expert].double().T
        if gated:
            gate, up = want.reshape(rows, out.shape[-1] // 8, 2, 8).unbind(2)
            want = (torch.nn.functional.silu(gate) * up).reshape(rows, out.shape[-1])
        if rows:
            error = (out[place] - want).norm() / want.norm()
            assert float(error) < limit, (counts, expert, float(error))
        own[place] = True
        first += rows
    assert bool(torch.isnan(out[~own]).all()), counts


def test_wrong_counts_are_cut_and_told(torch: Any, client: tilewright.Client) -> None:
    x, w, counts = operands(torch, torch.bfloat16, 700, 512)
    for given, bits in WRONG:
        out = torch.full((700, 328), float("nan"), device="cuda", dtype=torch.bfloat16)
        counts.copy_(torch.tensor(given, dtype=torch.int32))
        _, status = client.moe_gemm(x, w, counts, out=out, return_status=True)
        check(torch, x, w, given, out)
        assert status.tolist()[0] == bits


def test_a_graph_is_replayed_with_other_counts(torch: Any, client: tilewright.Client) -> None:
    x, w, counts = operands(torch, torch.bfloat16, 700, 512)
    out = torch.empty(700, 328, device="cuda", dtype=torch.bfloat16)
    plan = client.plan_moe_gemm(x, w, counts, out=out)
    plan(x, w, counts, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(x, w, counts, out=out)
    for given in COUNTS:
        counts.copy_(torch.tensor(given, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        check(torch, x, w, given, out)
