"""Bundles: files of launch plans with their code objects. docs/protocol.md has the format.

Little-endian, version 1: a header, entries sorted by name and architecture, code objects sorted by their SHA-256, and
texts, which together are the index; then plans and code objects.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError, UnsupportedError

__all__ = ["FORMAT_VERSION", "BundleEntry", "BundleIndex", "BundlePlan", "read_bundle_index", "write_bundle"]

FORMAT_VERSION = 1

_MAGIC = b"TWBNDL\0\0"
_LINE = 64
_MAX_INDEX = 1 << 30
_HEAD = Struct("<8sIIQ32s")
_REST = Struct("<IIQ")
_ENTRY = Struct("<IIIIQQ")
_OBJECT = Struct("<32sQQ")


@dataclass(frozen=True, slots=True)
class BundlePlan:
    """One launch plan of a bundle that is written. ``data`` are its bytes, ``details`` JSON for tools and servers."""

    name: str
    arch: str
    data: bytes
    objects: Mapping[bytes, bytes]
    """Code objects by their SHA-256."""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """One launch plan of a bundle as its index has it."""

    name: str
    arch: str
    nbytes: int
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BundleIndex:
    """Content of a bundle without plans and code objects."""

    entries: tuple[BundleEntry, ...]
    objects: Mapping[bytes, int]
    """Bytes of each code object by its SHA-256."""
    nbytes: int


def write_bundle(path: Path, plans: Iterable[BundlePlan]) -> BundleIndex:
    """Write a bundle, replacing the file as a whole. Of plans with one name and architecture the first is kept.

    Raises ``InvalidArgumentError`` for a file that cannot be written.
    """
    kept: dict[tuple[bytes, bytes], BundlePlan] = {}
    for plan in plans:
        kept.setdefault((plan.name.encode(), plan.arch.encode()), plan)
    ordered = [kept[key] for key in sorted(kept)]
    objects = {sha256: content for plan in ordered for sha256, content in plan.objects.items()}
    hashes = sorted(objects)
    texts = bytearray(1)
    numbers: dict[str, int] = {"": 0}

    def text(value: str) -> int:
        if value not in numbers:
            numbers[value] = len(texts)
            texts.extend(value.encode() + b"\0")
        return numbers[value]

    named = [
        (text(plan.name), text(plan.arch), text(json.dumps(plan.details, sort_keys=True, separators=(",", ":"))))
        for plan in ordered
    ]
    index_bytes = _HEAD.size + _REST.size + len(ordered) * _ENTRY.size + len(hashes) * _OBJECT.size + len(texts)
    end = index_bytes
    places: list[tuple[int, bytes]] = []
    for content in (*(plan.data for plan in ordered), *(objects[sha256] for sha256 in hashes)):
        end += -end % _LINE
        places.append((end, content))
        end += len(content)
    body = bytearray(_REST.pack(len(ordered), len(hashes), len(texts)))
    for (name, arch, details), (offset, content) in zip(named, places, strict=False):
        body += _ENTRY.pack(name, arch, details, 0, offset, len(content))
    for sha256, (offset, content) in zip(hashes, places[len(ordered) :], strict=True):
        body += _OBJECT.pack(sha256, offset, len(content))
    body += texts
    head = _HEAD.pack(_MAGIC, FORMAT_VERSION, _HEAD.size + _REST.size, end, hashlib.sha256(body).digest())
    _replace(path, head + bytes(body), places)
    entries = tuple(BundleEntry(plan.name, plan.arch, len(plan.data), plan.details) for plan in ordered)
    return BundleIndex(entries, {sha256: len(objects[sha256]) for sha256 in hashes}, end)


def _replace(path: Path, index: bytes, places: Iterable[tuple[int, bytes]]) -> None:
    made = ""
    try:
        number, made = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(number, "wb") as file:
            file.write(index)
            for offset, content in places:
                file.write(bytes(offset - file.tell()) + content)
            os.fchmod(file.fileno(), 0o644)
        Path(made).replace(path)
    except OSError as error:
        if made:
            with suppress(OSError):
                Path(made).unlink(missing_ok=True)
        raise InvalidArgumentError(
            f"the bundle cannot be written: {error.strerror or error}",
            field="output",
            value=str(path),
            rule="bundle_file",
            fix="name a file in a folder that exists, with space left, that this user may write to",
        ) from error


def read_bundle_index(path: Path) -> BundleIndex:
    """The index of a bundle, checked by its digest; plans and code objects are not read.

    Raises ``NotFoundError``, ``UnsupportedError`` for another version, ``InvalidArgumentError`` for damage.
    """
    try:
        with path.open("rb") as file:
            return _read(file, path)
    except OSError as error:
        raise NotFoundError(
            f"the bundle cannot be read: {error.strerror or error}",
            field="bundle",
            value=str(path),
            rule="bundle_file",
            fix="give the path of a bundle that this user may read",
        ) from error


def _read(file: BinaryIO, path: Path) -> BundleIndex:
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEAD.size + _REST.size)
    if len(head) < _HEAD.size + _REST.size or head[:8] != _MAGIC:
        raise _damaged(path, "it does not begin as one")
    _, version, header_bytes, nbytes, digest = _HEAD.unpack_from(head)
    if version != FORMAT_VERSION:
        raise UnsupportedError(
            f"a bundle of format {version}, and this release reads {FORMAT_VERSION}",
            field="bundle",
            value=version,
            rule="bundle_version",
            fix="build the bundle with this release",
        )
    entries, objects, text_bytes = _REST.unpack_from(head, _HEAD.size)
    tables = entries * _ENTRY.size + objects * _OBJECT.size
    if header_bytes != len(head) or nbytes != size or len(head) + tables + text_bytes > min(size, _MAX_INDEX):
        raise _damaged(path, "its size is wrong")
    body = head[_HEAD.size :] + file.read(tables + text_bytes)
    if hashlib.sha256(body).digest() != digest:
        raise _damaged(path, "the digest of its index is wrong")
    try:
        return _parse(body, entries, objects, nbytes)
    except (ValueError, IndexError, TypeError) as error:
        raise _damaged(path, f"its index contradicts itself ({error})") from error


def _parse(body: bytes, entries: int, objects: int, nbytes: int) -> BundleIndex:
    at = _REST.size
    objects_at = at + entries * _ENTRY.size
    texts = body[objects_at + objects * _OBJECT.size :]

    def text(offset: int) -> str:
        return texts[offset : texts.index(b"\0", offset)].decode()

    found = []
    for number in range(entries):
        name, arch, details, _, _, size = _ENTRY.unpack_from(body, at + number * _ENTRY.size)
        record = json.loads(text(details) or "{}")
        if not isinstance(record, dict):
            raise TypeError("details are no object")
        found.append(BundleEntry(text(name), text(arch), size, record))
    sizes = {}
    for number in range(objects):
        sha256, _, size = _OBJECT.unpack_from(body, objects_at + number * _OBJECT.size)
        sizes[sha256] = size
    return BundleIndex(tuple(found), sizes, nbytes)


def _damaged(path: Path, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"not a bundle: {what}",
        field="bundle",
        value=str(path),
        rule="bundle_format",
        fix="build the bundle again, or copy it again",
    )
