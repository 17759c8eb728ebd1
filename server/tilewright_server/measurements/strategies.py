"""The strategies that choose by measurements, over what plugins ship and what the user measured."""

from __future__ import annotations

from pathlib import Path

from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.selection.measured import Auto, Measured
from tilewright_kit.selection.measurements import MeasurementSource, ShippedMeasurements
from tilewright_kit.selection.strategies import Strategy
from tilewright_server.measurements.database import PerfDatabase
from tilewright_server.measurements.frozen import Frozen, SelectionLock

__all__ = ["measured_strategies"]


def measured_strategies(plugins: PluginManager, database: Path | None, lock: Path | None) -> dict[str, Strategy]:
    """``measured`` and ``auto`` by name, and ``frozen`` where there is a file for its choices. The user's own database,
    if there is one, is laid over shipped files.
    """
    sources: list[MeasurementSource] = [ShippedMeasurements(plugins.measurements)]
    if database is not None:
        sources.append(PerfDatabase(database))
    measured = Measured(sources)
    auto = Auto(measured)
    found: dict[str, Strategy] = {"measured": measured, "auto": auto}
    return found if lock is None else {**found, "frozen": Frozen(SelectionLock(lock), auto)}
