"""Plugins whose package names their operations, so that a server need not import the rest before it is ready."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from tilewright_kit.contract.operation import Operation

__all__ = ["ANNOUNCEMENT", "Announced", "Operations", "announced_by"]

ANNOUNCEMENT = "TILEWRIGHT_OPERATIONS"
"""Name of the announcement in a plugin's package: names of operations, and the first words of their kernels' names."""


@dataclass(frozen=True)
class Announced:
    """A plugin that is not imported yet."""

    origin: tuple[str, str]
    """Name and version of its distribution."""
    prefixes: Mapping[str, str]
    """First words of kernel names, by operation."""
    folder: Path | None
    """The folder of its module."""
    get: Callable[[], object]
    """Imports it."""
    lock: threading.Lock = field(default_factory=threading.Lock)


def announced_by(point: EntryPoint, origin: tuple[str, str]) -> Announced | None:
    """The announcement of an entry point's package; None without one, or where it cannot be read: importing the whole
    plugin then says why.
    """
    package = getattr(point, "module", "").rpartition(".")[0]
    if not package:
        return None
    try:
        prefixes = getattr(importlib.import_module(package), ANNOUNCEMENT, None)
        spec = find_spec(point.module) if prefixes else None
    except (Exception, SystemExit):
        return None
    if spec is None or not isinstance(prefixes, Mapping):
        return None
    return Announced(origin, prefixes, Path(spec.origin).parent if spec.origin else None, point.load)


class Operations(Mapping[str, "Operation[Any, Any]"]):
    """Operations by name, in the order in which their plugins were found. Whoever looks one up gets it checked: its
    plugin is imported first where it was only announced, and one that then fails leaves the mapping. Thread-safe.
    """

    def __init__(
        self,
        names: Callable[[], tuple[str, ...]],
        made: Callable[[], Mapping[str, Operation[Any, Any]]],
        finish: Callable[[str], None],
    ) -> None:
        """``finish`` imports the plugin of an announced operation, or all plugins for an empty name."""
        self._names, self._made, self._finish = names, made, finish

    def __getitem__(self, name: str) -> Operation[Any, Any]:
        found = self._made()
        if name not in found:
            self._finish(name)
            found = self._made()
        return found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _all(self) -> Mapping[str, Operation[Any, Any]]:
        self._finish("")
        return self._made()

    def items(self) -> ItemsView[str, Operation[Any, Any]]:
        return self._all().items()

    def values(self) -> ValuesView[Operation[Any, Any]]:
        return self._all().values()
