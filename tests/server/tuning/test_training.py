"""Trees of LightGBM become flat arrays that go the same ways, and models choose well on what they learned."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright_kit.selection.trees import evaluate
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError
from tilewright_tools.cli.service import learning
from tilewright_tools.tuning import training

DATA = Path(__file__).parents[3] / "bench" / "data"


def leaf(value: float) -> dict[str, Any]:
    return {"leaf_value": value}


def node(feature: int, threshold: float, left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    return {"split_feature": feature, "threshold": threshold, "left_child": left, "right_child": right}


def test_a_dump_becomes_arrays_with_parents_first() -> None:
    tree = node(1, 0.1, node(0, 3.0, leaf(1.0), leaf(2.0)), leaf(4.0))
    forest = training._flat([{"tree_structure": tree}, {"tree_structure": leaf(0.5)}])
    rows = np.array([[3.0, 0.0], [3.5, 0.0], [0.0, 0.1]], np.float32)
    # fp32's 0.1 lies above the threshold, which is the double.
    assert evaluate(forest, rows).tolist() == [1.5, 2.5, 4.5]
    inner = forest.feature >= 0
    assert (forest.left[inner] > np.flatnonzero(inner)).all()


def test_files_without_results_or_of_two_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no results"):
        learning._read([tmp_path / "none.jsonl"])
    rows = [
        f'{{"operation":"gemm","arch":"sm_90a","device":"{name}","m":1,"n":8,"k":8,"dtype":"bf16","layout":"rcr",'
        '"kernel":"x","config":{},"status":"ok","median_ns":1.0}\n'
        for name in ("One", "Two")
    ]
    (tmp_path / "two.jsonl").write_text("".join(rows))
    with pytest.raises(InvalidArgumentError, match="gemm sm_90a One, gemm sm_90a Two"):
        learning._read([tmp_path / "two.jsonl"])


@pytest.mark.slow
@pytest.mark.extended
def test_the_shipped_model_is_trained_from_the_data_of_the_repository() -> None:
    from tilewright_kit.selection.trees import read_model

    for name in ("pyarrow", "lightgbm"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'tilewright[train]'")
    results, operation, device = learning._read([DATA / "gemm_h200_bf16.parquet", DATA / "gemm_h200_fp8.parquet"])
    lessons = training.lessons_of(results, operation, device)
    shipped = read_model(Path(importlib.import_module("tilewright_gemm").__file__ or "").parent / "measured/h200.npz")
    assert training.train(lessons, operation, device).data == shipped.data
    held = learning._read([DATA / "gemm_h200_bf16_holdout.parquet", DATA / "gemm_h200_fp8_holdout.parquet"])[0]
    assert not {item.case for item in held} & {item.case for item in lessons}
    for item in lessons[::10]:
        times = item.analytical * np.exp(evaluate(shipped.forest, item.features))
        assert item.best / float(item.measured[int(np.argmin(times))]) > 0.7
