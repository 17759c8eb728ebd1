"""Results of a sweep: one result for each kernel on each problem, in memory and in files."""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tilewright_kit.commands.cases import Case
from tilewright_kit.selection.measurements import Measurement
from tilewright_kit.types.errors import InvalidArgumentError, UnavailableError
from tilewright_server.engine.measurements.exchange import parquet, read_parquet, write_parquet
from tilewright_tools.tuning.problems.families import stored_case

__all__ = ["FAILED", "TIME_OVER", "Output", "Result", "Stamp", "read_results"]

FAILED = ("wrong", "crashed", "hung", "build_failed", "refused")
"""Ways in which a kernel can fail. The others are ``ok`` and ``skipped`` (not measured, for no fault of its own)."""
TIME_OVER = "s were over"
"""End of the reason of a kernel that was skipped since there was no time for it."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Conditions of all results of a sweep, without which a figure means nothing."""

    operation: str
    arch: str
    device: str
    driver: str = ""
    plugin_version: str = ""
    conditions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """One kernel on one problem. Times are nanoseconds; zero if there is none."""

    case: Case
    kernel: str
    config: Mapping[str, Any]
    status: str
    """``ok``, ``skipped`` or one of ``FAILED``."""
    reason: str = ""
    place: int = 0
    """By the operation's model; 1 is its favourite, in an oracle the server's choice."""
    median_ns: float = 0.0
    p10_ns: float = 0.0
    p90_ns: float = 0.0
    samples: int = 0
    cut: bool = False
    """Given up early, since it was clearly slower than the best so far."""
    draws: str = ""
    """Oracles: medians of the interleaved draws in nanoseconds, as a JSON list."""
    again_ns: float = 0.0
    """Oracles: a second timing, which decided nothing; 0 if there was none."""
    peer_ns: float = 0.0
    """Oracles: time of another library for the problem; 0 if none was asked, or it has none."""
    clock_mhz: int = 0
    """The units' clock after the kernel's last sample; 0 if it is not known."""
    error: float | None = None
    build_ms: float = 0.0
    flops: int = 0
    bytes_moved: int = 0
    ideal_ns: float = 0.0
    """Least time by the arch's peak rates; 0 if they are not known."""
    key: str = ""
    signature: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    toolchain: str = ""
    date: str = ""
    stamp: Stamp = Stamp("", "", "")

    @property
    def tflops(self) -> float:
        return self.flops / self.median_ns / 1e3 if self.median_ns else 0.0

    @property
    def gbps(self) -> float:
        """Thousand million bytes a second, every operand counted once."""
        return self.bytes_moved / self.median_ns if self.median_ns else 0.0

    @property
    def share_of_peak(self) -> float:
        return self.ideal_ns / self.median_ns if self.median_ns else 0.0

    def replace(self, **changes: Any) -> Result:
        return dataclasses.replace(self, **changes)

    def to_record(self) -> dict[str, Any]:
        """Flat, for tables: numbers and text only."""
        record: dict[str, Any] = self.case.to_dict()
        for item in dataclasses.fields(self):
            if item.name not in ("case", "stamp"):
                record[item.name] = getattr(self, item.name)
        record |= {"tflops": round(self.tflops, 4), "gbps": round(self.gbps, 3)}
        record |= {"share_of_peak": round(self.share_of_peak, 5)}
        record |= {name: getattr(self.stamp, name) for name in Stamp.__slots__}
        return {name: json.dumps(value) if isinstance(value, Mapping) else value for name, value in record.items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str) -> Result:
        """The inverse of ``to_record``, of values that may have become text. Raises ``InvalidArgumentError``."""
        try:
            case = stored_case(record, where, str(record["operation"]))
            stamp = Stamp(**{name: _typed(record[name], name) for name in Stamp.__slots__ if name in record})
            own = [item.name for item in dataclasses.fields(cls) if item.name not in ("case", "stamp")]
            values = {name: _typed(record[name], name) for name in own if record.get(name) not in (None, "")}
            _check_figures(values)
            return cls(case=case, stamp=stamp, **values)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"{where} is no result of a sweep: {error}",
                field="output",
                value=where,
                rule="results_file",
                fix="name another file, or leave out --resume",
            ) from None

    def measurement(self) -> Measurement | None:
        """For the database; None without a time."""
        if self.status != "ok" or not self.median_ns:
            return None
        stamp = self.stamp
        return Measurement(
            stamp.operation, self.signature, self.sizes, stamp.arch, stamp.device, self.config, self.median_ns,
            self.p10_ns, self.p90_ns, self.samples, self.kernel, self.key, self.flops, self.bytes_moved, self.error,
            stamp.driver, self.toolchain, stamp.plugin_version, self.date, stamp.conditions,
        )  # fmt: skip


_OBJECTS = frozenset({"config", "sizes", "conditions"})
_WHOLE = frozenset({"place", "samples", "clock_mhz", "flops", "bytes_moved"})
_REAL = frozenset({"median_ns", "again_ns", "peer_ns", "p10_ns", "p90_ns", "error", "build_ms", "ideal_ns"})


def _typed(value: Any, name: str) -> Any:
    if name in _OBJECTS:
        return json.loads(value) if isinstance(value, str) else dict(value)
    if name in _WHOLE:
        return int(value)
    if name in _REAL:
        return float(value)
    if name == "cut":
        return value in (True, "True", "true", "1")
    return str(value)


def _check_figures(values: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for figures that nothing can have measured."""
    for name in _REAL & set(values):
        value = values[name]
        if not math.isfinite(value) and name != "error":
            raise ValueError(f"{name} is {value}")
        if value < 0:
            raise ValueError(f"{name} is below zero: {value}")
    if values.get("status") == "ok" and values.get("median_ns", 0.0) <= 0:
        raise ValueError("a kernel that ran took no time")
    if values.get("samples", 0) < 0:
        raise ValueError("samples are below zero")


class Output:
    """A file of results: ``.parquet``, ``.csv`` or ``.jsonl``. A context manager.

    Results go to a journal beside it as they come, so that a sweep that is killed has lost nothing; the file itself is
    written when the sweep ends. Of two results for one kernel and problem the later counts.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        """With ``resume`` the results of an earlier sweep are kept. Raises ``InvalidArgumentError`` for another ending
        or a file that is no output, ``UnsupportedError`` for Parquet without ``pyarrow``."""
        if path.suffix not in (".parquet", ".csv", ".jsonl"):
            raise InvalidArgumentError(
                f"results are kept in .parquet, .csv or .jsonl files, not {path.name}",
                field="output",
                value=path.name,
                rule="results_file",
                fix="choose one of these endings",
            )
        if path.suffix == ".parquet":
            parquet()
        self.path = path
        self._journal_path = path.with_name(path.name + ".journal")
        self._results: dict[tuple[Case, str], Result] = {}
        if resume:
            for result in (*read_results(path), *read_results(self._journal_path)):
                self._keep(result)
        with self._reported():
            self._journal = self._journal_path.open("a", encoding="utf-8")
            self._take(resume)

    @property
    def results(self) -> list[Result]:
        return list(self._results.values())

    def _take(self, resume: bool) -> None:
        """Lock the journal, so that two sweeps do not write one output. Raises ``UnavailableError``."""
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._journal.close()
            raise UnavailableError(
                f"another sweep writes to {self.path.name}", field="output", value=self.path.name, rule="results_file",
                fix="give every sweep an output of its own",
            ) from None  # fmt: skip
        # A sweep that was killed may have left half a line, which the next one must not go on with.
        written = self._journal_path.read_bytes() if resume else b""
        self._journal.truncate(written.rfind(b"\n") + 1)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnavailableError(
                f"results cannot be written: {error.strerror}", field="output", value=str(self.path),
                rule="results_file", fix="free space, or name another output; --resume goes on with what was kept",
            ) from error  # fmt: skip

    def add(self, result: Result) -> None:
        """Keep a result. Raises ``UnavailableError`` where it cannot be written; those before it stay."""
        self._keep(result)
        line = json.dumps(result.to_record()) + "\n"
        with self._reported():
            end = self._journal.tell()
            try:
                self._journal.write(line)
                self._journal.flush()
            except OSError:
                self._forget(end)
                raise

    def _forget(self, end: int) -> None:
        """Open the journal again without what could not be written as a whole: a stream keeps that in its buffer."""
        with suppress(OSError):
            self._journal.close()
        self._journal = self._journal_path.open("a", encoding="utf-8")
        with suppress(OSError):
            self._journal.truncate(end)

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        partial = self.path.with_name(self.path.name + ".partial")
        try:
            with self._reported():
                self._write(partial, [result.to_record() for result in self._results.values()])
                partial.replace(self.path)
                self._journal_path.unlink(missing_ok=True)
        except UnavailableError:
            partial.unlink(missing_ok=True)  # the journal still has everything
            if error is None:
                raise
        finally:
            self._journal.close()

    def _keep(self, result: Result) -> None:
        self._results[result.case, result.kernel] = result

    def _write(self, path: Path, records: list[dict[str, Any]]) -> None:
        if self.path.suffix == ".parquet":
            write_parquet(path, records)
        elif self.path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
        else:
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(dict.fromkeys(name for record in records for name in record)))
                writer.writeheader()
                writer.writerows(records)


def read_results(path: Path) -> list[Result]:
    """The results of a file, or of a journal; none if it is not there. Raises ``InvalidArgumentError``."""
    if not path.is_file():
        return []
    return [Result.from_record(record, f"{path.name}:{number}") for number, record in enumerate(_stored(path), 1)]


def _stored(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        yield from read_parquet(path)
    elif path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
    else:
        # The last line of a journal may be cut off, where a sweep was killed.
        lines = path.read_text("utf-8", "replace").splitlines(keepends=True)
        yield from _lines((line for line in lines if line.endswith("\n")), path.name)


def _lines(lines: Iterable[str], name: str) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise InvalidArgumentError(
                    f"{name}:{number} is no result of a sweep",
                    field="output",
                    value=name,
                    rule="results_file",
                    fix="name a file that a sweep wrote, or remove the line",
                )
            yield record
