"""Work beside that of clients, as the settings say: observers of the problems that are asked for, and the fleet's
storage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from tilewright_server.engine.engine import Engine
from tilewright_server.service import Observer
from tilewright_server.settings import Settings

__all__ = ["open_observers"]


def open_observers(
    settings: Settings, engine: Engine, changed: Callable[[], object], parts: ExitStack
) -> list[Observer]:
    """The journal and the confirmation of choices, where settings ask for them, and without an observer the fleet's
    storage, ended with ``parts``. ``changed`` is called every few seconds, since measurements may have changed.

    Raises ``InvalidArgumentError``, and what ``open_fleet`` raises.
    """
    found: list[Observer] = []
    if settings.journal is not None:
        from tilewright_server.engine.planning.journal import Journal

        journal = Journal(settings.journal, settings.journal_bytes)
        parts.callback(journal.close)
        found.append(lambda asked, selection, plan, count: journal.note(asked, selection, plan.device, count))
    if settings.confirm_share and settings.perf_database is not None:
        from tilewright_server.engine.measurements.database import PerfDatabase
        from tilewright_server.hosting.confirmation.budget import Budget
        from tilewright_server.hosting.confirmation.confirmation import Confirmation

        budget = Budget(settings.confirm_share, settings.confirm_builds)
        confirmation = Confirmation(engine, PerfDatabase(settings.perf_database), budget, changed)
        confirmation.start()
        parts.callback(confirmation.close)
        found.append(confirmation.problems.note)
    if settings.fleet:
        from tilewright_server.hosting.fleet.fleet import open_fleet

        open_fleet(settings, engine, changed, parts)
    return found
