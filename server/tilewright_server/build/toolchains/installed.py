"""Toolchains whose compiler is looked for on the machine, and may be installed, replaced or removed at any time."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tilewright_server.build.toolchains.compilers import Stamp, file_stamp
from tilewright_server.build.toolchains.headers import HeaderIndex
from tilewright_server.build.workers.process import Limits

__all__ = ["InstalledCompiler", "InstalledToolchain"]


@dataclass(frozen=True, slots=True)
class InstalledCompiler:
    """One that works. ``command`` starts it; a library has none."""

    command: tuple[str, ...]
    identity: str
    """Name, version and fingerprint."""
    binary: Path
    stamp: Stamp

    @property
    def current(self) -> bool:
        """True if it is still the file that was found."""
        return file_stamp(self.binary) == self.stamp


Found = TypeVar("Found", bound=InstalledCompiler)


class InstalledToolchain(ABC, Generic[Found]):
    """Base of such toolchains. Thread-safe.

    What was found is kept until its file changes; what was not found is looked for again at every use, so that an
    installation is noticed.
    """

    def __init__(
        self,
        include_dirs: Sequence[Path],
        *,
        compiler: str = "",
        limits: Limits | None = None,
        search_path: str | None = None,
        scratch: Path | None = None,
    ) -> None:
        """``compiler`` names one; empty takes the first that can be used. ``search_path`` replaces the process's own,
        and ``scratch`` is where a compiler that insists on a cache of its own (zig) may keep it."""
        self.headers = HeaderIndex(include_dirs)
        self._compiler = compiler
        self._limits = limits or Limits()
        self._search_path = search_path
        self._scratch = scratch
        self._found: Found | None = None
        self._lock = threading.Lock()
        self._ready()

    def _ready(self) -> None:
        """Make what else it keeps."""

    def identity(self) -> str:
        """See ``Toolchain``."""
        return self._find().identity

    @abstractmethod
    def _detect(self) -> Found:
        """Look for it. Raises ``ToolchainMissingError``."""

    def _find(self) -> Found:
        found = self._found
        if found is not None and found.current:
            return found
        with self._lock:
            self._found = found = self._detect()
        return found

    def _forget(self) -> None:
        with self._lock:
            self._found = None
