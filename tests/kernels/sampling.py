"""A small part of many cases that still shows everything which the whole shows; the rest is for ``-m exhaustive``."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

__all__ = ["covering", "fields_of", "partly", "usual"]

T = TypeVar("T")


FIRST = 3
"""Cases of a covering part, those that show the most, which ``make test`` runs."""


def covering(cases: Sequence[T], shows: Callable[[T], Collection[Hashable]]) -> list[int]:
    """Places of cases that together show all that the cases show, in order. The same in every run: of cases that show
    as much, the first is taken."""
    return sorted(_those_first_that_show_the_most(cases, shows))


def _those_first_that_show_the_most(cases: Sequence[T], shows: Callable[[T], Collection[Hashable]]) -> list[int]:
    left = [set(shows(case)) for case in cases]
    missing: set[Hashable] = set().union(*left)
    chosen: list[int] = []
    most = [(-len(shown), place) for place, shown in enumerate(left)]
    heapq.heapify(most)
    while missing:
        known, place = heapq.heappop(most)
        gain = len(left[place] & missing)
        if gain < -known:  # others have shown some of it meanwhile
            heapq.heappush(most, (-gain, place))
            continue
        chosen.append(place)
        missing -= left[place]
    return chosen


def partly(cases: Iterable[T], shows: Callable[[T], Collection[Hashable]]) -> list[Any]:
    """The cases as parameters of a test: first a covering part, then the others, which have the mark ``exhaustive``.
    Of the covering part, all but ``FIRST`` cases have the mark ``extended``. A case that is a tuple stands for several
    parameters."""
    every = list(cases)
    chosen = _those_first_that_show_the_most(every, shows)
    first, more = sorted(chosen[:FIRST]), sorted(chosen[FIRST:])
    rest = sorted(set(range(len(every))) - set(chosen))

    def parameter(place: int, *marks: pytest.MarkDecorator) -> Any:
        case = every[place]
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)

    return [
        *map(parameter, first),
        *(parameter(place, pytest.mark.extended) for place in more),
        *(parameter(place, pytest.mark.exhaustive) for place in rest),
    ]


def usual(parameters: Iterable[Any]) -> list[Any]:
    """Values of the parameters that ``make test-all`` has: of what ``partly`` made, the covering part."""
    return [
        item.values[0] if len(item.values) == 1 else item.values
        for item in parameters
        if not any(mark.name == "exhaustive" for mark in item.marks)
    ]


def fields_of(case: Any, *left_out: str) -> dict[str, Hashable]:
    """The fields of a dataclass and their values, but for those ``left_out``."""
    return {item.name: getattr(case, item.name) for item in dataclasses.fields(case) if item.name not in left_out}
