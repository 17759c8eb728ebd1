"""Typed access to one JSON object: every error names the document and the field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .errors import SpecError

_ABSENT = object()


class Fields:
    """A JSON object being read. Call ``finish`` at the end: it refuses unread (unknown) keys."""

    def __init__(self, value: object, source: str, path: str = "") -> None:
        if not isinstance(value, Mapping):
            raise SpecError(source, path, f"must be an object, not {_kind(value)}")
        self._value: Mapping[str, object] = value
        self.source = source
        self._path = path
        self._read: set[str] = set()

    def where(self, key: str) -> str:
        """Dotted path of ``key`` from the document's root."""
        return f"{self._path}.{key}" if self._path else key

    def fail(self, key: str, problem: str) -> SpecError:
        """The error to raise for ``key``."""
        return SpecError(self.source, self.where(key) if key else self._path, problem)

    def get(self, key: str, default: object = _ABSENT) -> object:
        """The raw value; without a default the key is required."""
        self._read.add(key)
        if key in self._value:
            return self._value[key]
        if default is _ABSENT:
            raise self.fail(key, "is missing")
        return default

    def text(self, key: str, default: object = _ABSENT, choices: Sequence[str] = ()) -> str:
        """A string, one of ``choices`` when there are any."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"must be a string, not {_kind(value)}")
        if choices and value not in choices:
            raise self.fail(key, f"must be one of {', '.join(choices)}, not {value!r}")
        return value

    def integer(self, key: str, default: object = _ABSENT, minimum: int = 0) -> int:
        """An integer of at least ``minimum``."""
        return self._integer(key, self.get(key, default), minimum)

    def number(self, key: str, default: object = _ABSENT, above: float = 0.0) -> float:
        """A number greater than ``above`` and at most 1."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"must be a number, not {_kind(value)}")
        if not above < value <= 1:
            raise self.fail(key, f"must be above {above:g} and at most 1, not {value}")
        return float(value)

    def boolean(self, key: str, default: object = _ABSENT) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, not {_kind(value)}")
        return value

    def array(self, key: str, default: object = _ABSENT) -> Sequence[object]:
        """An array of anything."""
        value = self.get(key, default)
        if not isinstance(value, (list, tuple)):
            raise self.fail(key, f"must be an array, not {_kind(value)}")
        return value

    def texts(self, key: str, default: object = _ABSENT, minimum: int = 0) -> tuple[str, ...]:
        """An array of at least ``minimum`` distinct strings."""
        values = self.array(key, default)
        texts: dict[str, None] = {}
        for index, value in enumerate(values):
            if not isinstance(value, str) or not value:
                raise self.fail(f"{key}[{index}]", f"must be a string, not {_kind(value)}")
            if value in texts:
                raise self.fail(f"{key}[{index}]", f"repeats {value!r}")
            texts[value] = None
        if len(texts) < minimum:
            raise self.fail(key, f"needs at least {minimum} entry")
        return tuple(texts)

    def tuples(self, key: str, size: int, default: object = _ABSENT) -> list[tuple[int, ...]]:
        """An array of distinct arrays of ``size`` positive integers each."""
        found: list[tuple[int, ...]] = []
        for index, value in enumerate(self.array(key, default)):
            at = f"{key}[{index}]"
            if not isinstance(value, (list, tuple)) or len(value) != size:
                raise self.fail(at, f"must be an array of {size} positive integers")
            item = tuple(self._integer(at, number, 1) for number in value)
            if item in found:
                raise self.fail(at, f"repeats {list(item)}")
            found.append(item)
        return found

    def fields(self, key: str, default: object = _ABSENT) -> Fields:
        """A nested object."""
        return Fields(self.get(key, default), self.source, self.where(key))

    def entries(self) -> Iterator[tuple[str, Fields]]:
        """Every key with its nested object; counts all of them as read."""
        for key in self._value:
            yield key, self.fields(key)

    @property
    def raw(self) -> Mapping[str, object]:
        """The object itself, for whoever reads it elsewhere."""
        return self._value

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def __contains__(self, key: str) -> bool:
        return key in self._value

    def finish(self) -> None:
        """Refuse keys that nobody read. Keys that begin with ``x-`` are free for annotation."""
        for key in self._value:
            if key not in self._read and not key.startswith("x-"):
                raise self.fail(key, "is not a known field")

    def positive(self, key: str, value: object) -> int:
        """Check that ``value``, found at ``key``, is an integer of at least 1."""
        return self._integer(key, value, 1)

    def _integer(self, key: str, value: object, minimum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"must be an integer, not {_kind(value)}")
        if value < minimum:
            raise self.fail(key, f"must be at least {minimum}, not {value}")
        return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return names[dict]
    return names.get(type(value), "a number")
