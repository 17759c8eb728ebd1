"""libtilewright gives the sums of trees that NumPy gives."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright_kit.selection.trees import Forest, evaluate
from tilewright_native import library_path
from tilewright_server.engine.measurements.trees import tree_evaluator


def grown(rng: np.random.Generator, trees: int, depth: int, features: int) -> Forest:
    """Complete trees."""
    inner, each = 2**depth - 1, 2 ** (depth + 1) - 1
    place = np.arange(each, dtype=np.int32)
    one = np.where(place < inner, 2 * place + 1, 0).astype(np.int32)
    first = (np.arange(trees, dtype=np.int32) * each)[:, None]
    feature = rng.integers(0, features, (trees, each)).astype(np.int32)
    feature[:, inner:] = -1
    return Forest(
        feature.reshape(-1),
        rng.standard_normal(trees * each).astype(np.float32),
        (first + one).astype(np.int32).reshape(-1),
        (first + one + 1).astype(np.int32).reshape(-1),
        rng.standard_normal(trees * each).astype(np.float32),
        first.reshape(-1).copy(),
    )


def test_native_sums_are_those_of_numpy() -> None:
    try:
        library_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    rng = np.random.default_rng(4)
    forest = grown(rng, 40, 5, 9)
    run = tree_evaluator()
    assert run is not evaluate
    for count in (0, 1, 33):
        rows = rng.standard_normal((count, 9)).astype(np.float32)
        assert run(forest, rows) == pytest.approx(evaluate(forest, rows), abs=1e-9)
    with pytest.raises(ValueError, match="look at feature 8 of 3"):
        run(forest, np.zeros((2, 3), np.float32))
