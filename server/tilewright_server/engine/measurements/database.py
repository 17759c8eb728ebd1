"""Measurements in SQLite, in WAL mode: any number of readers and writers, in any number of processes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright_kit.selection.measurements import Measurement
from tilewright_kit.types.errors import InvalidArgumentError, TilewrightError, UnavailableError

if TYPE_CHECKING:
    import sqlite3

__all__ = ["Filter", "PerfDatabase", "best_rows"]

log = logging.getLogger(__name__)

FORMAT = 1
_BUSY_S = 30.0
"""How long a writer waits for the others."""
_JSON = ("sizes", "config", "conditions")
_KEY = ("operation", "arch", "signature", "sizes", "device", "config", "date")
_COLUMNS = tuple(item.name for item in fields(Measurement))
_SCHEMA = """
CREATE TABLE IF NOT EXISTS measurements (
  operation TEXT NOT NULL, signature TEXT NOT NULL, sizes TEXT NOT NULL, arch TEXT NOT NULL, device TEXT NOT NULL,
  config TEXT NOT NULL, median_ns REAL NOT NULL, p10_ns REAL NOT NULL, p90_ns REAL NOT NULL, samples INTEGER NOT NULL,
  kernel TEXT NOT NULL, key TEXT NOT NULL, flops INTEGER NOT NULL, bytes_moved INTEGER NOT NULL, error REAL,
  driver TEXT NOT NULL, toolchain TEXT NOT NULL, plugin_version TEXT NOT NULL, date TEXT NOT NULL,
  conditions TEXT NOT NULL,
  PRIMARY KEY (operation, arch, signature, sizes, device, config, date)
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows. Empty fields do not narrow; ``kernel`` and ``device`` are shell patterns."""

    operation: str = ""
    arch: str = ""
    device: str = ""
    kernel: str = ""
    before: str = ""
    """Measured before this date (ISO 8601, UTC)."""

    def where(self) -> tuple[str, list[str]]:
        tests = {
            "operation = ?": self.operation,
            "arch = ?": self.arch,
            "device GLOB ?": self.device,
            "kernel GLOB ?": self.kernel,
            "date < ?": self.before,
        }
        used = {test: value for test, value in tests.items() if value}
        return (" WHERE " + " AND ".join(used) if used else ""), list(used.values())


class PerfDatabase:
    """A source of measurements for the strategies, and the place where new ones are kept. Thread-safe.

    Nothing is opened or made before the first write; a file that is not there has no rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._damaged: object = None

    # For the strategies

    def generation(self) -> object:
        """Changes with the files. Much cheaper than a query."""
        found: list[tuple[int, int, int]] = []
        for path in (self.path, self.path.with_name(self.path.name + "-wal")):
            try:
                status = path.stat()
            except OSError:
                continue
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)

    def rows(self, operation: str, arch: str) -> Sequence[Measurement]:
        """For ``MeasurementSource``: damage is logged, and then there are no rows."""
        try:
            return self.select(Filter(operation=operation, arch=arch))
        except TilewrightError as error:
            generation = self.generation()
            if self._damaged != generation:  # once for each state of the file
                self._damaged = generation
                log.warning("measurements cannot be read, and are not used: %s", error)
            return ()

    # For people and tools

    def select(self, wanted: Filter | None = None, limit: int = 0) -> list[Measurement]:
        """Rows, oldest first. Raises ``UnavailableError`` (busy), ``InvalidArgumentError`` (no such database)."""
        if not self.path.exists():
            return []
        where, values = (wanted or Filter()).where()
        query = f"SELECT {', '.join(_COLUMNS)} FROM measurements{where} ORDER BY date, sizes, kernel"
        with self._open() as connection:
            if _is_blank(connection):
                return []
            cursor = connection.execute(query + (f" LIMIT {int(limit)}" if limit else ""), values)
            return [_row(record) for record in cursor]

    def record(self, rows: Iterable[Measurement]) -> int:
        """Add rows, all or none; a row for the same kernel, problem, device and date takes the old one's place.

        Returns how many are new. Raises ``UnavailableError`` if other writers hold the file for too long.
        """
        values = [_values(row) for row in rows]
        if not values:
            return 0
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        places = ", ".join("?" * len(_COLUMNS))
        with self._open(write=True) as connection:
            before = _count(connection)
            connection.executemany(
                f"INSERT OR REPLACE INTO measurements ({', '.join(_COLUMNS)}) VALUES ({places})", values
            )
            return _count(connection) - before

    def prune(self, wanted: Filter | None = None, *, superseded: bool = False) -> int:
        """Remove rows that match (all, without a filter) and return how many went.

        With ``superseded``, of those only what a later measurement of the same kernel, problem and device replaced.
        """
        if not self.path.exists():
            return 0
        where, values = (wanted or Filter()).where()
        if superseded:
            same = " AND ".join(
                f"later.{name} = measurements.{name}"
                for name in ("operation", "arch", "signature", "sizes", "device", "config")
            )
            newer = f"EXISTS (SELECT 1 FROM measurements AS later WHERE {same} AND later.date > measurements.date)"
            where = f"{where} AND {newer}" if where else f" WHERE {newer}"
        with self._open(write=True) as connection:
            return connection.execute(f"DELETE FROM measurements{where}", values).rowcount

    def withdraw(self, rows: Iterable[Measurement]) -> int:
        """Remove these very rows and return how many went."""
        if not self.path.exists():
            return 0
        where = " AND ".join(f"{name} = ?" for name in _KEY)
        places = [_COLUMNS.index(name) for name in _KEY]
        values = [[found[place] for place in places] for found in map(_values, rows)]
        with self._open(write=True) as connection:
            before = _count(connection)
            connection.executemany(f"DELETE FROM measurements WHERE {where}", values)
            return before - _count(connection)

    def __len__(self) -> int:
        if not self.path.exists():
            return 0
        with self._open() as connection:
            return 0 if _is_blank(connection) else _count(connection)

    @contextmanager
    def _open(self, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection, in one transaction if it is to write. A connection for each use needs no care for threads."""
        import sqlite3

        try:
            with closing(sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)) as connection:
                if write:
                    self._prepare(connection)
                    connection.execute("BEGIN IMMEDIATE")
                    try:
                        yield connection
                    except BaseException:
                        connection.execute("ROLLBACK")
                        raise
                    connection.execute("COMMIT")
                else:
                    yield connection
        except sqlite3.OperationalError as error:
            if "no such table" in str(error) or "unable to open" in str(error):
                raise self._not_ours(error) from error
            raise UnavailableError(
                f"the database of measurements cannot be used now: {error}",
                field="database",
                value=self.path.name,
                rule="perf_database",
                fix="try again; look at the disk's free space if it stays",
                retry_after_s=1.0,
            ) from error
        except sqlite3.DatabaseError as error:
            raise self._not_ours(error) from error

    def _prepare(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == FORMAT:
            return
        if version > FORMAT:
            raise InvalidArgumentError(
                f"the database of measurements has format {version}, which is newer than this version's {FORMAT}",
                field="database",
                value=self.path.name,
                rule="perf_format",
                fix="use the version that wrote it, or another file",
            )
        # Two processes may do this at a time: every step may be done twice.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(_SCHEMA)
        connection.execute(f"PRAGMA user_version = {FORMAT}")

    def _not_ours(self, error: sqlite3.Error) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"this is no database of measurements: {error}",
            field="database",
            value=self.path.name,
            rule="perf_database",
            fix="name another file, or move this one away",
        )


def _is_blank(connection: sqlite3.Connection) -> bool:
    """True for a file that another process is making at this moment."""
    return not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()


def _count(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT COUNT(*) FROM measurements").fetchone()[0])


def _values(row: Measurement) -> list[Any]:
    record = {name: getattr(row, name) for name in _COLUMNS}
    record["date"] = row.date or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for name in _JSON:
        record[name] = json.dumps(record[name], sort_keys=True, separators=(",", ":"))
    return list(record.values())


def _row(values: Sequence[Any]) -> Measurement:
    record = dict(zip(_COLUMNS, values, strict=True))
    try:
        for name in _JSON:
            record[name] = json.loads(record[name])
    except ValueError as error:
        raise InvalidArgumentError(
            f"a row of the database of measurements is damaged: {error}",
            field=name,
            value=record[name],
            rule="perf_row",
            fix="remove the row, or the database's file, and measure again",
        ) from None
    return Measurement.from_dict(record, "row")


def best_rows(rows: Iterable[Measurement], top: int = 1) -> list[list[Measurement]]:
    """For each problem on each device its ``top`` fastest kernels, fastest first; of each kernel the newest row."""
    newest: dict[tuple[Any, ...], dict[str, Measurement]] = {}
    for row in rows:
        kernels = newest.setdefault((row.operation, row.arch, row.device, row.point), {})
        config = json.dumps(row.config, sort_keys=True)
        known = kernels.get(config)
        if known is None or known.date <= row.date:
            kernels[config] = row
    ordered = sorted(newest.items(), key=lambda item: (item[0][:3], item[0][3].signature, item[0][3].sizes))
    return [_fastest(kernels, top) for _, kernels in ordered]


def _fastest(kernels: Mapping[str, Measurement], top: int) -> list[Measurement]:
    return sorted(kernels.values(), key=lambda row: (row.median_ns, row.kernel))[:top]
