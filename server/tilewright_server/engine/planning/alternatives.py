"""Kernels that may stand in for the best one while it is being built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from tilewright_kit.selection.strategies import Heuristic, Proposes, Ranked
from tilewright_server.engine.planning.plan_cache_entry import Question

__all__ = ["alternatives"]

_FALLBACKS_TRIED = 64
"""Candidates that are looked at for one that is built already."""


def alternatives(question: Question, ranked: Sequence[Ranked]) -> Iterator[Ranked]:
    """Kernels that may stand in for the first: the others of the ranking, and candidates that a strategy that proposes
    kernels by itself left aside.
    """
    yield from ranked[1:_FALLBACKS_TRIED]
    if isinstance(question.strategy, Proposes):
        operation, problem, device = question.operation, question.problem, question.device
        taken = {item.config for item in ranked}
        rest = Heuristic().rank(operation, problem, operation.candidates(problem, device), device)
        yield from islice((item for item in rest if item.config not in taken), _FALLBACKS_TRIED)
