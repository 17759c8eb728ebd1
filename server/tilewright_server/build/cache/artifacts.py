"""The content-addressed cache of compiled kernels.

``objects/ab/<key>/`` holds source, binary, log and ``meta.json`` with the binary's digest. An entry appears by one
rename of a finished, synced directory, so it is whole or absent; it is never changed afterwards. Locks are on open
directories: shared while a binary is loaded, exclusive to evict; a build holds ``locks/<key>``. Everything that a
reader finds wrong makes a miss and moves the entry to ``quarantine/``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_server.build.cache.files import Files, Lock, io_error
from tilewright_server.build.cache.private_folder import require_private
from tilewright_server.build.toolchains.toolchain import Toolchain

__all__ = ["META", "META_LIMIT", "Artifact", "ArtifactCache", "ArtifactMeta", "CacheCounters", "artifact_key"]

log = logging.getLogger("tilewright.cache")

FORMAT = 1
META = "meta.json"
LOG = "log.txt"
_QUARANTINE_LIMIT = 16
_CONDEMNED_LIMIT = 4096
_TOUCH_AFTER_S = 60.0
META_LIMIT = 1 << 20


def artifact_key(unit: SourceUnit, arch: ArchSpec, toolchain: Toolchain) -> str:
    """SHA-256 over everything that the binary depends on, and nothing else. Raises ``ToolchainMissingError``."""
    record = [
        FORMAT,
        unit.language,
        toolchain.identity(),
        toolchain.flags(unit, arch),
        arch.id,
        unit.plugin_version,
        toolchain.headers.closure(unit.text),
        unit.text,
    ]
    return hashlib.sha256(json.dumps(record, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ArtifactMeta:
    """Metadata of an entry."""

    key: str
    name: str
    language: str
    arch: str
    compiler: str
    flags: tuple[str, ...]
    plugin_version: str
    entries: dict[str, str]
    source: str
    binary: str
    binary_sha256: str
    binary_bytes: int
    build_ns: int
    created: float
    format: int = FORMAT

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ArtifactMeta:
        """Raises ``ValueError`` if anything is not as ``to_json`` writes it."""
        try:
            record: Any = json.loads(data)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(record, dict) or set(record) != set(cls.__dataclass_fields__):
            raise ValueError("not the fields of an artifact")
        if record["format"] != FORMAT:
            raise ValueError("another format")
        for name, field in cls.__dataclass_fields__.items():
            if not _fits(record[name], str(field.type)):
                raise ValueError(f"{name} is not {field.type}")
        files = (record["source"], record["binary"], META, LOG)
        if len(set(files)) < len(files) or not all(map(_is_plain, files)):
            raise ValueError("a file outside the entry, or two in one place")
        return cls(**{**record, "flags": tuple(record["flags"])})


def _fits(value: Any, kind: str) -> bool:
    """True if a value of JSON is one of a field that is annotated so."""
    if kind == "tuple[str, ...]":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind == "dict[str, str]":
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
    return isinstance(value, kinds[kind])


def _is_plain(name: str) -> bool:
    """True if it names a file in a folder."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


class Artifact:
    """A verified entry, locked against eviction until ``release``."""

    __slots__ = ("binary", "folder", "lock", "meta")

    def __init__(self, folder: Path, meta: ArtifactMeta, lock: Lock) -> None:
        self.folder = folder
        self.meta = meta
        self.binary = folder / meta.binary
        self.lock = lock

    def release(self) -> None:
        self.lock.close()


@dataclass(slots=True)
class CacheCounters:
    hits: int = 0
    published: int = 0
    lost_races: int = 0
    quarantined: int = 0
    evicted: int = 0


class ArtifactCache:
    """One cache directory, shared by any number of threads and server processes of one user.

    Raises typed errors only.
    """

    def __init__(
        self, root: Path, *, max_bytes: int = 2 << 30, max_age_s: float = 90 * 86400.0, files: Files | None = None
    ) -> None:
        """Creates the directory.

        Raises ``AccessError`` if others can write to it, ``ResourceExhaustedError`` if the disk is full.
        """
        self.max_bytes = max_bytes
        self.max_age_s = max_age_s
        self.counters = CacheCounters()
        self.files = files or Files()
        self.root = require_private(root)
        self.objects = self.root / "objects"
        self._quarantine = self.root / "quarantine"
        self._staging = self.root / "staging"
        self._locks = self.root / "locks"
        self._condemned: set[str] = set()
        try:
            for folder in (self._quarantine, self.objects, self._staging, self._locks, self.scratch):
                self._make_folder(folder)
                require_private(folder)  # where it is a link, too
        except OSError as error:
            raise io_error(error, "creating its folders") from error
        self._remove_stale_staging()

    @property
    def scratch(self) -> Path:
        """For caches that compilers keep themselves; not accounted."""
        return self.root / "scratch"

    def entry(self, key: str) -> Path:
        return self.objects / key[:2] / key

    def contains(self, key: str) -> bool:
        """True if there is an entry, unverified."""
        return (self.entry(key) / META).exists()

    def get(self, key: str) -> Artifact | None:
        """The verified, locked entry of ``key``; None if there is none (a damaged one is moved aside first)."""
        folder = self.entry(key)
        try:
            if folder.is_symlink():  # an entry is a folder: what a link leads to may change
                self._set_aside(folder)
                return None
            lock = self.files.lock_entry(folder, exclusive=False)
            if lock is None:
                return None
            meta = self._verified(folder, key)
        except OSError as error:
            raise io_error(error, "reading an entry") from error
        if meta is None:
            self._quarantine_entry(folder, lock)
            return None
        self._touch(lock)
        self.counters.hits += 1
        return Artifact(folder, meta, lock)

    def check(self, key: str) -> str:
        """Why the entry of ``key`` cannot be used; empty if it can."""
        try:
            return self._damage(self.entry(key), key)[1]
        except OSError as error:
            return os.strerror(error.errno or 0)

    def condemn(self, artifact: Artifact) -> None:
        """Set an entry aside that cannot be used, whole as it is, and give its lock back."""
        if len(self._condemned) < _CONDEMNED_LIMIT:
            self._condemned.add(artifact.meta.binary_sha256)
        self._quarantine_entry(artifact.folder, artifact.lock)

    def is_condemned(self, binary_sha256: str) -> bool:
        """True for a binary that this process could not use, whoever offers it again."""
        return binary_sha256 in self._condemned

    def _verified(self, folder: Path, key: str) -> ArtifactMeta | None:
        return self._damage(folder, key)[0]

    def _damage(self, folder: Path, key: str) -> tuple[ArtifactMeta | None, str]:
        try:
            meta = ArtifactMeta.from_json(self.files.read(folder / META, META_LIMIT))
            data = self.files.read(folder / meta.binary, meta.binary_bytes)
        except FileNotFoundError as error:
            return None, f"{Path(str(error.filename)).name} is missing"
        except (NotADirectoryError, IsADirectoryError):
            return None, "files and folders in each other's places"
        except (ValueError, TypeError) as error:
            return None, f"{META}: {error}"
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            return None, "a link that leads to itself"
        if meta.key != key:
            return None, "it belongs to another key"
        if len(data) != meta.binary_bytes or hashlib.sha256(data).hexdigest() != meta.binary_sha256:
            return None, "the binary is not the one that was built"
        return meta, ""

    def _touch(self, lock: Lock) -> None:
        """Last use is the folder's modification time, which nothing else changes."""
        with suppress(OSError):
            if time.time() - os.fstat(lock.fd).st_mtime > _TOUCH_AFTER_S:
                os.utime(lock.fd)

    # Publishing

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A private, empty folder on the cache's disk; whatever is left in it afterwards is removed, by us or after our
        death by the next server.
        """
        folder = self._staging / secrets.token_hex(8)
        try:
            with self.files.wait_lock(self._staging / ".lock", exclusive=False):
                self.files.make_dir(folder)
                lock = self.files.lock_entry(folder, exclusive=True)
        except OSError as error:
            raise io_error(error, "making room for a build") from error
        try:
            yield folder
        finally:
            self.files.remove_tree(folder)
            if lock is not None:
                lock.close()

    def publish(self, unit: SourceUnit, meta: ArtifactMeta, binary: bytes, log: str, staging: Path) -> bool:
        """Make an entry visible, whole and on the disk. False if another process was first, which serves as well."""
        entry = staging / "entry"
        target = self.entry(meta.key)
        try:
            self.files.make_dir(entry)
            self.files.write(entry / meta.source, unit.text.encode())
            self.files.write(entry / meta.binary, binary)
            self.files.write(entry / LOG, log.encode("utf-8", "replace"))
            self.files.write(entry / META, meta.to_json())
            self.files.sync(entry)
            self._make_folder(target.parent)
            try:
                self.files.rename(entry, target)
            except OSError:
                if not self.contains(meta.key):
                    raise
                self.counters.lost_races += 1
                return False
            self.files.sync(target.parent)
        except OSError as error:
            raise io_error(error, "publishing a kernel") from error
        self.counters.published += 1
        return True

    def try_build_lock(self, key: str) -> Lock | None:
        """The right to build ``key``, held across processes; None while another has it.

        Give it back with ``end_build``.
        """
        try:
            return self.files.try_lock_file(self._locks / key)
        except OSError as error:
            raise io_error(error, "locking a kernel") from error

    def end_build(self, key: str, lock: Lock) -> None:
        # Unlinked while still held: see try_lock_file for why that is safe.
        (self._locks / key).unlink(missing_ok=True)
        lock.close()

    def is_building(self, key: str) -> bool:
        """True if some process holds the build lock of ``key``."""
        path = self._locks / key
        if not path.exists() or path.is_symlink():
            return False
        lock = self.files.lock_entry(path, exclusive=True)
        if lock is None:
            return path.exists()
        lock.close()
        return False

    # Removing

    def evict(self, key: str) -> bool:
        """Remove an entry unless it is loaded or being built, here or in another process."""
        folder = self.entry(key)
        try:
            if self.is_building(key):
                return False
            if folder.is_symlink():
                self._set_aside(folder)
                return True
            lock = self.files.lock_entry(folder, exclusive=True)
        except OSError as error:
            raise io_error(error, "removing an entry") from error
        if lock is None:
            return False
        # Out of sight first: a reader sees the whole entry or none.
        trash = self._staging / f"trash-{secrets.token_hex(8)}"
        with lock:
            try:
                self.files.rename(folder, trash)
            except OSError:
                return False
            self.files.remove_tree(trash)
        self.counters.evicted += 1
        return True

    def _quarantine_entry(self, folder: Path, lock: Lock) -> None:
        with lock:
            # Another process may have moved it and published a good one in its place.
            if not self.files.still_there(lock.fd, folder):
                return
            self._set_aside(folder)

    def _set_aside(self, path: Path) -> None:
        """Move something out of the way, and the oldest of what was moved before out of the world."""
        with suppress(OSError):
            self.files.rename(path, self._quarantine / f"{time.time_ns():020d}-{path.name}")
            self.counters.quarantined += 1
        kept = sorted(self._quarantine.iterdir())
        for old in kept[: max(0, len(kept) - _QUARANTINE_LIMIT)]:
            if old.is_dir() and not old.is_symlink():
                self.files.remove_tree(old)
            else:
                old.unlink(missing_ok=True)

    def _make_folder(self, path: Path) -> None:
        """Have a folder there. What else has its name is moved aside: a file, a pipe, or a link to none."""
        if path.is_dir():
            return
        if path.is_symlink() or path.exists():
            log.warning("%s is no folder, and was moved aside", path)
            self.files.rename(path, self.root / f"{path.name}.aside-{secrets.token_hex(4)}")
        with suppress(FileExistsError):
            self.files.make_dir(path)

    def _remove_stale_staging(self) -> None:
        with suppress(OSError), self.files.wait_lock(self._staging / ".lock", exclusive=True):
            for folder in self._staging.iterdir():
                lock = self.files.lock_entry(folder, exclusive=True) if folder.is_dir() else None
                if lock is not None:
                    with lock:
                        self.files.remove_tree(folder)

    def all_keys(self) -> list[str]:
        """Keys of all entries, sorted."""
        return sorted(entry.name for shard in self.objects.iterdir() if shard.is_dir() for entry in shard.iterdir())
