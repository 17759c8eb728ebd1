"""Reading attributes: words out of lists, numbers within bounds, each refusal with what would do."""

from __future__ import annotations

from typing import Any

import pytest

from tilewright_kit.contract.declaration import choices_of
from tilewright_kit.requests.attributes import integer, take_int, take_word, word
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.vocabulary import Reduction

HOW = word("how", "A way to add up.", choices_of(Reduction), aliases={"pairwise": "tree"})
COUNT = integer("count", "Parts.", 3, 1, 8)


def test_a_word_is_one_of_its_list_or_an_alias() -> None:
    def take(value: Any) -> Reduction | None:
        return take_word({"how": value}, HOW, Reduction, "a way to add up")

    assert take("linear") is Reduction.LINEAR
    assert take("pairwise") is Reduction.TREE
    assert take_word({}, HOW, Reduction, "a way to add up") is None
    with pytest.raises(InvalidArgumentError, match="is not a way to add up") as caught:
        take("linaer")
    assert "did you mean linear?" in caught.value.fix
    with pytest.raises(InvalidArgumentError) as caught:
        take(3)
    assert caught.value.rule == "attribute_type"


def test_an_integer_has_the_bounds_and_the_default_of_its_declaration() -> None:
    assert [take_int(given, COUNT) for given in ({}, {"count": 1}, {"count": 8})] == [3, 1, 8]
    for wrong in (0, 9):
        with pytest.raises(InvalidArgumentError, match="must be from 1 to 8"):
            take_int({"count": wrong}, COUNT)
