"""Decoding of sequences that share a prefix, beside paged decoding of the same tokens and a copy of as many bytes.

    python bench/lab/shared_prefix.py [--device cpu | cuda] [--turns 9]

``shared``: the prefix is read once for all sequences of a group, what follows it for each. ``own``: what follows it,
alone (on GPUs). ``plain``: every sequence has all of its pages in its table, those of the prefix among them. ``copy``:
of as many bytes as ``shared`` must read, half of them read and half written. On a GPU (which needs PyTorch) each is
captured in a CUDA graph over as many caches as fill twice the L2 cache; on the CPU calls of bound plans take turns.
Times are medians; results are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tilewright

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / name) for name in ("tests/gpu", "bench/sm90", "bench/clients")]

HOST = ((8, 1, 8, 2, 64, 16, 2048, 64), (8, 2, 8, 2, 64, 16, 2048, 64), (4, 1, 16, 16, 64, 16, 1024, 256))
STEPS = (
    (64, 1, 32, 8, 128, 16, 8192, 256), (64, 1, 32, 8, 128, 16, 2048, 2048), (64, 4, 32, 8, 128, 16, 8192, 256),
    (16, 1, 32, 8, 128, 16, 32768, 512), (256, 1, 64, 8, 128, 16, 4096, 128), (32, 1, 32, 32, 128, 16, 8192, 256),
)  # fmt: skip
"""Sequences, groups of one size, heads of queries and of keys, elements of a head, tokens of a page, keys of a prefix,
and keys that follow it.
"""
CACHED = 128 << 20

Calls = Mapping[str, Callable[[], Any]]


def tables(step: tuple[int, ...], rng: np.random.Generator) -> dict[str, Any]:
    """Pages of prefixes, of what follows, and of both."""
    batch, groups, _, _, _, page, shared, own = step
    first, behind = shared // page, own // page
    order = rng.permutation(groups * first + batch * behind).astype(np.int32)
    prefixes, rest = order[: groups * first].reshape(groups, first), order[groups * first :].reshape(batch, behind)
    return {"prefix": prefixes, "rest": rest, "whole": np.concatenate([prefixes.repeat(batch // groups, 0), rest], 1)}


def bytes_of(step: tuple[int, ...], size: int) -> int:
    batch, groups, _, heads, hdim, _, shared, own = step
    return (groups * shared + batch * own) * heads * hdim * 2 * size


def report(step: tuple[int, ...], times: Mapping[str, float]) -> None:
    batch, groups, heads, key_heads, hdim, _, shared, own = step
    shown = (f"{name} {seconds * 1e6:.1f} us" for name, seconds in times.items())
    print(
        f"{batch} in {groups} x {heads}/{key_heads} x {hdim}, {shared} shared, {own} own:", "; ".join(shown) + ";",
        f"plain / shared {times['plain'] / times['shared']:.2f}, copy / shared {times['copy'] / times['shared']:.2f}",
        flush=True,
    )  # fmt: skip


def on_host(client: tilewright.Client, step: tuple[int, ...], turns: int) -> None:
    batch, groups, heads, key_heads, hdim, page, shared, own = step
    rng = np.random.default_rng(0)
    found = tables(step, rng)
    pool = (int(found["whole"].max()) + 1, page, key_heads, hdim)
    q, k, v = (
        client.asarray(rng.standard_normal(shape, np.float32)) for shape in ((batch, heads, 1, hdim), pool, pool)
    )
    given = {name: client.asarray(table) for name, table in found.items()}
    lengths = {size: client.asarray(np.full(batch, size, np.int32)) for size in (own, own + shared)}
    of = {"prefix_table": given["prefix"], "prefix_seqlens": client.asarray(np.full(groups, shared, np.int32))}
    outs = [client.empty((batch, heads, 1, hdim)) for _ in range(2)]
    source, target = (np.ones(bytes_of(step, 4) // 8, np.float32) for _ in range(2))
    calls: Calls = {
        "shared": lambda: client.attention_paged(q, k, v, given["rest"], lengths[own], out=outs[0], **of),
        "plain": lambda: client.attention_paged(q, k, v, given["whole"], lengths[own + shared], out=outs[1]),
        "copy": lambda: np.copyto(target, source),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - begun)
            if turn == 0:
                taken[name].clear()  # kernels are built
    assert np.allclose(*outs, rtol=1e-4, atol=1e-4), "both ways give the same"
    report(step, {name: statistics.median(times) for name, times in taken.items()})


def on_gpu(client: tilewright.Client, step: tuple[int, ...], turns: int) -> None:
    del turns  # milliseconds() has its own
    import torch
    from block_scales import captured, milliseconds

    batch, groups, heads, key_heads, hdim, page, shared, own = step
    nbytes = bytes_of(step, 2)
    sets = []
    for seed in range(max(2, CACHED // nbytes)):
        found = {
            name: torch.from_numpy(table).cuda() for name, table in tables(step, np.random.default_rng(seed)).items()
        }
        pool = (int(found["whole"].max()) + 1, page, key_heads, hdim)
        sets.append((*(torch.randn(pool, device="cuda").to(torch.bfloat16) for _ in "kv"), found))
    q = torch.randn(batch, heads, 1, hdim, device="cuda").to(torch.bfloat16)
    lengths = {size: torch.full((batch,), size, device="cuda").int() for size in (own, own + shared)}
    prefix = torch.full((groups,), shared, device="cuda").int()
    *outs, other = (torch.empty_like(q) for _ in range(3))
    source, target = torch.empty(2, len(sets), nbytes // 4, dtype=torch.bfloat16, device="cuda")

    def with_prefix() -> None:
        for k, v, found in sets:
            of = {"prefix_table": found["prefix"], "prefix_seqlens": prefix}
            client.attention_paged(q, k, v, found["rest"], lengths[own], out=outs[0], **of)

    def plain() -> None:
        for k, v, found in sets:
            client.attention_paged(q, k, v, found["whole"], lengths[own + shared], out=outs[1])

    def own_alone() -> None:
        for k, v, found in sets:
            client.attention_paged(q, k, v, found["rest"], lengths[own], out=other)

    calls: Calls = {"shared": with_prefix, "own": own_alone, "plain": plain}
    graphs = {"copy": captured(lambda: [a.copy_(b) for a, b in zip(target, source, strict=True)], 1)}
    graphs |= {name: captured(call, 1) for name, call in calls.items()}
    times = milliseconds(graphs, len(sets))
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
    report(step, {name: value / 1e3 for name, value in times.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=9, help="of each kind of call, on the CPU")
    chosen = parser.parse_args()
    if chosen.device == "cpu":
        from serving import serving

        with serving() as target, tilewright.connect(target) as client:
            for step in HOST:
                on_host(client, step, chosen.turns)
        return
    from gpu_server import CudaServer

    with CudaServer() as server, tilewright.connect(server.target) as client:
        for step in STEPS:
            on_gpu(client, step, chosen.turns)


if __name__ == "__main__":
    main()
