"""Measurements of kernels on problems, as records that files, databases and strategies share.

A problem is described by a signature (text: what kind of problem) and sizes (named whole numbers), both read from
``Problem.describe``, so that every operation takes part without knowing of it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from tilewright_kit.contract.problem import Problem
from tilewright_kit.types.errors import InvalidArgumentError

__all__ = [
    "Measurement",
    "MeasurementSource",
    "Point",
    "ShippedMeasurements",
    "class_of",
    "point_of",
    "read_lines",
]

log = logging.getLogger(__name__)

_DERIVED = frozenset({"operation", "flops", "bytes", "bytes_moved"})
"""Entries of a description that follow from the others."""
_CLASS = ("dtype", "layout", "packing", "grouped", "direction", "ndim", "filter", "stride")
"""Beginnings of the names of entries that no measurement can be carried across."""


@dataclass(frozen=True, slots=True)
class Point:
    """The place of a problem among all that can be asked. ``sizes`` are sorted by name."""

    signature: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """The sizes for people: ``k=64 m=128 n=32``."""
        return " ".join(f"{name}={value}" for name, value in self.sizes)


def point_of(problem: Problem) -> Point:
    """Signature and sizes of a problem.

    Whole numbers of the description are sizes; of a list of records with numbers the largest record counts. Fractions
    (factors, bounds) do not change what is fast. Everything else that is not empty makes the signature.
    """
    sizes: dict[str, int] = {}
    words: dict[str, str] = {}
    for name, value in problem.describe().items():
        if name in _DERIVED or isinstance(value, float):
            continue
        records = _records(value)
        if type(value) is int:
            sizes[name] = value
        elif records:
            largest: Mapping[str, int] = max(records, key=_volume)
            sizes.update(largest)
        elif value not in (None, "", False, (), [], {}):
            words[name] = (
                value
                if isinstance(value, str)
                else json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
            )
    signature = " ".join(f"{name}={words[name]}" for name in sorted(words))
    return Point(signature, tuple(sorted(sizes.items())))


def _text(value: Any) -> str:
    """Without spaces, which part the words of a signature."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _volume(record: Mapping[str, int]) -> int:
    return math.prod(record.values())


def _records(value: Any) -> list[Mapping[str, int]]:
    """The members of a list of records of whole numbers; empty if it is anything else."""
    if not isinstance(value, (list, tuple)) or not value:
        return []
    fits = all(isinstance(item, Mapping) and all(type(size) is int for size in item.values()) for item in value)
    return list(value) if fits else []


def class_of(signature: str) -> str:
    """The part of a signature that decides whether measurements can be carried over: element types and layouts."""
    return " ".join(word for word in signature.split(" ") if word.startswith(_CLASS))


@dataclass(frozen=True, slots=True)
class Measurement:
    """The time of a kernel for a problem, with its circumstances. Times are nanoseconds on the device."""

    operation: str
    signature: str
    sizes: Mapping[str, int]
    arch: str
    """Id of the arch that the kernel was built for."""
    device: str
    """Name of the device, for example ``NVIDIA H200``."""
    config: Mapping[str, Any]
    """The kernel's configuration; fields that are missing have their defaults."""
    median_ns: float
    p10_ns: float = 0.0
    p90_ns: float = 0.0
    samples: int = 1
    kernel: str = ""
    key: str = ""
    """Text of the kernel's key."""
    flops: int = 0
    bytes_moved: int = 0
    error: float | None = None
    """Relative error of the result; None if it was not checked."""
    driver: str = ""
    toolchain: str = ""
    plugin_version: str = ""
    date: str = ""
    """Time in UTC: ``2026-11-20T17:30:00Z``."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """Method of timing: initial values, rotation, flushing, timer."""

    @property
    def point(self) -> Point:
        return Point(self.signature, tuple(sorted(self.sizes.items())))

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, without those at their default."""
        record = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: _plain(value) for name, value in record.items() if value not in ("", None, 0) and value != {}}

    @classmethod
    def from_dict(cls, record: Any, where: str = "measurement") -> Measurement:
        """The inverse of ``to_dict``; unknown entries are ignored, as later versions may have more.

        Raises ``InvalidArgumentError`` that names ``where`` and the entry.
        """
        if not isinstance(record, Mapping):
            raise _damaged(where, record, "an object")
        values: dict[str, Any] = {}
        for item in fields(cls):
            if item.name in record:
                values[item.name] = _checked(record[item.name], item.name, where)
        for name in ("operation", "signature", "sizes", "arch", "device", "config", "median_ns"):
            if name not in values:
                raise _damaged(f"{where}.{name}", "", "a value")
        found = cls(**values)
        if not (math.isfinite(found.median_ns) and found.median_ns > 0):
            raise _damaged(f"{where}.median_ns", found.median_ns, "a time above zero")
        return found


_NUMBERS = frozenset({"median_ns", "p10_ns", "p90_ns"})
_COUNTS = frozenset({"samples", "flops", "bytes_moved"})
_OBJECTS = frozenset({"sizes", "config", "conditions"})


def _checked(value: Any, name: str, where: str) -> Any:
    entry = f"{where}.{name}"
    if name in _NUMBERS or name == "error":
        if value is None and name == "error":
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _damaged(entry, value, "a number")
        return float(value)
    if name in _COUNTS:
        if type(value) is not int or value < 0:
            raise _damaged(entry, value, "a whole number, zero or more")
        return value
    if name in _OBJECTS:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _damaged(entry, value, "an object")
        if name == "sizes" and not all(type(size) is int for size in value.values()):
            raise _damaged(entry, value, "whole numbers by name")
        return dict(value)
    if not isinstance(value, str):
        raise _damaged(entry, value, "text")
    return value


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _damaged(where: str, value: object, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{where}: expected {expected}",
        field=where,
        value=value,
        rule="measurement_record",
        fix="correct the entry, or leave the record out",
    )


def read_lines(lines: Iterable[str], source: str) -> Iterator[Measurement]:
    """Measurements from JSON lines; blank lines are skipped. Raises ``InvalidArgumentError`` with the line's number."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{source}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise _damaged(where, line, f"one JSON object ({error})") from None
        yield Measurement.from_dict(record, where)


class MeasurementSource(Protocol):
    """A source of measurements. Thread-safe."""

    def generation(self) -> object:
        """Changes whenever the measurements do; cheap to ask."""
        ...

    def rows(self, operation: str, arch: str) -> Sequence[Measurement]:
        """All measurements of an operation on an arch. May read files; never raises for damage in them."""
        ...


class ShippedMeasurements:
    """Measurements in JSON lines files that came with plugins. Read when they are first asked for, and then kept."""

    def __init__(self, files: Sequence[Any]) -> None:
        """``files`` are paths, or anything with ``name`` and ``read_text``."""
        self._files = tuple(files)
        self._rows: dict[tuple[str, str], list[Measurement]] | None = None
        self.damage: list[str] = []
        """Text on the records that could not be read."""

    def generation(self) -> object:
        return 0

    def rows(self, operation: str, arch: str) -> Sequence[Measurement]:
        if self._rows is None:
            self._rows = self._read()
        return self._rows.get((operation, arch), ())

    def _read(self) -> dict[tuple[str, str], list[Measurement]]:
        found: dict[tuple[str, str], list[Measurement]] = {}
        for file in self._files:
            for row in self._rows_of(file):
                found.setdefault((row.operation, row.arch), []).append(row)
        return found

    def _rows_of(self, file: Any) -> list[Measurement]:
        try:
            return list(read_lines(file.read_text("utf-8").splitlines(), file.name))
        except (OSError, UnicodeDecodeError, InvalidArgumentError) as error:
            # A damaged file must not keep a server from choosing kernels by other means.
            self.damage.append(f"{file.name}: {error}")
            log.warning("measurements that a plugin brings cannot be read, and are not used: %s", self.damage[-1])
            return []
