"""Proposals of a learned model: the analytical time over a wide space keeps some, boosted trees order those.

The trees were fitted to the logarithm of measured over analytical time, so that of a problem unlike any that was
measured the analytical model is left. Everything is a function of the problem, the device and the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.abilities import Searchable
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation, Prediction
from tilewright_kit.contract.problem import Problem
from tilewright_kit.selection.candidates import Verdicts
from tilewright_kit.selection.strategies import LEARNED, Ranked
from tilewright_kit.types.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy.typing as npt

    from tilewright_kit.selection.trees import Evaluator, ModelFile

    Array = npt.NDArray[Any]

__all__ = ["KEPT", "PROPOSED", "LearnedModels", "check_model"]

log = logging.getLogger(__name__)

KEPT = 200
"""Kernels of the wide space that the trees see, those of least analytical time."""
PROPOSED = 8
"""Kernels that are proposed; the first runs, the others stand in for it where it cannot be built."""


def check_model(model: ModelFile, operation: Operation[Any, Any], file: str) -> None:
    """Raise ``InvalidArgumentError`` for a model of another version of the operation, or of other features."""
    from tilewright_kit.selection.trees import schema_of

    names = operation.feature_names if isinstance(operation, Searchable) else ()
    for field, have, want in (
        ("version", model.version, operation.version),
        ("schema", model.schema, schema_of(names) if names else ""),
    ):
        if have != want:
            raise InvalidArgumentError(
                f"{file} is a model for {field} {have or 'none'} of {operation.name}, which has {want or 'none'}",
                field="model",
                value=file,
                rule="model_file",
                fix="train it again with `tilewright perf train`, or remove the file: the analytical model then serves",
            )


class LearnedModels:
    """The models of all plugins, read when they are first needed. A file that cannot be used is told in the log, and
    serves nobody. Thread-safe.
    """

    def __init__(
        self,
        files: Sequence[Path] = (),
        operations: Mapping[str, Operation[Any, Any]] | None = None,
        evaluator: Callable[[], Evaluator] | None = None,
    ) -> None:
        """``evaluator`` returns what sums the trees; NumPy does without one."""
        self._files = tuple(files)
        self._operations = operations or {}
        self._evaluator = evaluator
        self._reading = Lock()
        self._read = False
        self._models: dict[tuple[str, str, str], ModelFile] = {}
        self._verdicts: dict[str, Verdicts[KernelConfig]] = {}
        self._refused: list[InvalidArgumentError] = []

    def read(self) -> list[InvalidArgumentError]:
        """Read the files, unless that was done; reasons against them."""
        if not self._read:
            with self._reading:
                if not self._read:
                    self._read_files()
                    self._read = True
        return self._refused

    def _read_files(self) -> None:
        if not self._files:
            return
        from tilewright_kit.selection.trees import evaluate, read_model

        self._evaluate = evaluate if self._evaluator is None else self._evaluator()
        for path in self._files:
            try:
                model = read_model(path)
                operation = self._operations.get(model.operation)
                if operation is None:
                    continue  # its plugin is switched off
                check_model(model, operation, path.name)
                self._models[model.operation, model.arch, model.device] = model
                self._verdicts[model.operation] = Verdicts(operation.rules)
            except InvalidArgumentError as error:
                self._refused.append(error)
                log.error("a learned model is not used: %s. Fix: %s", error.reason, error.fix)

    def has(self, operation: Operation[Any, Any], device: DeviceInfo) -> bool:
        """True if there is a model of the operation for this very kind of device."""
        self.read()
        return (operation.name, device.arch.id, device.name) in self._models

    def propose(self, operation: Operation[Any, Any], problem: Problem, device: DeviceInfo) -> list[Ranked]:
        """Valid kernels by predicted time, the fastest first; empty where no model covers the problem."""
        self.read()
        model = self._models.get((operation.name, device.arch.id, device.name))
        if model is None or not isinstance(operation, Searchable):
            return []
        table = model.spaces.get(operation.search_class(problem, device))
        if table is None:
            return []
        times = operation.search_times(problem, table, device)
        kept = _least(times, KEPT)
        if not len(kept):
            return []
        some = {name: column[kept] for name, column in table.items()}
        ratios = self._evaluate(model.forest, operation.search_features(problem, some, device))
        import numpy as np

        seconds = times[kept] * np.exp(ratios)
        # Rows of equal times stay in the file's order, which is the space's own.
        order = np.argsort(seconds, kind="stable")
        return self._usable(operation, problem, device, some, order, seconds, times[kept])

    def _usable(
        self,
        operation: Any,
        problem: Problem,
        device: DeviceInfo,
        table: Mapping[str, Array],
        order: Array,
        seconds: Array,
        analytical: Array,
    ) -> list[Ranked]:
        verdicts, found = self._verdicts[operation.name], []
        for row in order.tolist():
            config = operation.search_config(problem, table, row, device)
            if verdicts.allows(config, device) and not operation.mismatches(problem, config, device):
                time, before = float(seconds[row]), float(analytical[row])
                reason = f"predicted {time * 1e6:.3g} us by the learned model ({before * 1e6:.3g} us analytically)"
                found.append(Ranked(config, reason, Prediction(time, {"analytical": before}), LEARNED))
                if len(found) == PROPOSED:
                    break
        return found


def _least(times: Array, most: int) -> Array:
    """Places of the least finite times, in the order of the table."""
    import numpy as np

    usable = np.flatnonzero(np.isfinite(times))
    if len(usable) > most:
        order = np.argsort(times[usable], kind="stable")[:most]
        usable = np.sort(usable[order])
    return usable
