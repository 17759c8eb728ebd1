"""What runs always shows all that the whole shows; the rest is marked."""

from __future__ import annotations

from sampling import covering, partly

CASES = [(letter, number) for letter in "abcd" for number in range(5)]


def test_a_covering_part_shows_everything_and_is_small() -> None:
    chosen = covering(CASES, set)
    assert set().union(*(CASES[place] for place in chosen)) == {*"abcd", *range(5)}
    assert len(chosen) == 5
    assert chosen == sorted(set(chosen))
    assert covering([], set) == []


def test_what_is_left_out_is_marked_exhaustive_and_nothing_is_lost() -> None:
    found = partly(CASES, set)
    assert {item.values for item in found} == set(CASES)
    marked = [bool(item.marks) for item in found]
    assert marked == [False] * 5 + [True] * 15
    assert {mark.name for item in found for mark in item.marks} == {"exhaustive"}
