"""Maintenance of a cache: list, verify, prune, export, import."""

from __future__ import annotations

import hashlib
import io
import lzma
import tarfile
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_server.build.cache.artifacts import LOG, META, META_LIMIT, ArtifactCache, ArtifactMeta
from tilewright_server.build.cache.files import io_error
from tilewright_server.protocol.signatures import check_signature

__all__ = [
    "Checked",
    "Entry",
    "Imported",
    "Pruned",
    "add_entry",
    "export_entries",
    "import_entries",
    "list_entries",
    "pack_entry",
    "prune",
    "total_bytes",
    "unpack_entry",
    "verify",
]

_MAX_ENTRY = 256 << 20
_MAX_MEMBERS = 8
"""Source, binary, log and record, and some that later versions may add."""
_DAMAGED = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of reading an archive that is cut off or damaged, besides an ``OSError`` without a number."""
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the cache. ``meta`` is None if it cannot be read."""

    key: str
    nbytes: int
    last_used: float
    meta: ArtifactMeta | None


@dataclass(frozen=True, slots=True)
class Checked:
    key: str
    name: str
    damage: str
    """Empty if the entry is whole."""


@dataclass(frozen=True, slots=True)
class Pruned:
    removed: tuple[str, ...]
    freed_bytes: int
    kept: int
    kept_bytes: int
    in_use: int
    """Entries that should have gone but are loaded or being built."""


@dataclass(frozen=True, slots=True)
class Imported:
    added: tuple[str, ...]
    present: tuple[str, ...]


def list_entries(cache: ArtifactCache) -> list[Entry]:
    """All entries, most recently used first."""
    entries = [entry for key in cache.all_keys() if (entry := _entry(cache, key)) is not None]
    return sorted(entries, key=lambda entry: (-entry.last_used, entry.key))


def total_bytes(cache: ArtifactCache) -> int:
    return sum(entry.nbytes for entry in list_entries(cache))


def verify(cache: ArtifactCache, *, repair: bool = False) -> list[Checked]:
    """Read every entry and compare digests.

    With ``repair`` damaged ones are moved to quarantine, to be rebuilt when they are needed.
    """
    results = []
    for entry in list_entries(cache):
        damage = cache.check(entry.key)
        if damage and repair:
            found = cache.get(entry.key)
            if found is not None:
                found.release()
        results.append(Checked(entry.key, entry.meta.name if entry.meta else "", damage))
    return results


def prune(cache: ArtifactCache, *, max_bytes: int | None = None, max_age_s: float | None = None) -> Pruned:
    """Remove entries that are older than ``max_age_s``, then the least recently used until ``max_bytes`` are left.

    Entries that are loaded or being built stay, and so do those used within the last seconds, which somebody is about
    to load.
    """
    limit = cache.max_bytes if max_bytes is None else max_bytes
    age = cache.max_age_s if max_age_s is None else max_age_s
    now = time.time()
    entries = list_entries(cache)
    left = sum(entry.nbytes for entry in entries)
    removed: list[str] = []
    freed = in_use = 0
    for entry in reversed(entries):
        unused_s = now - entry.last_used
        if left <= limit and unused_s <= age:
            continue
        if (unused_s < _GRACE_S and limit > 0) or not cache.evict(entry.key):
            in_use += 1
            continue
        removed.append(entry.key)
        freed += entry.nbytes
        left -= entry.nbytes
    return Pruned(tuple(removed), freed, len(entries) - len(removed), left, in_use)


def export_entries(cache: ArtifactCache, archive: Path, keys: Iterable[str] | None = None) -> int:
    """Write whole entries into a tar archive (gzip by the suffix); returns how many.

    Equal caches give equal member lists.
    """
    count = 0
    zipped = archive.suffix in (".gz", ".tgz")
    try:
        with tarfile.open(archive, "w:gz") if zipped else tarfile.open(archive, "w") as tar:
            for key in sorted(keys) if keys is not None else cache.all_keys():
                count += _add_entry(tar, cache, key)
    except OSError as error:
        raise io_error(error, "writing the archive") from error
    return count


def import_entries(cache: ArtifactCache, archive: Path, keys: Sequence[Any] = ()) -> Imported:
    """Add the entries of an archive that are whole and not there yet.

    What an archive holds is code: import only what you would install. Digests guard against damage, not against a
    forger; with ``keys`` one of them must have signed it. Raises ``AccessError`` if none has, ``InvalidArgumentError``
    if the archive is not one of ours; entries before the bad one stay.
    """
    added: list[str] = []
    present: list[str] = []
    try:
        with archive.open("rb") as file:
            if keys:
                check_signature(archive, file, keys)
            with tarfile.open(fileobj=file, mode="r:*") as tar:
                for key, members in _grouped(tar):
                    meta = _checked(key, members)
                    (added if add_entry(cache, meta, members) else present).append(key)
    except _DAMAGED as error:
        raise _refused("it is no tar archive, or only a part of one", str(error)) from error
    except OSError as error:
        if error.errno is None:
            raise _refused("it cannot be unpacked", str(error)) from error
        raise io_error(error, "reading the archive") from error
    return Imported(tuple(added), tuple(present))


def pack_entry(cache: ArtifactCache, key: str) -> bytes | None:
    """One whole entry as an archive in memory; None if there is none."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        found = _add_entry(tar, cache, key)
    return packed.getvalue() if found else None


def unpack_entry(key: str, data: bytes) -> tuple[ArtifactMeta, dict[str, bytes]]:
    """The record and the files of an archive that ``pack_entry`` made of ``key``, digests compared.

    Raises ``InvalidArgumentError`` for anything else.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            entries = list(_grouped(tar))
    except (*_DAMAGED, OSError) as error:
        raise _refused("it is no tar archive, or only a part of one", str(error)) from error
    if [name for name, _ in entries] != [key]:
        raise _refused("it is not of one artifact, or of another", key)
    members = entries[0][1]
    return _checked(key, members), members


def _entry(cache: ArtifactCache, key: str) -> Entry | None:
    folder = cache.entry(key)
    try:
        nbytes = sum(path.stat().st_size for path in folder.iterdir())
        used = folder.stat().st_mtime
    except OSError:  # evicted or moved meanwhile
        return None
    try:
        meta: ArtifactMeta | None = ArtifactMeta.from_json(cache.files.read(folder / META, META_LIMIT))
    except (OSError, ValueError, TypeError):
        meta = None
    return Entry(key, nbytes, used, meta)


def _add_entry(tar: tarfile.TarFile, cache: ArtifactCache, key: str) -> bool:
    artifact = cache.get(key)
    if artifact is None:
        return False
    try:
        for path in sorted(artifact.folder.iterdir()):
            _add(tar, f"{key}/{path.name}", path.read_bytes())
    finally:
        artifact.release()
    return True


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = 0o600
    tar.addfile(info, io.BytesIO(data))


def _grouped(tar: tarfile.TarFile) -> Iterable[tuple[str, dict[str, bytes]]]:
    """Members by key. Nothing is trusted: names are split, never joined to a path; only plain files of a sane size."""
    current, nbytes = "", 0
    members: dict[str, bytes] = {}
    for info in tar:
        key, _, name = info.name.partition("/")
        if not info.isfile() or len(key) != 64 or set(key) - set("0123456789abcdef"):
            raise _refused("a member that is no part of an artifact", info.name)
        if key != current and members:
            yield current, members
            members, nbytes = {}, 0
        current, nbytes = key, nbytes + info.size
        if nbytes > _MAX_ENTRY or len(members) == _MAX_MEMBERS:
            raise _refused("an artifact that is too large", key)
        source = tar.extractfile(info)
        members[name] = source.read() if source is not None else b""
    if members:
        yield current, members


def _checked(key: str, members: dict[str, bytes]) -> ArtifactMeta:
    try:
        meta = ArtifactMeta.from_json(members[META])
        binary = members[meta.binary]
        members[meta.source].decode()
    except (KeyError, ValueError, TypeError) as error:
        raise _refused("an incomplete artifact", f"{key}: {error}") from error
    whole = len(binary) == meta.binary_bytes and hashlib.sha256(binary).hexdigest() == meta.binary_sha256
    if meta.key != key or not whole:
        raise _refused("a damaged artifact", key)
    return meta


def add_entry(cache: ArtifactCache, meta: ArtifactMeta, members: dict[str, bytes]) -> bool:
    """Add an entry of files that were checked; False if it is there already."""
    found = cache.get(meta.key)
    if found is not None:
        found.release()
        return False
    unit = SourceUnit(
        meta.name, meta.language, members[meta.source].decode(), meta.entries, meta.flags, meta.plugin_version
    )
    with cache.staging() as folder:
        return cache.publish(unit, meta, members[meta.binary], members.get(LOG, b"").decode("utf-8", "replace"), folder)


def _refused(why: str, value: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the archive was refused: {why}",
        field="archive",
        value=value,
        rule="cache_archive",
        fix="export it again with `tilewright cache export`",
    )
