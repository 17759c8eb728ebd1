"""Model files: read back as written, and refused with a reason when they are damaged or another's."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy

from tilewright_kit.selection.learned import LearnedModels, check_model
from tilewright_kit.selection.trees import Forest, ModelFile, evaluate, read_model, schema_of, write_model
from tilewright_kit.types.errors import InvalidArgumentError

FOREST = Forest(
    feature=np.array([0, -1, 1, -1, -1, -1], np.int32),
    threshold=np.array([0.5, 0, 2.0, 0, 0, 0], np.float32),
    left=np.array([1, 0, 3, 0, 0, 0], np.int32),
    right=np.array([2, 0, 4, 0, 0, 0], np.int32),
    value=np.array([0, -1.0, 0, 0.25, 3.0, 0.5], np.float32),
    root=np.array([0, 5], np.int32),
)
MODEL = ModelFile(
    "toy", "1", "test_arch", "Test device", schema_of(["x", "y"]), "0" * 16, "2026-11-28", FOREST,
    {"plain": {"tile": np.array([1.0, 2.0]), "step": np.array([0.5, 1e9])}},
)  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "device.npz"
    write_model(path, MODEL)
    return path


def rewritten(path: Path, **changes: Any) -> Path:
    """The file with other arrays, and entries of ``meta`` from ``meta``."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    meta = json.loads(arrays["meta"].tobytes()) | changes.pop("meta", {})
    arrays |= {"meta": np.frombuffer(json.dumps(meta).encode(), np.uint8), **changes}
    np.savez(path, **arrays)
    return path


def test_the_sum_of_the_leaves_is_found_at_thresholds_too() -> None:
    rows = np.array([[0.5, 9], [0.50001, 2.0], [0.6, 2.1], [-np.inf, 0]], np.float32)
    assert evaluate(FOREST, rows).tolist() == [-0.5, 0.75, 3.5, -0.5]


def test_a_model_is_read_as_it_was_written(file: Path) -> None:
    found = read_model(file)
    assert replace(found, forest=FOREST, spaces={}) == replace(MODEL, forest=FOREST, spaces={})
    for name in ("feature", "threshold", "left", "right", "value", "root"):
        assert np.array_equal(getattr(found.forest, name), getattr(FOREST, name))
    assert {name: column.tolist() for name, column in found.spaces["plain"].items()} == {
        "tile": [1.0, 2.0],
        "step": [0.5, 1e9],
    }


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text", "directory"])
def test_a_damaged_file_is_refused(file: Path, damage: str) -> None:
    data = bytearray(file.read_bytes())
    if damage == "directory":
        file.unlink()
        file.mkdir()
    else:
        data = {"empty": bytearray(), "cut": data[: len(data) // 2], "text": bytearray(b"no model")}.get(damage, data)
        if damage == "flipped":
            data[len(data) // 3] ^= 0xFF
        file.write_bytes(data)
    with pytest.raises(InvalidArgumentError) as caught:
        read_model(file)
    assert (caught.value.field, caught.value.rule) == ("model", "model_file")
    assert "perf train" in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"meta": {"format": 99}}, "its format is 99"),
        ({"value": np.zeros(6, np.float32)}, "does not match its digest"),
        ({"meta": {"digest": 7}}, "does not match its digest"),
    ],
)
def test_a_file_of_another_content_or_format_is_refused(file: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        read_model(rewritten(file, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"left": np.array([0, 0, 3, 0, 0, 0], np.int32)},
        {"right": np.array([6, 0, 4, 0, 0, 0], np.int32)},
        {"root": np.array([-1], np.int32)},
        {"value": np.array([0, np.nan, 0, 0, 0, 0], np.float32)},
        {"value": np.zeros(3, np.float32)},
    ],
)
def test_trees_that_would_not_end_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """With a right digest: whoever wrote it was wrong."""
    path = tmp_path / "loop.npz"
    write_model(path, replace(MODEL, forest=replace(FOREST, **changes)))
    with pytest.raises(InvalidArgumentError, match="do not end"):
        read_model(path)


@pytest.mark.parametrize(("field", "value"), [("version", "other"), ("schema", "f" * 16)])
def test_a_model_of_another_generator_is_refused_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str, value: str
) -> None:
    operation = toy.ToyOperation()
    path = tmp_path / "foreign.npz"
    write_model(path, replace(MODEL, **{"version": operation.version, "schema": "", field: value}))
    with pytest.raises(InvalidArgumentError, match=f"is a model for {field} {value} of toy"):
        check_model(read_model(path), operation, path.name)
    with caplog.at_level(logging.ERROR):
        models = LearnedModels([path], {"toy": operation})
    assert [error.rule for error in models.read()] == ["model_file"]
    assert "a learned model is not used: foreign.npz" in caplog.text
