"""How everything here is timed: candidates take turns in one process, so that changes of clock or load meet all."""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Timed = Callable[[int], float]
"""Does its work ``n`` times and returns the seconds that this took."""


def wall(call: Callable[[], object]) -> Timed:
    """The wall-clock time of ``call``."""

    def timed(repeat: int) -> float:
        begun = time.perf_counter()
        for _ in range(repeat):
            call()
        return time.perf_counter() - begun

    return timed


def processor(call: Callable[[], object]) -> Timed:
    """The processor time of this process meanwhile: on a busy machine, what a call of one thread takes."""

    def timed(repeat: int) -> float:
        begun = time.process_time()
        for _ in range(repeat):
            call()
        return time.process_time() - begun

    return timed


@dataclass(frozen=True)
class Measured:
    """Seconds per call: the median over rounds, the best of them, and the quartiles as a measure of unrest."""

    seconds: float
    best: float
    low: float
    high: float


def alternate(
    candidates: Mapping[str, Timed], *, round_s: float = 0.04, rounds: int = 9, settle_s: float = 0.01
) -> dict[str, Measured]:
    """Time the candidates in turns: ``rounds`` times each, every turn long enough to last ``round_s`` seconds.

    The order is reversed from round to round, so that none always follows the same other.
    """
    samples = _in_turns(candidates, round_s, rounds, settle_s)
    return {name: _measured(values) for name, values in samples.items()}


def in_rounds(
    candidates: Mapping[str, Timed],
    above: str,
    below: str,
    *,
    round_s: float = 0.04,
    rounds: int = 9,
    settle_s: float = 0.01,
) -> tuple[dict[str, float], float]:
    """Median seconds of each candidate, and the median over rounds of ``above`` over ``below``: what slows the machine
    down for longer than a round does so to both.
    """
    samples = _in_turns(candidates, round_s, rounds, settle_s)
    ratios = [one / other for one, other in zip(samples[above], samples[below], strict=True)]
    return {name: statistics.median(values) for name, values in samples.items()}, statistics.median(ratios)


def _in_turns(candidates: Mapping[str, Timed], round_s: float, rounds: int, settle_s: float) -> dict[str, list[float]]:
    repeats: dict[str, int] = {}
    for name, candidate in candidates.items():
        candidate(1)  # first calls build, pack and fault pages in
        once = max(min(candidate(1), candidate(1)), 1e-7)
        repeats[name] = max(1, round(round_s / once))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                time.sleep(settle_s)  # spinning threads of the one before go to sleep
                samples[name].append(candidates[name](repeats[name]) / repeats[name])
    finally:
        if was_enabled:
            gc.enable()
    return samples


def _measured(values: Sequence[float]) -> Measured:
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return Measured(statistics.median(ordered), ordered[0], ordered[quarter], ordered[-1 - quarter])


def latencies(call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of ``count`` calls, sorted."""
    samples = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        samples.append(time.perf_counter() - begun)
    return sorted(samples)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of sorted samples."""
    return ordered[min(len(ordered) - 1, max(0, math.ceil(len(ordered) * percent / 100) - 1))]


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def peer_environment(threads: int) -> dict[str, str]:
    """The environment in which peers do their best: OpenBLAS picks its own kernels, all have ``threads`` threads.

    Idle threads of the peers spin so long by default that they would take the core from whoever is measured next (half
    the speed for 30 ms and more was seen): they are told to sleep sooner, which costs them nothing while they work.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        env[name] = str(threads)
    return env | {"OPENBLAS_THREAD_TIMEOUT": "20", "GOMP_SPINCOUNT": "100000"}


def machine() -> dict[str, Any]:
    """Date, hardware and versions: what a figure means nothing without."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "arch": _arch(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "versions": {
            name: _version(name) for name in ("tilewright", "numpy", "torch", "grpcio", "protobuf", "ziglang")
        },
        "compiler": _compiler(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _arch() -> str:
    import tilewright_arch

    return tilewright_arch.detect_cpu().id


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except OSError:
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def _commit() -> str:
    return _first_line(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"])


def _compiler() -> str:
    return _first_line(["c++", "--version"]) or _first_line(["clang++", "--version"])
