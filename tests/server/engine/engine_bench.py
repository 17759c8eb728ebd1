# ruff: noqa: T201
"""What the engine costs beside the kernel: ``python tests/server/engine/engine_bench.py``. Asserts nothing."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from engine_harness import Vectors, call, open_engine, plan
from vector_operation import request

from tilewright_server.engine.types import Selection

ROUNDS = 5


def best_us(function: Callable[[], object], count: int) -> float:
    """The best of several rounds, because machines are shared."""
    rounds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(count):
            function()
        rounds.append((time.perf_counter() - begin) / count * 1e6)
    return min(rounds)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        engine, waiting, selection = open_engine(cache), call(), Selection()
        plan(engine, 100, scale=2.0)
        hit = best_us(lambda: engine.plan(request(100, scale=2.0), selection, waiting), 500)
        prepared, addresses = plan(engine, 1), Vectors(1).addresses
        run = best_us(lambda: engine.execute(prepared, addresses, waiting), 1000)
        engine.close()
        loads = []
        for _ in range(ROUNDS):
            again, waiting = open_engine(cache), call()
            again.devices.get()
            again.plan(request(100, scale=2.0), Selection(), waiting)
            loads.append(waiting.plan_ns / 1e6)
            again.close()
    print(f"plan that is known: {hit:.1f} us; execution beside the kernel: {run:.1f} us")
    print(f"plan with a kernel from the disk: {min(loads):.2f} ms at best, {statistics.median(loads):.2f} ms as a rule")


if __name__ == "__main__":
    sys.exit(main())
