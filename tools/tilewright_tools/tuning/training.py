"""Training of learned models from the results of sweeps, and their evaluation on problems that they did not see.

The trees (LightGBM, extra ``train``) fit log(measured / analytical time), each kernel weighed by how near it is to the
best of its problem. What is judged is the time of the kernel that is chosen, not the error of the fit.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_kit.commands.cases import Case
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.abilities import Searchable
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import Problem
from tilewright_kit.selection.trees import Forest, ModelFile, evaluate, schema_of
from tilewright_kit.types.errors import NotFoundError, UnsupportedError
from tilewright_tools.tuning.measure.timing import percentile
from tilewright_tools.tuning.results import Result

__all__ = ["Lesson", "Score", "by_folds", "by_holdout", "by_layer", "lessons_of", "train", "train_forest"]

Array = npt.NDArray[Any]
PARAMETERS: Mapping[str, Any] = {
    "objective": "regression", "learning_rate": 0.05, "num_leaves": 31, "max_depth": 6, "min_data_in_leaf": 10,
    "feature_fraction": 0.6, "bagging_fraction": 0.8, "bagging_freq": 1, "lambda_l2": 1.0, "seed": 1, "verbose": -1,
    "deterministic": True, "force_col_wise": True, "num_threads": 1,
}  # fmt: skip
TREES = 300
_NEAR = 2.0
"""Power of a kernel's efficiency in its weight: errors on slow kernels decide nothing."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """The measured kernels of one problem that the operation has features of."""

    case: Case
    problem: Problem
    configs: Sequence[KernelConfig]
    features: Array
    analytical: Array
    """Seconds; infinite where the planner would not consider the kernel."""
    measured: Array
    """Seconds."""
    best: float
    """Seconds of the fastest of all measured kernels, those without features included."""
    chosen: float
    """Seconds of the choice of the strategy that was judged when they were measured; 0 if it was not."""


def lessons_of(results: Sequence[Result], operation: Operation[Any, Any], device: DeviceInfo) -> list[Lesson]:
    """Results by problem. Raises ``UnsupportedError`` for an operation without a wide space, ``NotFoundError`` if
    there is nothing to learn.
    """
    if not isinstance(operation, Searchable):
        raise UnsupportedError(
            f"{operation.name} has no wide space to learn", field="operation", value=operation.name,
            rule="searchable", fix="give it the abilities of Searchable",
        )  # fmt: skip
    found: dict[Case, dict[str, Result]] = {}
    for item in results:
        wanted = (operation.name, device.arch.id, device.name)
        stamp = item.stamp
        if item.status == "ok" and item.median_ns > 0 and (stamp.operation, stamp.arch, stamp.device) == wanted:
            found.setdefault(item.case, {})[item.kernel] = item
    lessons = [_lesson(case, list(rows.values()), operation, device) for case, rows in found.items()]
    usable = [item for item in lessons if item is not None]
    if not usable:
        raise NotFoundError(
            f"no result is of {operation.name} on {device.name}", field="results", value=device.name, rule="train",
            fix="measure with `tilewright bench --oracle` on the device, or name it with --device-name",
        )  # fmt: skip
    return usable


def _lesson(case: Case, rows: list[Result], operation: Any, device: DeviceInfo) -> Lesson | None:
    problem = operation.parse(case.request())
    if not operation.search_class(problem, device):
        return None
    configs = [operation.config_type.from_dict(item.config) for item in rows]
    places = [place for place, config in enumerate(configs) if operation.search_has(config, device)]
    if len(places) < 2:
        return None
    known = [configs[place] for place in places]
    table = operation.search_table(known, device)
    return Lesson(
        case=case,
        problem=problem,
        configs=known,
        features=operation.search_features(problem, table, device),
        analytical=operation.search_times(problem, table, device),
        measured=np.array([rows[place].median_ns for place in places]) / 1e9,
        best=min(item.median_ns for item in rows) / 1e9,
        chosen=next((item.median_ns for item in rows if item.place == 1), 0.0) / 1e9,
    )


def train_forest(lessons: Sequence[Lesson]) -> Forest:
    """Fits the trees. Raises ``UnsupportedError`` without LightGBM."""
    try:
        lightgbm = importlib.import_module("lightgbm")
    except ImportError:
        raise UnsupportedError(
            "LightGBM is not installed", field="train", rule="extra", fix="pip install 'tilewright[train]'"
        ) from None
    rows, targets, weights = [], [], []
    for item in lessons:
        usable = np.isfinite(item.analytical)
        rows.append(item.features[usable])
        targets.append(np.log(item.measured[usable] / item.analytical[usable]))
        weights.append((item.measured.min() / item.measured[usable]) ** _NEAR)
    # Relative to the problem's mean: which kernel is fastest does not depend on how fast all of them are.
    centred = [values - values.mean() if len(values) else values for values in targets]
    data = lightgbm.Dataset(np.concatenate(rows), np.concatenate(centred), weight=np.concatenate(weights))
    booster = lightgbm.train(dict(PARAMETERS), data, TREES)
    return _flat(booster.dump_model()["tree_info"])


def _flat(trees: Sequence[Mapping[str, Any]]) -> Forest:
    """The trees of a LightGBM dump as arrays, parents before children."""
    feature: list[int] = []
    threshold: list[float] = []
    left: list[int] = []
    right: list[int] = []
    value: list[float] = []

    def add(node: Mapping[str, Any]) -> int:
        place = len(feature)
        inner = "split_feature" in node
        feature.append(int(node["split_feature"]) if inner else -1)
        threshold.append(_below(float(node["threshold"])) if inner else 0.0)
        value.append(0.0 if inner else float(node["leaf_value"]))
        left.append(0)
        right.append(0)
        if inner:
            left[place] = add(node["left_child"])
            right[place] = add(node["right_child"])
        return place

    root = [add(tree["tree_structure"]) for tree in trees]
    return Forest(
        np.array(feature, np.int32), np.array(threshold, np.float32), np.array(left, np.int32),
        np.array(right, np.int32), np.array(value, np.float32), np.array(root, np.int32),
    )  # fmt: skip


def _below(threshold: float) -> float:
    """The largest fp32 that is not above: features are fp32, so that nothing goes another way."""
    near = np.float32(threshold)
    return float(np.nextafter(near, np.float32(-np.inf)) if float(near) > threshold else near)


def train(lessons: Sequence[Lesson], operation: Any, device: DeviceInfo, checked: Sequence[Result] = ()) -> ModelFile:
    """A model with the kernels of every class that the lessons have, ready to be written; with ``checked`` results,
    of these kernels only those that were compared with a reference there and were right every time.
    """
    right = _right(checked, operation, device) if checked else None
    spaces: dict[str, Mapping[str, Array]] = {}
    digest = hashlib.sha256()
    for item in lessons:
        kind = operation.search_class(item.problem, device)
        if kind not in spaces:
            table = operation.search_table(operation.search_space(item.problem, device), device)
            spaces[kind] = table if right is None else _only(table, right)
        digest.update(f"{item.case.label}\n".encode())  # not its fields, of which later versions have more
        digest.update(item.measured.tobytes())
    return ModelFile(
        operation=operation.name, version=operation.version, arch=device.arch.id, device=device.name,
        schema=schema_of(operation.feature_names), data=digest.hexdigest()[:16],
        date=time.strftime("%Y-%m-%d", time.gmtime()), forest=train_forest(lessons), spaces=spaces,
    )  # fmt: skip


def _rows(table: Mapping[str, Array]) -> list[tuple[float, ...]]:
    return list(zip(*(column.tolist() for column in table.values()), strict=True))


def _right(checked: Sequence[Result], operation: Any, device: DeviceInfo) -> set[tuple[float, ...]]:
    """Rows of the table whose kernels were right wherever they were compared."""
    right: set[tuple[float, ...]] = set()
    wrong: set[tuple[float, ...]] = set()
    for item in checked:
        if item.stamp.operation == operation.name and (item.error is not None or item.status != "ok"):
            config = operation.config_type.from_dict(item.config)
            if item.status != "skipped" and operation.search_has(config, device):
                found = _rows(operation.search_table([config], device))
                (right if item.status == "ok" else wrong).update(found)
    return right - wrong


def _only(table: Mapping[str, Array], wanted: set[tuple[float, ...]]) -> Mapping[str, Array]:
    kept = [place for place, row in enumerate(_rows(table)) if row in wanted]
    return {name: column[kept] for name, column in table.items()}


# ---- evaluation ----


@dataclass(frozen=True, slots=True)
class Score:
    """Efficiencies of choices, sorted: time of the fastest measured kernel over that of the chosen one."""

    name: str
    efficiencies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.efficiencies) / len(self.efficiencies)

    def to_dict(self) -> dict[str, Any]:
        found = self.efficiencies
        return {
            "choice": self.name, "problems": len(found), "mean": self.mean, "median": statistics.median(found),
            "p10": percentile(found, 10), "least": found[0],
        }  # fmt: skip


def by_folds(lessons: Sequence[Lesson], folds: int = 5) -> list[Score]:
    """Grouped cross-validation: all kernels of a shape, of every type, are in one fold."""
    return _grouped(lessons, _sizes, folds)


def by_layer(lessons: Sequence[Lesson], folds: int = 10) -> list[Score]:
    """The same with all numbers of rows, or of images, of a layer in one fold: none is known from other batches."""
    return _grouped(lessons, lambda item: _sizes(item)[1:], folds)


def by_holdout(lessons: Sequence[Lesson], judged: Sequence[Lesson]) -> list[Score]:
    """Choices among the measured kernels of other problems."""
    seen = {item.case for item in lessons}
    apart = [item for item in judged if item.case not in seen]
    forest = train_forest(lessons)
    return _scores([(item, forest) for item in apart])


def _sizes(item: Lesson) -> tuple[int, ...]:
    """The whole numbers of a case, in the order of its columns: rows, or images, come first."""
    return tuple(value for value in item.case.to_dict().values() if type(value) is int)


def _grouped(lessons: Sequence[Lesson], group: Callable[[Lesson], Hashable], folds: int) -> list[Score]:
    groups = sorted({group(item) for item in lessons}, key=lambda key: hashlib.sha256(repr(key).encode()).digest())
    fold = {key: place % folds for place, key in enumerate(groups)}
    pairs: list[tuple[Lesson, Forest]] = []
    for left_out in range(min(folds, len(groups))):
        apart = [item for item in lessons if fold[group(item)] == left_out]
        forest = train_forest([item for item in lessons if fold[group(item)] != left_out])
        pairs += [(item, forest) for item in apart]
    return _scores(pairs)


def _scores(pairs: Sequence[tuple[Lesson, Forest]]) -> list[Score]:
    """Scores by type of the operands: of the trees, of the analytical model over the same kernels, and of whatever
    chose when they were measured.
    """
    found: dict[str, list[float]] = {}
    for item, forest in pairs:
        learned = item.analytical * np.exp(evaluate(forest, item.features))
        choices = {
            "learned": float(item.measured[int(np.argmin(learned))]),
            "analytical": float(item.measured[int(np.argmin(item.analytical))]),
            "server, when measured": item.chosen,
        }
        for name, seconds in choices.items():
            if seconds:
                found.setdefault(f"{item.case.dtype} {name}", []).append(min(1.0, item.best / seconds))
    return [Score(name, tuple(sorted(values))) for name, values in sorted(found.items())]
