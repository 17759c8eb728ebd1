"""The lines of `tilewright demo`, and how two ways to the same result are timed side by side."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tilewright_tools.cli.problems import cases

__all__ = ["Row", "best_of"]

TURNS, TURN_S, SETTLE_S = 4, 0.02, 0.01


@dataclass(frozen=True)
class Row:
    """One line of a table. Times are seconds of one call, through the service and back."""

    what: str
    kernel: str
    seconds: float
    numpy_seconds: float
    flops: int
    check: cases.Check

    @property
    def gflops(self) -> float:
        return self.flops / self.seconds / 1e9

    @property
    def ratio(self) -> float:
        return self.numpy_seconds / self.seconds


def best_of(ours: Callable[[], object], numpys: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the fastest of several calls of each. They take turns, so that both meet the same load."""
    best = [float("inf"), float("inf")]
    for _ in range(TURNS):
        for index, call in enumerate((ours, numpys)):
            time.sleep(SETTLE_S)  # threads of the one before, which spin for a while, go to sleep
            end = time.perf_counter() + TURN_S
            begun = 0.0
            while begun < end:
                begun = time.perf_counter()
                call()
                best[index] = min(best[index], time.perf_counter() - begun)
    return best[0], best[1]
