"""Units of the CPU's compiler as shared libraries: several to a translation unit, and each built once."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tilewright_kit.contract.source import SourceUnit

__all__ = ["PER_UNIT", "Libraries"]

PER_UNIT = 8
"""Kernels of one translation unit, where several are wanted: what they share is compiled once."""
_INCLUDES = re.compile(r"^#include .*\n", re.MULTILINE)


class Libraries:
    """Other processes may build the same ones in ``folder`` at the same time."""

    def __init__(self, command: Sequence[str], flags: Sequence[str], folder: Path) -> None:
        self.command, self.flags, self.folder = list(command), list(flags), folder

    def build(self, units: Iterable[SourceUnit]) -> None:
        """Build what is not there, side by side. Raises ``RuntimeError`` with the compiler's words."""
        groups: dict[tuple[str, ...], list[SourceUnit]] = {}
        for unit in {unit.text: unit for unit in units}.values():
            assert not unit.defines, f"{unit.name}: kernels of one library have the same macros"
            if not self._path(unit).exists():
                groups.setdefault((*_INCLUDES.findall(unit.text), *unit.flags), []).append(unit)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._together, (part for alike in groups.values() for part in _parts(alike))))

    def load(self, unit: SourceUnit) -> ctypes.CDLL:
        """The library with a unit's entries, built if need be."""
        self._together([unit])
        return ctypes.CDLL(str(self._path(unit)))

    def _path(self, unit: SourceUnit) -> Path:
        words = [*self.command, *self.flags, *unit.flags, unit.text]
        return self.folder / f"{hashlib.sha256(chr(0).join(words).encode()).hexdigest()[:24]}.so"

    def _together(self, units: Sequence[SourceUnit]) -> None:
        """One library for those that nobody has built, under the names of all of them."""
        units = sorted(units, key=self._path)  # all processes take locks in the same order
        with ExitStack() as held:
            for unit in units:
                lock = held.enter_context(self._path(unit).with_suffix(".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            missing = [unit for unit in units if not self._path(unit).exists()]
            if missing:
                self._compile(missing)

    def _compile(self, units: Sequence[SourceUnit]) -> None:
        paths = [self._path(unit) for unit in units]
        source, partial = (paths[0].with_suffix(suffix) for suffix in (".cpp", ".partial"))
        source.write_text(_joined([unit.text for unit in units]))
        command = [*self.command, *self.flags, *units[0].flags, str(source), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{', '.join(unit.name for unit in units)}: does not build:\n{done.stderr[:4000]}")
        for path in paths:
            path.hardlink_to(partial)
        partial.unlink()


def _parts(units: Sequence[SourceUnit]) -> Iterator[Sequence[SourceUnit]]:
    return (units[first : first + PER_UNIT] for first in range(0, len(units), PER_UNIT))


def _joined(texts: Sequence[str]) -> str:
    """One text of several with the same headers, each of which has a struct ``Config`` of its own."""
    parts = _INCLUDES.findall(texts[0])
    for number, text in enumerate(texts):
        parts.append(f"#define Config Config{number}\n{_INCLUDES.sub('', text)}\n#undef Config\n")
    return "".join(parts)
