"""One experiment with a Hopper GEMM kernel, in the worker process of check.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from sm90.launch import Launcher, Problem, graph_of, peer_of, time_graphs
from sm90.suites import Experiment

ROTATION_BYTES = 200 << 20
"""Inputs are rotated over at least this much memory: several times the L2 cache."""


def prepare() -> None:
    """Create the context."""
    torch.zeros(1, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def run(experiment: Experiment, cubin: bytes) -> dict[str, Any]:
    """Check it, then, if asked, time it beside its peer. Returns the figures by name."""
    torch.manual_seed(torch.seed() % 2**31)
    result = checked(experiment, cubin)
    if experiment.time:
        result |= timed(experiment, cubin)
    torch.cuda.empty_cache()
    return result


def problems_of(experiment: Experiment) -> list[Problem]:
    m, n, k = experiment.shape
    shapes = [(m, n, k)]
    if experiment.config.grouped:  # tasks of several sizes
        shapes = [(m, n, k), (max(1, m // 3), n, k), (m, max(8, n // 2), k // 2 + 8), (1, n, k), (m, n, 8)]
    return [
        Problem(experiment.config, *shape, batch=experiment.batch, alpha=experiment.alpha, guard=experiment.guard)
        for shape in shapes
    ]


def checked(experiment: Experiment, cubin: bytes) -> dict[str, Any]:
    problems = problems_of(experiment)
    launch = Launcher(experiment.config, cubin, problems)
    launch()
    torch.cuda.synchronize()
    error = max(p.error() for p in problems)
    result: dict[str, Any] = {"error": error if math.isfinite(error) else 1e9}
    if experiment.config.stream or experiment.config.split_k > 1:
        first = [p.c.clone() for p in problems]
        for _ in range(3):
            for p in problems:
                p.poison()
            launch()
        torch.cuda.synchronize()
        same = all(torch.equal(x.nan_to_num(7.0), p.c.nan_to_num(7.0)) for x, p in zip(first, problems, strict=True))
        result |= {"repeatable": same, "counters": int(launch.counters.abs().sum())}
    return result


def timed(experiment: Experiment, cubin: bytes) -> dict[str, Any]:
    one = problems_of(experiment)[0]
    footprint = sum(t.numel() * t.element_size() for t in (one.a, one.b, one.c))
    sets = [one] + [problems_of(experiment)[0] for _ in range(min(32, math.ceil(ROTATION_BYTES / footprint)) - 1)]
    launches: list[Callable[[], object]] = [Launcher(experiment.config, cubin, [p], experiment.dependent) for p in sets]
    times = max(1, math.ceil(8 / len(sets)))
    graphs = {"seconds": graph_of(launches * times)}
    peers = [peer_of(experiment.config, p) for p in sets]
    calls = [peer for peer in peers if peer is not None]
    if calls:
        graphs["peer"] = graph_of(calls * times)
    return dict(time_graphs(graphs, len(sets) * times))
