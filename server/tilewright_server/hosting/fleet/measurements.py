"""Measurements through the fleet's storage: rows of the database go there, and those of other servers into it."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright_kit.selection.measurements import Measurement, read_lines
from tilewright_kit.types.errors import InvalidArgumentError, TilewrightError, UnavailableError
from tilewright_server.engine.measurements.database import PerfDatabase
from tilewright_server.hosting.fleet.seal import Seal
from tilewright_server.hosting.fleet.store import Store

__all__ = ["MeasurementCounters", "SharedMeasurements"]

log = logging.getLogger(__name__)

FOLDER = "measurements"
MOST_BYTES = 16 << 20
MOST_OBJECTS = 10_000
"""The latest so many are read."""
ROWS = 5000
"""Rows of one object."""


@dataclass(slots=True)
class MeasurementCounters:
    read: int = 0
    written: int = 0
    refused: int = 0
    """Objects, the others are rows."""


class SharedMeasurements:
    """A thread that looks every few seconds. The database is the queue: rows that could not be written are written with
    the next look. ``changed`` is called after rows were added."""

    def __init__(
        self,
        database: PerfDatabase,
        store: Store,
        seal: Seal,
        changed: Callable[[], object],
        *,
        write: bool = True,
        interval_s: float = 60.0,
    ) -> None:
        self.counters = MeasurementCounters()
        self._database, self._store, self._seal = database, store, seal
        self._changed, self._write, self._interval_s = changed, write, interval_s
        self._seen: set[str] = set()
        """Objects that were read or written, or refused."""
        self._known: set[str] = set()
        """Digests of rows that are in the storage."""
        self._generation: object = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-measurements", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Return when the thread has ended, after one more access at most."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> None:
        """Read what is new, write what is new. Raises ``UnavailableError`` of the storage, or what the database
        raises."""
        added = 0
        names = [name for name in self._store.names(FOLDER)[-MOST_OBJECTS:] if name not in self._seen]
        for name in names:
            if self._end.is_set():
                return
            added += self._take(name)
            self._seen.add(name)
        if added:
            self.counters.read += added
            log.info("%d measurements came from the fleet", added)
            self._changed()
        generation = self._database.generation()
        if self._write and generation != self._generation:
            own = [row for row in self._database.select() if digest_of(row) not in self._known]
            for begin in range(0, len(own), ROWS):
                self._put(own[begin : begin + ROWS])
            self._generation = generation

    def _take(self, name: str) -> int:
        """Record the rows of an object that are new here; how many. One that is not right is refused as a whole."""
        data = self._store.read(name, MOST_BYTES)
        if data is None:
            return 0
        try:
            rows = read_lines(self._seal.open(data).decode().splitlines(), name)
            fresh = {digest: row for row in rows if (digest := digest_of(row)) not in self._known}
            self._database.record(fresh.values())
        except UnavailableError:  # the database is busy
            raise
        except (TilewrightError, ValueError, OverflowError, RecursionError) as error:
            self.counters.refused += 1
            log.warning("measurements (%s) are not taken from the fleet: %s", name, error)
            return 0
        self._known.update(fresh)
        return len(fresh)

    def _put(self, rows: Sequence[Measurement]) -> None:
        content = "".join(_line(row) + "\n" for row in rows).encode()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        name = f"{FOLDER}/{stamp}-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
        self._store.write(name, self._seal.close(content))
        self._seen.add(name)
        self._known.update(map(digest_of, rows))
        self.counters.written += len(rows)

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except UnavailableError as error:
                log.debug("measurements are not shared now: %s", error)
            except InvalidArgumentError as error:
                log.warning("measurements are not shared: %s", error)
            except Exception:
                log.exception("sharing measurements failed")
            if self._end.wait(self._interval_s):
                return


def digest_of(row: Measurement) -> str:
    """The same for equal rows."""
    return hashlib.sha256(_line(row).encode()).hexdigest()[:32]


def _line(row: Measurement) -> str:
    return json.dumps(row.to_dict(), sort_keys=True, separators=(",", ":"))
