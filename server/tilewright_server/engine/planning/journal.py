"""Journals: files of the problems that a server was asked for, with counts.

A file of JSON lines that only grows, up to a size. The first line of a problem has its request, later ones only counts:
they are written when the count reaches a power of two and when the server ends, so that a busy problem costs no more
than a few lines, and a server that is killed has at least half of each count on file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.requests.record import request_from_dict, request_to_dict
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError, TilewrightError
from tilewright_server.engine.planning.request_key import request_key
from tilewright_server.engine.types import Selection

__all__ = ["Journal", "JournalProblem", "Skipped", "read_journal"]

log = logging.getLogger(__name__)

_VERSION = 1
_MAX_LINE = 1 << 20
"""Bytes of a line; longer ones are neither written nor read."""
_MAX_COUNT = 1 << 62


@dataclass(slots=True)
class JournalProblem:
    """A problem of a journal, and how often it was asked for."""

    request: OperationRequest
    selection: Selection
    """Strategy, kernel and configuration that were asked for, and the device that it was planned for."""
    arch: str
    count: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line of a journal that cannot be used."""

    line: int
    reason: str


@dataclass(slots=True)
class _Seen:
    id: str
    count: int = 0
    written: int = 0


@dataclass(slots=True)
class _Content:
    problems: dict[str, JournalProblem] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)


class Journal:
    """The journal that a server writes. Thread-safe. A file that cannot be written any more is left alone, and the log
    says so once.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Continue a file, or make it with mode 0600. Raises ``InvalidArgumentError`` if that cannot be done."""
        self._max_bytes = max_bytes
        self._seen: dict[tuple[object, ...], _Seen] = {}
        self._lock = threading.Lock()
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)
            self._bytes = os.fstat(self._fd).st_size
            torn = self._bytes and os.pread(self._fd, 1, self._bytes - 1) != b"\n"
        except OSError as error:
            raise _unusable(path, error) from error
        self._known = set(_content(path).problems)
        """Problems whose requests are on file."""
        if torn:  # whoever wrote it was killed: its last line is lost, and the next must not be
            self._append(b"\n")

    def note(self, request: OperationRequest, selection: Selection, device: DeviceInfo, count: int = 1) -> None:
        """Count a problem that was planned for a device, or launched ``count`` times by those who had planned it."""
        if self._fd < 0:
            return
        key = (*request_key(request, selection), device.id)
        with self._lock:
            seen = self._seen.get(key)
            if seen is None:
                seen = self._add(key, request, selection, device)
            before, seen.count = seen.count, seen.count + count
            if seen.id and seen.count.bit_length() > before.bit_length():
                self._write_count(seen)

    def close(self) -> None:
        """Write what is counted and close the file. Idempotent."""
        with self._lock:
            for seen in self._seen.values():
                if seen.id and seen.count > seen.written:
                    self._write_count(seen)
            self._stop()

    def _add(
        self, key: tuple[object, ...], request: OperationRequest, selection: Selection, device: DeviceInfo
    ) -> _Seen:
        record = {
            "request": request_to_dict(request),
            "strategy": selection.strategy,
            "kernel": selection.kernel,
            "config": selection.config,
            "device": device.id,
            "arch": device.arch.id,
        }
        number = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
        if number not in self._known:
            line = _line({"journal": _VERSION, "id": number, **record})
            if len(line) > _MAX_LINE or not self._append(line):
                return _Seen("")  # it is not recorded, nor are its counts
            self._known.add(number)
        seen = self._seen[key] = _Seen(number)
        return seen

    def _write_count(self, seen: _Seen) -> None:
        if self._append(_line({"journal": _VERSION, "id": seen.id, "count": seen.count - seen.written})):
            seen.written = seen.count

    def _append(self, line: bytes) -> bool:
        if self._fd < 0:
            return False
        if self._bytes + len(line) > self._max_bytes:
            log.warning("the journal has reached its %d bytes: nothing more is recorded", self._max_bytes)
            self._stop()
            return False
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            log.warning("the journal cannot be written any more: %s", error)
            self._stop()
            return False
        self._bytes += written
        return written == len(line)

    def _stop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def read_journal(path: Path) -> tuple[list[JournalProblem], list[Skipped]]:
    """Problems of a journal, those asked for most first, and the lines that cannot be used, with reasons.

    Raises ``NotFoundError`` for a file that cannot be read, ``InvalidArgumentError`` for one that is no journal at all.
    """
    content = _content(path)
    if content.skipped and not content.problems:
        raise InvalidArgumentError(
            f"not a journal: line {content.skipped[0].line}: {content.skipped[0].reason}",
            field="journal",
            value=str(path),
            rule="journal_format",
            fix="name a file that `tilewright serve --journal` wrote",
        )
    return sorted(content.problems.values(), key=lambda item: -item.count), content.skipped


def _content(path: Path) -> _Content:
    content = _Content()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), 1):
                if reason := _refused(content, line):
                    content.skipped.append(Skipped(number, reason))
    except OSError as error:
        raise NotFoundError(
            f"the journal cannot be read: {error.strerror or error}",
            field="journal",
            value=str(path),
            rule="journal_file",
            fix="give the path of a journal that this user may read",
        ) from error
    return content


def _lines(file: Any) -> Iterator[bytes]:
    """Lines, of which those that are too long are cut, so that they are damaged."""
    while line := file.readline(_MAX_LINE):
        yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(_MAX_LINE)


def _refused(content: _Content, line: bytes) -> str:
    """The reason why a line cannot be used; empty if it was taken."""
    try:
        _take(content, line)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return f"it is damaged ({error or type(error).__name__})"
    except TilewrightError as error:
        return error.reason
    return ""


def _take(content: _Content, line: bytes) -> None:
    if not line.strip():
        return
    record = json.loads(line)
    if not isinstance(record, dict):
        raise TypeError("it is no object")
    if record.get("journal") != _VERSION:
        raise ValueError(f"it is of version {record.get('journal')!r}, not {_VERSION}")
    number = record["id"]
    if not isinstance(number, str):
        raise TypeError("its id is no text")
    if "request" in record:
        words = {name: record[name] for name in ("strategy", "kernel", "config", "device", "arch")}
        if not all(isinstance(word, str) for word in words.values()):
            raise TypeError("strategy, kernel, config, device and arch are texts")
        selection = Selection(words["strategy"], words["kernel"], device=words["device"], config=words["config"])
        content.problems.setdefault(
            number, JournalProblem(request_from_dict(record["request"]), selection, words["arch"], 0)
        )
        return
    count = record["count"]
    if type(count) is not int or not 0 < count < _MAX_COUNT:
        raise ValueError("its count is no positive number")
    if number not in content.problems:
        raise ValueError("it counts a problem that no line before it states")
    content.problems[number].count += count


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _unusable(path: Path, error: OSError) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the journal cannot be written: {error.strerror or error}",
        field="journal",
        value=str(path),
        rule="journal_file",
        fix="name a file in a folder that exists and that the server's user may write to",
    )
