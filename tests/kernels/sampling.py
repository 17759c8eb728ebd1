"""A small part of many cases that still shows everything which the whole shows; the rest is for ``-m exhaustive``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

__all__ = ["covering", "fields_of", "partly"]

T = TypeVar("T")


def covering(cases: Sequence[T], shows: Callable[[T], Collection[Hashable]]) -> list[int]:
    """Places of cases that together show all that the cases show, in order. The same in every run: of cases that show
    as much, the first is taken."""
    left = [set(shows(case)) for case in cases]
    missing: set[Hashable] = set().union(*left)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda place: len(left[place] & missing))
        chosen.append(best)
        missing -= left[best]
    return sorted(chosen)


def partly(cases: Iterable[T], shows: Callable[[T], Collection[Hashable]]) -> list[Any]:
    """The cases as parameters of a test: first a covering part, which runs always, then the others, which have the mark
    ``exhaustive``. A case that is a tuple stands for several parameters."""
    every = list(cases)
    always = covering(every, shows)
    rest = sorted(set(range(len(every))) - set(always))

    def parameter(place: int, *marks: pytest.MarkDecorator) -> Any:
        case = every[place]
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)

    return [*map(parameter, always), *(parameter(place, pytest.mark.exhaustive) for place in rest)]


def fields_of(case: Any, *left_out: str) -> dict[str, Hashable]:
    """The fields of a dataclass and their values, but for those ``left_out``."""
    return {item.name: getattr(case, item.name) for item in dataclasses.fields(case) if item.name not in left_out}
