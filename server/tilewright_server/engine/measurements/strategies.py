"""The strategies that choose by measurements, over what plugins ship and what the user measured."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.selection.invariant import BatchInvariant
from tilewright_kit.selection.learned import LearnedModels
from tilewright_kit.selection.measured import Auto, Measured
from tilewright_kit.selection.measurements import MeasurementSource, ShippedMeasurements
from tilewright_kit.selection.strategies import Strategy
from tilewright_server.engine.measurements.database import PerfDatabase
from tilewright_server.engine.measurements.frozen import Frozen, SelectionLock

if TYPE_CHECKING:
    from tilewright_kit.selection.trees import Evaluator

__all__ = ["Generations", "measured_strategies"]


def measured_strategies(plugins: PluginManager, database: Path | None, lock: Path | None) -> dict[str, Strategy]:
    """``measured``, ``auto`` and ``batch_invariant`` by name, and ``frozen`` where there is a file for its choices. The
    user's own database, if there is one, is laid over shipped files and learned models.
    """
    sources: list[MeasurementSource] = [ShippedMeasurements(plugins.measurements)]
    if database is not None:
        sources.append(PerfDatabase(database))
    measured = Measured(sources, LearnedModels(plugins.models, plugins.operations, _evaluator))
    auto = Auto(measured)
    found: dict[str, Strategy] = {"measured": measured, "auto": auto, "batch_invariant": BatchInvariant()}
    return found if lock is None else {**found, "frozen": Frozen(SelectionLock(lock), auto)}


def _evaluator() -> Evaluator:
    from tilewright_server.engine.measurements.trees import tree_evaluator

    return tree_evaluator()


class Generations:
    """Notices that the measurements behind strategies have changed. Thread-safe."""

    def __init__(self, strategies: Mapping[str, Strategy]) -> None:
        self._measured = next(item for item in strategies.values() if isinstance(item, Measured))
        self._lock = threading.Lock()
        self._used = self._seen = self._measured.generation

    def have_changed(self) -> bool:
        """True, once for each change, if measurements are others than before and the same as at the last call: somebody
        who measures goes on adding to them for a while.
        """
        with self._lock:
            before, self._seen = self._seen, self._measured.generation
            if self._seen != before or self._seen == self._used:
                return False
            self._used = self._seen
            return True
