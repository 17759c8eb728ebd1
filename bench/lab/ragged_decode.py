"""Decoding over pages where lengths differ, beside a copy of as many bytes, on a machine with a GPU and PyTorch.

    python bench/lab/ragged_decode.py [--every | --parts 1 4]

Lengths are drawn at random from 1 to the room of a sequence (``uniform``), from a log-normal distribution whose median
is an eighth of it (``skewed``), or are all of it (``equal``). The planner's kernels give workgroups equal shares of
all keys; ``--every`` and ``--parts`` have fixed numbers of parts of every sequence beside them. Each is
captured in a CUDA graph over as many caches as fill twice the L2 cache; times are medians of nine replays, one of each
in turn. A copy reads and writes half of the bytes each that the keys and values have.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import tilewright

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / "tests" / "gpu"), str(_ROOT / "bench" / "sm90")]

from block_scales import Call, captured, milliseconds  # noqa: E402

STEPS = (
    (64, 32, 8, 128, 16, 4096), (32, 32, 8, 128, 16, 8192), (16, 32, 8, 128, 16, 8192), (8, 32, 8, 128, 16, 16384),
    (128, 32, 8, 128, 64, 4096), (64, 64, 8, 64, 16, 4096), (48, 40, 8, 128, 32, 6000),
)  # fmt: skip
"""Sequences, heads of queries and of keys, elements of a head, tokens of a page, most keys."""
PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
CACHED = 128 << 20


def lengths_of(kind: str, batch: int, room: int) -> torch.Tensor:
    if kind == "uniform":
        return torch.randint(1, room + 1, (batch,))
    if kind == "skewed":
        return (torch.randn(batch).exp() * (room / 8)).long().clamp(1, room)
    return torch.full((batch,), room)


def measure(client: tilewright.Client, step: tuple[int, ...], kind: str, fixed: Sequence[int]) -> None:
    batch, heads, key_heads, hdim, page, room = step
    torch.manual_seed(room + batch)
    lengths = lengths_of(kind, batch, room)
    columns = -(-room // page)
    nbytes = int(lengths.sum()) * key_heads * hdim * 2 * 2
    sets = []
    for _ in range(max(2, CACHED // nbytes)):
        caches = torch.randn(2, batch * columns, page, key_heads, hdim, device="cuda").to(torch.bfloat16)
        sets.append((caches[0], caches[1], torch.randperm(batch * columns, device="cuda").view(batch, -1).int()))
    q = torch.randn(batch, heads, 1, hdim, device="cuda").to(torch.bfloat16)
    seen, out = lengths.int().cuda(), torch.empty_like(q)
    source, target = torch.empty(2, len(sets), nbytes // 4, dtype=torch.bfloat16, device="cuda")

    def steps(parts: int | None) -> Call:
        def call() -> None:
            for k, v, table in sets:
                client.attention_paged(q, k, v, table, seen, num_splits=parts, out=out)

        return call

    graphs = {"copy": captured(lambda: [a.copy_(b) for a, b in zip(target, source, strict=True)], 1)}
    graphs["planner"] = captured(steps(None), 1)
    graphs |= {f"{parts} parts": captured(steps(parts), 1) for parts in fixed}
    times = milliseconds(graphs, len(sets))
    shown = (f"{name} {time * 1e3:.1f} us {times['copy'] / time:.2f}" for name, time in times.items())
    print(f"{batch} x {heads}/{key_heads} x {hdim}, up to {room} in pages of {page}, {kind}:", "; ".join(shown))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--parts", type=int, nargs="+", default=())
    chosen = parser.parse_args()
    from gpu_server import CudaServer

    with CudaServer() as server, tilewright.connect(server.target) as client:
        for step, kind in itertools.product(STEPS, ("uniform", "skewed", "equal")):
            measure(client, step, kind, PARTS if chosen.every else chosen.parts)


if __name__ == "__main__":
    main()
