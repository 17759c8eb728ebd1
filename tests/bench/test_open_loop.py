"""Figures of the benchmark of loads: times count from when a call should have begun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))

from common.open_loop import Clients, Load, arrivals, drive  # noqa: E402


class Clock:
    """Time that passes while somebody sleeps or calls."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def test_a_server_that_stalls_once_is_charged_for_all_that_should_have_come_meanwhile() -> None:
    clock = Clock()
    durations = iter([1.0] + [0.001] * 99)
    taken, late = drive(lambda: clock.sleep(next(durations)), np.arange(100) / 100, 10, clock, clock.sleep)
    assert late == 0 and taken[0] == pytest.approx(1.0)
    assert taken[50] == pytest.approx(1.0 + 50 * 0.001 - 0.5)
    assert sum(item > 0.1 for item in taken) > 90, "a closed loop would have counted one"


def test_a_server_with_time_to_spare_is_charged_for_its_calls_alone() -> None:
    clock = Clock()
    taken, late = drive(lambda: clock.sleep(0.004), np.arange(50) / 100, 10, clock, clock.sleep)
    assert late == 0 and taken == pytest.approx([0.004] * 50)


def test_calls_that_were_never_begun_are_counted_with_their_waits() -> None:
    clock = Clock()
    taken, late = drive(lambda: clock.sleep(1.0), [0.0, 0.1, 0.2, 0.3], 1.5, clock, clock.sleep)
    assert late == 2 and len(taken) == 4
    assert taken == pytest.approx([1.0, 1.9, 1.8, 1.7])
    assert Load(2.0, np.array(taken), late).rate == 1.0


def test_arrivals_are_as_many_as_the_rate_says_and_irregular() -> None:
    times = arrivals(1000, 20, seed=3)
    assert len(times) == pytest.approx(20_000, rel=0.03)
    gaps = np.diff(times)
    assert np.all(gaps >= 0) and times[-1] < 20
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "as of a Poisson process"


def failing(target: str, stack: object) -> Callable[[], object]:
    """A client whose third call fails: after the first, one of each load."""
    left = iter(range(2))
    return lambda: next(left)


def test_a_client_that_fails_is_no_client_that_was_fast() -> None:
    with Clients(failing, "", 2, 1) as clients, pytest.raises(RuntimeError, match="StopIteration"):
        clients.saturate(0.2)


@pytest.mark.extended
def test_the_suite_measures_every_way_at_every_load(tmp_path: Path) -> None:
    result = tmp_path / "tables.json"
    command = [sys.executable, "-m", "suites.load", "--threads", "1", "--quick", "--result", str(result)]
    subprocess.run(command, cwd=BENCH, env={**os.environ, "PYTHONPATH": str(BENCH)}, check=True, timeout=280)
    (table,) = json.loads(result.read_text())
    ways = {row[0] for row in table["rows"]}
    assert ways == {"in place", "local socket", "gRPC (Run)", "KServe (ModelInfer)", "grpcio, echo"}
    assert len(table["rows"]) == len(ways) * 2 * 3
    for _, _, saturation, _, done, p50, p99, p999, calls in table["rows"]:
        assert 0 < p50 <= p99 <= p999 and calls > 0
        assert 0 < done < 2 * saturation
