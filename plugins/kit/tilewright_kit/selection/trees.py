"""Boosted regression trees as flat arrays, and the files that keep them; evaluated without what trained them.

A file is a NumPy archive (``.npz``) of plain arrays: ``meta`` (JSON as bytes), ``feature``, ``threshold``, ``left``,
``right``, ``value`` of all nodes, ``root`` of each tree, and the table of kernels of every class,
``space/CLASS/TRAIT``.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["FORMAT", "Evaluator", "Forest", "ModelFile", "evaluate", "read_model", "schema_of", "write_model"]

FORMAT = 1
Array = npt.NDArray[Any]
_NODES = (
    ("feature", np.int32), ("threshold", np.float32), ("left", np.int32), ("right", np.int32), ("value", np.float32),
)  # fmt: skip
_WORDS = ("operation", "version", "arch", "device", "schema", "data", "date")
_SPACE = "space/"


@dataclass(frozen=True, slots=True)
class Forest:
    """Nodes of all trees. A leaf has the feature -1; other nodes go left where ``row[feature] <= threshold``.
    Children come after their parents, so that every walk ends.
    """

    feature: Array
    threshold: Array
    left: Array
    right: Array
    value: Array
    root: Array


Evaluator = Callable[[Forest, npt.NDArray[np.float32]], npt.NDArray[np.float64]]
"""Sums of the trees for every row."""


def evaluate(forest: Forest, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The sums in NumPy: all trees of all rows take a step at a time."""
    count, width = rows.shape
    flat = np.ascontiguousarray(rows, np.float32).reshape(-1)
    nodes = np.broadcast_to(forest.root, (count, len(forest.root))).copy()
    offset = (np.arange(count, dtype=np.int64) * width)[:, None]
    inner = forest.feature[nodes] >= 0
    while inner.any():
        feature = forest.feature[nodes]
        inner = feature >= 0
        goes_left = flat[offset + np.maximum(feature, 0)] <= forest.threshold[nodes]
        nodes = np.where(inner, np.where(goes_left, forest.left[nodes], forest.right[nodes]), nodes)
    found: npt.NDArray[np.float64] = forest.value[nodes].astype(np.float64).sum(axis=1)
    return found


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model with what it may be used for."""

    operation: str
    version: str
    """Version of the operation: another generator makes other kernels."""
    arch: str
    device: str
    schema: str
    """Digest of the names of the features."""
    data: str
    """Digest of the rows that it was trained with."""
    date: str
    forest: Forest
    spaces: Mapping[str, Mapping[str, Array]]
    """Traits of every kernel that may be proposed, by class of problems."""


def schema_of(names: Sequence[str]) -> str:
    """Digest of a schema of features."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def write_model(path: Path, model: ModelFile) -> None:
    """Write a model; the file appears as a whole."""
    arrays = _arrays(model)
    meta = {name: getattr(model, name) for name in _WORDS} | {"format": FORMAT, "digest": _digest(arrays)}
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(meta, sort_keys=True).encode(), np.uint8)
    np.savez_compressed(buffer, allow_pickle=False, meta=text, **arrays)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(buffer.getvalue())
    partial.replace(path)


def read_model(path: Path) -> ModelFile:
    """The model of a file. Raises ``InvalidArgumentError`` for a damaged file and one of another format."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        meta = json.loads(arrays.pop("meta").tobytes())
        form, digest = meta["format"], meta["digest"]
        words = {name: str(meta[name]) for name in _WORDS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise _bad(path, f"it cannot be read: {error}") from None
    if form != FORMAT:
        raise _bad(path, f"its format is {form}, this release reads {FORMAT}")
    if digest != _digest(arrays):
        raise _bad(path, "its content does not match its digest")
    spaces: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        if name.startswith(_SPACE):
            kind, _, trait = name[len(_SPACE) :].partition("/")
            spaces.setdefault(kind, {})[trait] = array.astype(np.float64)
    try:
        nodes = {name: np.ascontiguousarray(arrays[name], kind) for name, kind in _NODES}
        forest = Forest(**nodes, root=np.ascontiguousarray(arrays["root"], np.int32))
    except (KeyError, ValueError, TypeError) as error:
        raise _bad(path, f"its trees are incomplete: {error}") from None
    if not _is_sound(forest):
        raise _bad(path, "its trees do not end")
    return ModelFile(**words, forest=forest, spaces=spaces)


def _arrays(model: ModelFile) -> dict[str, Array]:
    arrays = {name: np.ascontiguousarray(getattr(model.forest, name), kind) for name, kind in _NODES}
    arrays["root"] = np.ascontiguousarray(model.forest.root, np.int32)
    for kind, table in sorted(model.spaces.items()):
        for trait, column in table.items():
            whole = bool(np.all(column == np.rint(column)) and np.all(np.abs(column) < 2**15))
            arrays[f"{_SPACE}{kind}/{trait}"] = column.astype(np.int16 if whole else np.float64)
    return arrays


def _digest(arrays: Mapping[str, Array]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _is_sound(forest: Forest) -> bool:
    """True if all arrays are of one length, and every child exists and comes after its parent."""
    count = len(forest.feature)
    if any(len(getattr(forest, name)) != count for name, _ in _NODES) or not len(forest.root):
        return False
    if forest.root.min() < 0 or forest.root.max() >= count or not np.isfinite(forest.value).all():
        return False
    inner = np.flatnonzero(forest.feature >= 0)
    return bool(
        np.all(forest.left[inner] > inner)
        and np.all(forest.right[inner] > inner)
        and np.all(forest.left[inner] < count)
        and np.all(forest.right[inner] < count)
    )


def _bad(path: Path, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{path.name} is no model of kernels' times: {reason}",
        field="model",
        value=path.name,
        rule="model_file",
        fix="train it again with `tilewright perf train`, or remove the file: the analytical model then serves",
    )
