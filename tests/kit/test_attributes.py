"""Reading attributes: numbers within bounds and words out of lists, each refusal with what would do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tilewright_kit.requests.attributes import take_number, take_word
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.vocabulary import Reduction


@pytest.mark.parametrize(
    "value, bounds, fits",
    [
        (0, {}, True),
        (1, {}, True),
        (0.5, {}, True),
        (1, {"below": True}, False),
        (0, {"above": True}, False),
        (1e-300, {"above": True}, True),
        (-0.01, {}, False),
        (1.01, {}, False),
        (math.nan, {}, False),
        (math.inf, {}, False),
        (10**400, {}, False),
    ],
)
def test_a_number_is_within_its_bounds(value: Any, bounds: dict[str, bool], fits: bool) -> None:
    if fits:
        assert take_number({"p": value}, "p", 0.25, 0.0, 1.0, **bounds) == float(value)
        return
    with pytest.raises(InvalidArgumentError) as caught:
        take_number({"p": value}, "p", 0.25, 0.0, 1.0, **bounds)
    assert (caught.value.field, caught.value.rule) == ("attributes.p", "attribute_range")
    assert caught.value.fix.startswith("give a number")


def test_a_number_without_an_upper_bound_is_finite() -> None:
    assert take_number({"p": 1e300}, "p", 1.0, 0.0, math.inf) == 1e300
    with pytest.raises(InvalidArgumentError, match="finite"):
        take_number({"p": math.inf}, "p", 1.0, 0.0, math.inf)
    assert take_number({}, "p", 0.25, 0.0, 1.0) == 0.25
    with pytest.raises(InvalidArgumentError) as caught:
        take_number({"p": True}, "p", 0.25, 0.0, 1.0)
    assert caught.value.rule == "attribute_type"


def test_a_word_is_one_of_its_list_or_an_alias() -> None:
    def take(value: Any) -> Reduction | None:
        return take_word({"how": value}, "how", Reduction, {"pairwise": "tree"}, "a way to add up")

    assert take("linear") is Reduction.LINEAR
    assert take("pairwise") is Reduction.TREE
    assert take_word({}, "how", Reduction, {}, "a way to add up") is None
    with pytest.raises(InvalidArgumentError, match="is not a way to add up") as caught:
        take("linaer")
    assert "did you mean linear?" in caught.value.fix
    with pytest.raises(InvalidArgumentError) as caught:
        take(3)
    assert caught.value.rule == "attribute_type"
