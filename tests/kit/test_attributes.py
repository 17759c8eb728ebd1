"""Reading attributes: words out of lists, each refusal with what would do."""

from __future__ import annotations

from typing import Any

import pytest

from tilewright_kit.requests.attributes import take_word
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.vocabulary import Reduction


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
