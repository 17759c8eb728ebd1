"""Cost of a repeated call without a plan beside that of a call of a prepared one, over the same way, on a CPU.

    python bench/clients/repeated_calls.py [--size 64] [--turns 30]

Starts servers of its own: one whose launches go over the local socket, one that has gRPC only. Both kinds of call take
turns of 100, so that a busy machine is so for both. Prints medians of the latency and the client's processor time for
a call, in microseconds, and their ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from serving import serving

import tilewright as tw

TURN = 100
WARM = 300


def compared(ways: tuple[Callable[[], object], ...], turns: int) -> tuple[list[float], list[float]]:
    """Median latency and processor time of a call of each way, in microseconds."""
    taken: list[list[float]] = [[] for _ in ways]
    busy = [0.0 for _ in ways]
    for call in ways:
        for _ in range(WARM):
            call()
    for _ in range(turns):
        for index, call in enumerate(ways):
            begun = time.process_time()
            for _ in range(TURN):
                start = time.perf_counter()
                call()
                taken[index].append(time.perf_counter() - start)
            busy[index] += time.process_time() - begun
    return [statistics.median(item) * 1e6 for item in taken], [item / turns / TURN * 1e6 for item in busy]


def measure(target: str, name: str, size: int, turns: int) -> None:
    with tw.connect(target, launch="server") as client:
        rng = np.random.default_rng(0)
        a, b = (rng.standard_normal((size, size)).astype(np.float32) for _ in range(2))
        x, y, out = client.asarray(a), client.asarray(b), client.empty((size, size))
        plan = client.plan_gemm(x, y)
        rows = {
            "shared memory, out=": (lambda: plan(x, y, out=out), lambda: client.gemm(x, y, out=out)),
            "shared memory": (lambda: plan(x, y), lambda: client.gemm(x, y)),
            "plain arrays": (lambda: plan(a, b), lambda: client.gemm(a, b)),
        }
        for what, ways in rows.items():
            (prepared, plain), (busy, busier) = compared(ways, turns)
            print(
                f"{name:13} {what:20} prepared {prepared:7.1f}  without {plain:7.1f}  {plain / prepared:5.2f}"
                f"   processor {busy:7.1f}  {busier:7.1f}  {busier / busy:5.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=64, help="of the square product")
    parser.add_argument("--turns", type=int, default=30, help="of each kind of call")
    chosen = parser.parse_args()
    for name, flags in {"local socket": (), "gRPC": ("--no-local-socket",)}.items():
        with serving(*flags) as target:
            measure(target, name, chosen.size, chosen.turns)


if __name__ == "__main__":
    main()
