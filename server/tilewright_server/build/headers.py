"""The headers that a translation unit reaches, by content: an edited header makes another artifact."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HeaderIndex"]

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Scanned:
    stamp: tuple[int, int, int]
    digest: str
    includes: tuple[str, ...]


class HeaderIndex:
    """Follows ``#include`` through our own include folders, textually.

    A conditional include counts even if its condition is false: a key that changes too often costs a build, one that
    changes too seldom a wrong kernel. Headers outside the folders (the system's) belong to the compiler's identity.
    Contents are cached by inode, time and size of the file.
    """

    def __init__(self, include_dirs: Sequence[Path]) -> None:
        self.include_dirs = tuple(include_dirs)
        self._files: dict[Path, _Scanned | None] = {}

    def closure(self, text: str) -> tuple[tuple[str, str], ...]:
        """(name, SHA-256) of every header that ``text`` includes, directly or not, sorted by name.

        Names are relative to their include folder.
        """
        found: dict[str, str] = {}
        pending: list[tuple[str, Path | None]] = [(name, None) for name in _includes(text.encode())]
        visited: set[Path] = set()
        while pending:
            name, beside = pending.pop()
            resolved = self._resolve(name, beside)
            if resolved is None or resolved[0] in visited:
                continue
            path, label, scanned = resolved
            visited.add(path)
            found[label] = scanned.digest
            pending.extend((inner, path.parent) for inner in scanned.includes)
        return tuple(sorted(found.items()))

    def _resolve(self, name: str, beside: Path | None) -> tuple[Path, str, _Scanned] | None:
        folders = ((beside,) if beside is not None else ()) + self.include_dirs
        for folder in folders:
            path = Path(os.path.normpath(folder / name))
            root = next((item for item in self.include_dirs if path.is_relative_to(item)), None)
            scanned = self._scan(path) if root is not None else None
            if scanned is not None and root is not None:
                return path, path.relative_to(root).as_posix(), scanned
        return None

    def _scan(self, path: Path) -> _Scanned | None:
        try:
            status = path.stat()
        except OSError:
            return None
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._files.get(path)
        if known is not None and known.stamp == stamp:
            return known
        data = path.read_bytes()
        scanned = _Scanned(stamp, hashlib.sha256(data).hexdigest(), _includes(data))
        self._files[path] = scanned
        return scanned


def _includes(data: bytes) -> tuple[str, ...]:
    return tuple(match.decode("utf-8", "replace") for match in _INCLUDE.findall(data))
