"""Trials of kernels that took another's place: real traffic has the last word.

A contest has its own operands and is beside live work; caches, other kernels and the sizes of real calls may say
otherwise. What is compared is the mean time of a launch in traffic, before the change and since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright_kit.selection.measurements import Measurement
from tilewright_server.engine.statistics import KernelCounters
from tilewright_server.hosting.confirmation.hot_problems import HotProblem, spent_ns

__all__ = ["LEAST_LAUNCHES", "SLOWER", "Trial", "Verdict", "traffic_of"]

LEAST_LAUNCHES = 50
"""Launches that a mean of traffic is made of."""
SLOWER = 1.05
"""A kernel is demoted if its launches take longer than so many times those of its predecessor: less is noise."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Launches of a plan's kernels, and their time."""

    launches: int
    spent_ns: float

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.launches - before.launches, self.spent_ns - before.spent_ns)

    @property
    def mean_ns(self) -> float:
        """Nanoseconds of a launch; 0 if there were too few to tell."""
        return self.spent_ns / self.launches if self.launches >= LEAST_LAUNCHES else 0.0


def traffic_of(counters: Sequence[KernelCounters]) -> Traffic:
    """All launches of a plan's kernels so far."""
    launches = sum(counter.launches + counter.caller_launches for counter in counters)
    return Traffic(launches, spent_ns(counters))


@dataclass(slots=True)
class Trial:
    """A problem whose kernel was replaced."""

    key: tuple[object, ...]
    problem: HotProblem
    rows: Sequence[Measurement]
    """Measurements that the choice rests on."""
    before: Sequence[KernelCounters]
    """Counters of the predecessor."""
    mean_ns: float
    """Nanoseconds of its launches in traffic."""
    begun: Traffic | None = field(default=None)
    """Runs of the successor before traffic used it."""

    def verdict(self) -> Verdict | None:
        """None while too little is known."""
        counters = self.problem.counters
        if counters is self.before or list(counters) == list(self.before):
            return None  # nobody has asked for the plan since
        if self.begun is None:
            self.begun = traffic_of(counters)
            return None
        now = traffic_of(counters).since(self.begun).mean_ns
        return Verdict(now > SLOWER * self.mean_ns, now) if now else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a trial."""

    slower: bool
    mean_ns: float
    """Nanoseconds of the successor's launches in traffic."""
