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

Closure = tuple[tuple[str, str], ...]
_Stamp = tuple[int, int, int] | None
"""Inode, time and size; None for a file that is not there."""


@dataclass(frozen=True, slots=True)
class _File:
    stamp: _Stamp
    digest: str
    includes: tuple[str, ...]


class HeaderIndex:
    """Follows ``#include`` through our own include folders, textually.

    A conditional include counts even if its condition is false: a key that changes too often costs a build, one that
    changes too seldom a wrong kernel. Headers outside the folders (the system's) belong to the compiler's identity.
    What was found is remembered, and believed as long as no file that was looked at has changed, come or gone.
    """

    def __init__(self, include_dirs: Sequence[Path]) -> None:
        self.include_dirs = tuple(include_dirs)
        self._roots = tuple(str(folder.absolute()) for folder in include_dirs)
        self._files: dict[str, _File] = {}
        self._closures: dict[tuple[str, ...], tuple[dict[str, _Stamp], Closure]] = {}

    def closure(self, text: str) -> Closure:
        """(name, SHA-256) of every header that ``text`` includes, directly or not, sorted by name.

        Names are relative to their include folder.
        """
        names = _includes(text.encode())
        known = self._closures.get(names)
        if known is not None and all(_stamp(path) == stamp for path, stamp in known[0].items()):
            return known[1]
        looked_at: dict[str, _Stamp] = {}
        closure = self._walk(names, looked_at)
        self._closures[names] = (looked_at, closure)
        return closure

    def _walk(self, names: tuple[str, ...], looked_at: dict[str, _Stamp]) -> Closure:
        found: dict[str, str] = {}
        pending: list[tuple[str, str]] = [(name, "") for name in names]
        visited: set[str] = set()
        while pending:
            name, beside = pending.pop()
            for folder in (beside, *self._roots) if beside else self._roots:
                path = os.path.normpath(f"{folder}/{name}")
                root = next((item for item in self._roots if path.startswith(f"{item}/")), None)
                if root is None:
                    continue
                if path in visited:
                    break
                looked_at[path] = stamp = _stamp(path)
                if stamp is None:
                    continue
                visited.add(path)
                file = self._scan(path, stamp)
                found[path[len(root) + 1 :]] = file.digest
                pending.extend((inner, path.rpartition("/")[0]) for inner in file.includes)
                break
        return tuple(sorted(found.items()))

    def _scan(self, path: str, stamp: _Stamp) -> _File:
        known = self._files.get(path)
        if known is not None and known.stamp == stamp:
            return known
        data = Path(path).read_bytes()
        file = self._files[path] = _File(stamp, hashlib.sha256(data).hexdigest(), _includes(data))
        return file


def _stamp(path: str) -> _Stamp:
    try:
        status = os.stat(path)  # noqa: PTH116  (a hundred of these make a key)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _includes(data: bytes) -> tuple[str, ...]:
    return tuple(match.decode("utf-8", "replace") for match in _INCLUDE.findall(data))
