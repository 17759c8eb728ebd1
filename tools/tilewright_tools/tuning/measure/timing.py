"""Timing of one program: warm-up, samples, and when to stop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tilewright_kit.numerics.contents import Init

__all__ = ["Timer", "Timing", "TimingOptions", "measure", "percentile"]

Timer = Literal["device", "host"]
"""The device's own events; or the clock of the host around each run, launch and wait included."""

MIN_SAMPLE_NS = 100_000
"""A sample lasts at least this long, by repeats, so that neither clock's steps nor launches matter."""
MOST_REPEATS = 1000
HEAT = 3
"""Samples after which a kernel that is clearly slower is given up."""


@dataclass(frozen=True, slots=True)
class TimingOptions:
    warmup: int = 3
    """Runs before the first sample."""
    repeat: int = 20
    """Samples."""
    rotating: int = 0
    """Sets of operands that are used in turns; 0: on GPUs as many as exceed the caches twice, on CPUs one."""
    flush: bool = False
    """Overwrite the caches before every sample; a sample is then one run."""
    timer: Timer = "device"
    init: Init = "normal"
    seconds: float = 1.0
    """Longest time for the samples of one kernel; three are always taken."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> TimingOptions:
        return cls(**record)


@dataclass(frozen=True, slots=True)
class Timing:
    """Nanoseconds of one run."""

    median_ns: float
    p10_ns: float
    p90_ns: float
    samples: int
    cut: bool = False
    """Given up early, since it was slower than what was asked for."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of sorted samples."""
    place = -(-len(ordered) * percent // 100) - 1
    return ordered[min(len(ordered) - 1, max(0, int(place)))]


def measure(
    run: Callable[[int], float],
    options: TimingOptions,
    *,
    limit_ns: float = 0.0,
    before: Callable[[], None] | None = None,
    turns: int = 1,
) -> Timing:
    """Time ``run(repeat)``, which makes ``turns`` runs ``repeat`` times and returns the nanoseconds of one of them.

    ``before`` is called ahead of every sample, which then is one run. A kernel whose first samples are all above
    ``limit_ns`` (if that is not zero) is given up.
    """
    end = time.monotonic() + options.seconds
    once = run(1)
    for _ in range(max(0, options.warmup - 1)):
        once = min(once, run(1))
        if time.monotonic() > end:
            break
    # Of a program of several launches GPUs time the first repeat launch by launch, and only the others as they run.
    least = 1 if turns == 1 else 2
    repeat = 1 if before is not None else max(least, round(MIN_SAMPLE_NS / max(once * turns, 1.0)))
    repeat = min(MOST_REPEATS, repeat)
    samples: list[float] = []
    cut = False
    while len(samples) < max(1, options.repeat):
        if before is not None:
            before()
        samples.append(run(repeat))
        enough = len(samples) >= HEAT
        if enough and limit_ns and min(samples) > limit_ns:
            cut = True
            break
        if enough and time.monotonic() > end:
            break
    ordered = sorted(samples)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return Timing(median, percentile(ordered, 10), percentile(ordered, 90), len(ordered), cut)
