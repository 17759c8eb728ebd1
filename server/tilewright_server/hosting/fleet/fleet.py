"""The fleet's storage as the settings say, with all that is shared through it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_server.build.build import SharedState
from tilewright_server.build.cache.artifacts import ArtifactMeta
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.measurements.database import PerfDatabase
from tilewright_server.hosting.fleet.kernels import SharedKernels
from tilewright_server.hosting.fleet.measurements import SharedMeasurements
from tilewright_server.hosting.fleet.seal import Seal
from tilewright_server.hosting.fleet.store import Store
from tilewright_server.settings import Settings

__all__ = ["Fleet", "open_fleet"]

log = logging.getLogger(__name__)


class Fleet:
    """Kernels and measurements of one storage; ``SharedStore`` of the build pool."""

    def __init__(self, store: Store, kernels: SharedKernels, measurements: SharedMeasurements | None) -> None:
        self.store, self.kernels, self.measurements = store, kernels, measurements

    def fetch(self, key: str, unit: SourceUnit, arch: ArchSpec) -> ArtifactMeta | None:
        return self.kernels.fetch(key, unit, arch)

    def built(self, key: str) -> None:
        self.kernels.built(key)

    def state(self) -> SharedState:
        found = self.kernels.counters
        objects = {
            ("kernel", "hit"): found.hits,
            ("kernel", "miss"): found.misses,
            ("kernel", "refused"): found.refused,
            ("kernel", "unread"): found.unread,
            ("kernel", "written"): found.written,
            ("kernel", "unwritten"): found.unwritten,
            ("kernel", "dropped"): found.dropped,
        }
        if self.measurements is not None:
            rows = self.measurements.counters
            objects |= {
                ("measurement", "hit"): rows.read,
                ("measurement", "written"): rows.written,
                ("measurement", "refused"): rows.refused,
            }
        return SharedState(objects, self.kernels.waiting, not self.store.breaker.is_open)

    def close(self) -> None:
        if self.measurements is not None:
            self.measurements.close()
        self.kernels.close()


def open_fleet(settings: Settings, engine: Engine, changed: Callable[[], object], parts: ExitStack) -> Fleet:
    """Have the engine's builds go through the storage that the settings name, until ``parts`` are closed. ``changed``
    is called after measurements were added. Connects to nothing.

    Raises what ``Store`` and ``Seal`` raise.
    """
    store = Store(settings.fleet, settings.fleet_timeout_s)
    seal = Seal(settings.fleet_key, settings.trusted_keys)
    kernels = SharedKernels(engine.cache, store, seal, write=settings.fleet_write)
    measurements = None
    if settings.perf_database is not None:
        measurements = SharedMeasurements(
            PerfDatabase(settings.perf_database),
            store,
            seal,
            changed,
            write=settings.fleet_write,
            interval_s=settings.fleet_interval_s,
        )
    fleet = Fleet(store, kernels, measurements)
    parts.callback(fleet.close)
    engine.pool.shared = fleet
    if measurements is not None:
        measurements.start()
    signed = "signed ones only" if settings.trusted_keys is not None else "unsigned ones too"
    if settings.fleet_write and settings.trusted_keys is not None and not seal.is_trusted:
        log.warning(
            "what this server writes is refused by servers with its own trusted_keys: set fleet_key to one of them"
        )
    log.info("kernels and measurements are shared through %s, %s", settings.fleet, signed)
    return fleet
