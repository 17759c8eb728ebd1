"""Clients that call by a schedule, whatever the server does: delays of one call meet those that should have followed.

Each client is a thread with one call under way, as a connection has; its calls have times at which they should begin,
drawn beforehand (Poisson). A time is counted from then, so that a server that stalls is charged for all calls that
would have been made meanwhile ("coordinated omission" leaves these out).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Clients", "Load", "arrivals", "drive"]

Call = Callable[[], object]
Opened = Callable[[str, ExitStack], Call]
"""Connects to a target and returns the call that a client makes; what it opens ends with the stack."""
LEAD_S = 0.3
"""Time until all processes have heard of a load."""
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class Load:
    """Times of calls in seconds, from when they should have begun."""

    seconds: float
    """Until the last call had ended."""
    latencies: np.ndarray
    unbegun: int = 0
    """Calls that were not begun when twice the time had gone; their times until then are among the others."""

    @property
    def rate(self) -> float:
        return (len(self.latencies) - self.unbegun) / self.seconds

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.latencies, share)) if len(self.latencies) else float("nan")


def arrivals(rate: float, seconds: float, seed: int) -> np.ndarray:
    """Times of a Poisson process, from zero on."""
    rng = np.random.default_rng(seed)
    expected = rate * seconds
    gaps = rng.exponential(1 / rate, int(expected + 8 * expected**0.5 + 16))
    times = np.cumsum(gaps)
    return times[times < seconds]


def drive(
    call: Call,
    times: Sequence[float],
    cut: float,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[list[float], int]:
    """Make a call for each of ``times`` (by ``clock``), at that time or, if the one before took longer, at once.

    Returns what each took from its time on, and how many were not begun at ``cut``.
    """
    taken = []
    for number, begin in enumerate(times):
        now = clock()
        if now > cut:
            left = times[number:]
            return taken + [now - late for late in left], len(left)
        if begin > now:
            sleep(begin - now)
        call()
        taken.append(clock() - begin)
    return taken, 0


class Clients:
    """Clients in processes of their own, each with a connection. A context manager."""

    def __init__(self, opened: Opened, target: str, count: int, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        shares = [count // processes + (index < count % processes) for index in range(processes)]
        self._count = count
        self._pipes, self._processes = [], []
        for share in filter(None, shares):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(opened, target, share, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append((ours, share))
            self._processes.append(process)
        for pipe, _ in self._pipes:
            pipe.recv()

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *exc: object) -> None:
        for pipe, _ in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(30)
            process.kill()

    def saturate(self, seconds: float) -> float:
        """Calls a second if each client makes the next one as soon as it can."""
        load = self._ask([("closed", seconds) for _ in self._pipes], seconds)
        return load.rate

    def offer(self, rate: float, seconds: float, seed: int) -> Load:
        """Calls at a rate, all clients together."""
        own = rate / self._count
        tasks, first = [], seed
        for _, share in self._pipes:
            tasks.append(("open", seconds, own, first))
            first += share
        return self._ask(tasks, seconds)

    def _ask(self, tasks: Sequence[tuple[Any, ...]], seconds: float) -> Load:
        start = time.perf_counter() + LEAD_S
        for (pipe, _), task in zip(self._pipes, tasks, strict=True):
            pipe.send((start, *task))
        parts = [pipe.recv() for pipe, _ in self._pipes]
        for part in parts:
            if isinstance(part, str):
                raise RuntimeError(f"a client failed: {part}")
        spent = max(seconds, *(item for item, _, _ in parts))
        return Load(spent, np.concatenate([part for _, part, _ in parts]), sum(late for _, _, late in parts))


def _serve(opened: Opened, target: str, count: int, pipe: Any) -> None:
    """The process of some clients: does what it is asked until the pipe is closed."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # threads inherit it: sleeps end within microseconds
    with ExitStack() as stack:
        calls = [opened(target, stack) for _ in range(count)]
        for call in calls:
            call()
        pipe.send(os.getpid())
        while True:
            try:
                start, kind, seconds, *schedule = pipe.recv()
            except EOFError:
                return
            results: list[tuple[list[float], int]] = [([], 0)] * count
            errors: list[str] = []
            threads = [
                threading.Thread(target=_client, args=(results, errors, index, call, start, kind, seconds, schedule))
                for index, call in enumerate(calls)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                pipe.send(errors[0])
                continue
            spent = time.perf_counter() - start
            found = np.concatenate([np.asarray(taken, np.float64) for taken, _ in results])
            pipe.send((spent, found, sum(late for _, late in results)))


def _client(
    results: list[tuple[list[float], int]], errors: list[str], index: int, call: Call, start: float, *load: Any
) -> None:
    try:
        results[index] = _calls(call, start, *load, index)
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")


def _calls(
    call: Call, start: float, kind: str, seconds: float, schedule: Sequence[Any], index: int
) -> tuple[list[float], int]:
    end = start + seconds
    if kind == "open":
        rate, seed = schedule
        times = (start + arrivals(rate, seconds, seed + index)).tolist()
        return drive(call, times, end + seconds)
    clock = time.perf_counter
    time.sleep(max(0.0, start - clock()))
    taken = []
    while (begin := clock()) < end:
        call()
        taken.append(clock() - begin)
    return taken, 0
