"""``client.gemm`` on NumPy's arrays beside NumPy's own product, over shapes that no kernel was tuned for.

    python bench/clients/against_numpy.py [--threads 1,2] [--rounds 15] [--shape 1,2048,2048] [--order rows]

For each number of threads a process of its own, with a server of as many threads; kernels are launched in the process
that has the arrays. Both contenders take turns on the same arrays. Microseconds are medians of the turns, ratios
medians of NumPy's time over ours of the same round: above 1 we are faster. ``rows``: both operands lie as NumPy makes
them; ``columns``: B is a transposed view, as weights [n, k] are. The last line is the geometric mean.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import timing

SHAPES = (
    (1, 2048, 2048), (1, 1500, 3000), (1, 3000, 700), (1, 900, 1300), (2, 2048, 2048), (4, 3000, 1000),
    (7, 1100, 2300), (16, 2000, 1000), (33, 700, 1900), (64, 2048, 512), (100, 300, 2000), (200, 1000, 333),
    (500, 60, 1700), (700, 700, 700), (1300, 450, 900), (2000, 3000, 500),
)  # fmt: skip
ORDERS = ("rows", "columns")
Shape = tuple[int, ...]


def measure(shapes: list[Shape], orders: list[str], threads: int, rounds: int, timed: Callable[..., Any]) -> None:
    """In a process whose environment says how many threads NumPy has."""
    import numpy as np

    import tilewright as tw
    from tilewright_tools.cli.private_server import PrivateServer

    ratios = []
    print(f"{threads} thread{'s' if threads > 1 else ''}\n\n| m, n, k | B by | ours, us | NumPy, us | NumPy / ours |")
    print("|---|---|---|---|---|")
    with PrivateServer(("--cpu-threads", str(threads))) as target, tw.connect(target, launch="caller") as client:
        for m, n, k in shapes:
            for order in orders:
                rng = np.random.default_rng(1)
                a = rng.standard_normal((m, k), np.float32)
                b = rng.standard_normal((k, n) if order == "rows" else (n, k), np.float32)
                b = b if order == "rows" else b.T
                difference = np.abs(client.gemm(a, b, device="cpu:0") - a.astype(np.float64) @ b.astype(np.float64))
                if not difference.max() < 1e-4 * k:
                    raise SystemExit(f"{m}, {n}, {k}, {order}: off by {difference.max()}")
                calls = {
                    "ours": timed(lambda a=a, b=b: client.gemm(a, b, device="cpu:0")),
                    "NumPy": timed(lambda a=a, b=b: a @ b),
                }
                times, ratio = timing.in_rounds(calls, "NumPy", "ours", rounds=rounds)
                ratios.append(ratio)
                found = " | ".join(f"{times[name] * 1e6:.1f}" for name in calls)
                print(f"| {m}, {n}, {k} | {order} | {found} | {ratio:.2f} |", flush=True)
    few = [ratio for ratio, m in zip(ratios, [m for m, _, _ in shapes for _ in orders], strict=True) if m == 1]
    print(f"\ngeometric mean {timing.geomean(ratios):.3f} over {len(ratios)}, least {min(ratios):.2f}", end="")
    print(f"; of one row {timing.geomean(few):.3f}\n" if few else "\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2", help="numbers of threads, one after the other")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shape", action="append", default=[], help="m,n,k instead of the list; may be repeated")
    parser.add_argument("--order", choices=ORDERS, action="append", default=[])
    parser.add_argument("--processor", action="store_true", help="processor time, for one thread on a busy machine")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        shapes: list[Shape] = [tuple(map(int, shape.split(","))) for shape in given.shape] or list(SHAPES)
        timed = timing.processor if given.processor else timing.wall
        measure(shapes, given.order or list(ORDERS), int(given.threads), given.rounds, timed)
        return
    options = ["--rounds", str(given.rounds), *(f"--shape={shape}" for shape in given.shape)]
    options += [f"--order={order}" for order in given.order]
    options += ["--processor"] * given.processor
    for threads in map(int, given.threads.split(",")):
        command = [sys.executable, __file__, "--alone", "--threads", str(threads), *options]
        subprocess.run(command, check=True, env=timing.peer_environment(threads))


if __name__ == "__main__":
    main()
