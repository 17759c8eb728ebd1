"""What runs always shows all that the whole shows; the rest is marked."""

from __future__ import annotations

from sampling import FIRST, covering, partly, usual

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
    names = [[mark.name for mark in item.marks] for item in found]
    assert names == [[]] * FIRST + [["extended"]] * (5 - FIRST) + [["exhaustive"]] * 15
    assert set().union(*usual(found)) == {*"abcd", *range(5)}, "make test-all has the covering part"
