"""Names and keys of configurations: one function over all fields, so that no two can share either.

Every field of a configuration says how it enters the name: ``part`` fields always appear, in field order; ``suffix``
fields appear as ``_tag value`` when they differ from their default. A field that says neither is rejected when the
class is made, so a new field cannot be forgotten; so is a pair of suffixes that could be read as one another.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

__all__ = ["KernelKey", "alias_of", "compose_name", "digest_of", "has_naming", "part", "require_naming", "suffix"]

_NAMING = "tilewright.naming"
_WORD = re.compile(r"[A-Za-z0-9.+-]+")
_TAG = re.compile(r"[A-Za-z0-9]*")


def _text(value: Any) -> str:
    """Text of a value: underscores become hyphens; integers of a tuple are joined by ``x``, other members by dots."""
    if isinstance(value, tuple):
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return "x".join(str(item) for item in value)
        items = [_text(item) for item in value]
        # A value that could be read in two ways is given as its repr, which no name can hold: ``_word`` digests it.
        return repr(value) if any("." in item or not item for item in items) else ".".join(items)
    plain = value.value if isinstance(value, Enum) else value
    if isinstance(plain, str):
        return repr(plain) if "-" in plain else plain.replace("_", "-")
    return str(plain)


def part(default: Any, *, text: Callable[[Any], str] = _text) -> Any:
    """A field that always appears in the name.

    Its text holds letters, digits, ``.``, ``+`` and ``-``. Any other text (a caller may put anything in a field; rules
    come later) appears as ``=`` and a digest of it, so that every configuration has a name that a file can bear.
    """
    return field(default=default, metadata={_NAMING: ("part", "", text)})


def suffix(tag: str, default: Any, *, text: Callable[[Any], str] = _text) -> Any:
    """A field that appears as ``_{tag}{value}`` when it is not at its default; a true flag appears as ``_{tag}``.

    No two suffixes of a class may give the same word: an empty tag, or one that begins another, is for flags and
    enumerations, whose words are known.
    """
    return field(default=default, metadata={_NAMING: ("suffix", tag, text)})


def has_naming(item: Field[Any]) -> bool:
    """True if the field was made by ``part`` or ``suffix``."""
    return _NAMING in item.metadata


_checked: set[type[Any]] = set()


def require_naming(config_type: type[Any]) -> None:
    """Raise ``TypeError`` unless every field has its place in the name and no two suffixes can give the same word."""
    if config_type in _checked:
        return
    words = []
    for item in fields(config_type):
        where = f"{config_type.__name__}.{item.name}"
        if not has_naming(item):
            raise TypeError(f"{where} has no place in the name: declare it with part() or suffix()")
        if item.default is MISSING:
            raise TypeError(f"{where} has no default")
        kind, tag, text = item.metadata[_NAMING]
        if not _TAG.fullmatch(tag):
            raise TypeError(f"{where}: the tag {tag!r} may hold letters and digits only")
        _require_distinct_texts(where, item, text)
        if kind == "suffix":
            words.append(_Words.of(item, tag, text))
    for one, other in combinations(words, 2):
        if one.meets(other):
            raise TypeError(
                f"{config_type.__name__}: the suffixes of {one.field} (tag {one.tag!r}) and {other.field} "
                f"(tag {other.tag!r}) can give the same word; give one of them another tag"
            )
    _checked.add(config_type)


def _require_distinct_texts(where: str, item: Field[Any], text: Callable[[Any], str]) -> None:
    domain = _domain(item)
    texts = {text(value) for value in domain}
    if len(texts) < len(domain):
        raise TypeError(f"{where}: two of its values have the same text")


def _domain(item: Field[Any]) -> tuple[Any, ...]:
    """All values of a field whose type has few; empty if there is no end of them."""
    if isinstance(item.default, bool):
        return (False, True)
    return tuple(type(item.default)) if isinstance(item.default, Enum) else ()


class _Words(NamedTuple):
    """The texts that a suffix can have: a known set of words, or a tag and then any text over an alphabet."""

    field: str
    tag: str
    known: frozenset[str]
    alphabet: str
    """Regular expression of one character after the tag; empty for known words."""

    @classmethod
    def of(cls, item: Field[Any], tag: str, text: Callable[[Any], str]) -> _Words:
        domain = [value for value in _domain(item) if value != item.default]
        if domain:
            return cls(
                item.name, tag, frozenset(tag if value is True else tag + _word(text(value)) for value in domain), ""
            )
        if text is _text and isinstance(item.default, int):
            return cls(item.name, tag, frozenset(), "[0-9-]")
        if text is _text and isinstance(item.default, tuple) and all(type(entry) is int for entry in item.default):
            return cls(item.name, tag, frozenset(), "[0-9x-]")
        return cls(item.name, tag, frozenset(), "[A-Za-z0-9.+=-]")

    def can_give(self, word: str) -> bool:
        if self.known:
            return word in self.known
        return word.startswith(self.tag) and re.fullmatch(self.alphabet + "+", word[len(self.tag) :]) is not None

    def meets(self, other: _Words) -> bool:
        """True if some word could come from either."""
        if self.known or other.known:
            one, many = (self, other) if self.known else (other, self)
            return any(many.can_give(word) for word in one.known)
        short, long = sorted((self, other), key=lambda words: len(words.tag))
        rest = long.tag[len(short.tag) :]
        return long.tag.startswith(short.tag) and (not rest or re.fullmatch(short.alphabet + "+", rest) is not None)


def compose_name(prefix: str, config: Any) -> str:
    """The readable name: ``prefix``, all parts, then the suffixes that differ from their defaults, with underscores."""
    parts, suffixes = [prefix], []
    for name, default, (kind, tag, text) in _named_fields(config.__class__):
        value = getattr(config, name)
        if kind == "part":
            parts.append(_word(text(value)))
        elif value != default:
            suffixes.append(tag if value is True else tag + _word(text(value)))
    return "_".join(parts + suffixes)


@cache
def _named_fields(config_type: type[Any]) -> tuple[tuple[str, Any, Any], ...]:
    """Name, default and naming of each field."""
    return tuple((item.name, item.default, item.metadata[_NAMING]) for item in fields(config_type))


def _word(text: str) -> str:
    return text if _WORD.fullmatch(text) else "=" + hashlib.sha256(text.encode()).hexdigest()[:12]


def digest_of(record: Any) -> str:
    """SHA-256 (hex) of a JSON value in canonical form. Raises ``TypeError`` for what JSON has no form for."""
    # No default=str here: the text of an arbitrary object may hold its address, and two objects may share a text.
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def alias_of(name: str) -> str:
    """A short stand-in for a kernel's name: ``@`` and eight hexadecimal digits. It is taken wherever a name is."""
    return "@" + hashlib.sha256(name.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, order=True)
class KernelKey:
    """The identity of a kernel: operation, readable name, arch, and a digest over all fields and the arch."""

    operation: str
    name: str
    arch: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name}@{self.arch}#{self.digest[:12]}"
