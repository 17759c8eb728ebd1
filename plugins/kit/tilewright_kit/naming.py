"""From a configuration to its name and key: one function over all fields, so that no two configurations can share either.

Every field of a configuration says how it enters the name: ``part`` fields always appear, in field order; ``suffix`` fields appear as ``_tag value``
when they differ from their default. A field that says neither is refused when the class is made, so a new field cannot be forgotten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any

__all__ = ["KernelKey", "compose_name", "digest_of", "part", "require_naming", "suffix"]

_NAMING = "tilewright.naming"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(_text(item) for item in value)
    return str(value)


def part(default: Any, *, text: Callable[[Any], str] = _text) -> Any:
    """A field that always appears in the name. Its text must not hold an underscore."""
    return field(default=default, metadata={_NAMING: ("part", "", text)})


def suffix(tag: str, default: Any, *, text: Callable[[Any], str] = _text) -> Any:
    """A field that appears as ``_{tag}{value}`` when it is not at its default; a true flag appears as ``_{tag}``. Tags are unique in a class."""
    return field(default=default, metadata={_NAMING: ("suffix", tag, text)})


def require_naming(config_type: type[Any]) -> None:
    """Raise ``TypeError`` if a field of the dataclass does not say how it enters the name, or if two suffixes share a tag."""
    tags: set[str] = set()
    for item in fields(config_type):
        rule = item.metadata.get(_NAMING)
        if rule is None:
            raise TypeError(
                f"{config_type.__name__}.{item.name} has no place in the name: declare it with part() or suffix()"
            )
        kind, tag, _ = rule
        if kind == "suffix":
            if tag in tags:
                raise TypeError(f"{config_type.__name__}: two fields use the suffix {tag!r}")
            tags.add(tag)


def compose_name(prefix: str, config: Any) -> str:
    """The readable name of a configuration: ``prefix``, all parts, then the suffixes that differ from their defaults, joined by underscores."""
    parts, suffixes = [prefix], []
    for item in fields(config):
        kind, tag, text = item.metadata[_NAMING]
        value = getattr(config, item.name)
        if kind == "part":
            parts.append(_clean(item, text(value)))
        elif value != item.default:
            suffixes.append(tag if value is True else tag + _clean(item, text(value)))
    return "_".join(parts + suffixes)


def _clean(item: Field[Any], text: str) -> str:
    if "_" in text or not text:
        raise ValueError(f"{item.name}: {text!r} cannot stand in a kernel name (empty, or has an underscore)")
    return text


def digest_of(record: Any) -> str:
    """SHA-256 (hex) of a JSON-able value in canonical form."""
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


@dataclass(frozen=True, slots=True, order=True)
class KernelKey:
    """The identity of a kernel: operation, readable name, arch, and a digest over all fields of its configuration and the arch."""

    operation: str
    name: str
    arch: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name}@{self.arch}#{self.digest[:12]}"
