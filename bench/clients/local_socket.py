"""How long a launch of a prepared plan takes, over gRPC and over the local socket, from one Python client on a CPU.

    python bench/clients/local_socket.py [--target unix:PATH] [--size 8] [--seconds 2]

Starts a server of its own unless a target is given. The product is so small that what is measured is the way there and
back. Prints a table: launches a second, and the times of single launches that are waited for, in microseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable

import numpy as np
from serving import serving

import tilewright as tw


def latencies(call: Callable[[], object], seconds: float) -> np.ndarray:
    """Microseconds of each call."""
    taken, clock = [], time.perf_counter_ns
    for _ in range(100):
        call()
    end = clock() + int(seconds * 1e9)
    while (start := clock()) < end:
        call()
        taken.append(clock() - start)
    return np.array(taken) / 1e3


def measure(target: str, size: int, seconds: float) -> None:
    with tw.connect(target, launch="server") as client:
        a = client.asarray(np.eye(size, dtype=np.float32))
        plan, out = client.plan_gemm(a, a), client.empty((size, size))
        bound = plan.bind(a, a, out=out)
        for name, call in {
            "bound plan, gRPC": lambda: bound(timeout=60.0),  # a deadline is gRPC's
            "bound plan": bound,
            "plan(a, b, out=c)": lambda: plan(a, a, out=out),
        }.items():
            found = latencies(call, seconds)
            p50, p99 = np.percentile(found, [50, 99])
            print(f"{name:24} p50 {p50:7.1f} us   p99 {p99:7.1f} us   {1e6 / found.mean():9.0f} /s")
        count, start = 0, time.perf_counter()
        while time.perf_counter() < start + seconds:
            with client.pipeline() as pipeline:
                for _ in range(10_000):
                    pipeline.launch(bound)
            count += 10_000
        print(f"{'pipeline':24} {'':33}{count / (time.perf_counter() - start):9.0f} /s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="of a server that runs; none: one is started")
    parser.add_argument("--size", type=int, default=8, help="of the square product")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each way")
    chosen = parser.parse_args()
    with contextlib.nullcontext(chosen.target) if chosen.target else serving() as target:
        measure(target, chosen.size, chosen.seconds)


if __name__ == "__main__":
    main()
