"""Counts that actors write and the run reads: they outlive whoever is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["NAMES", "SLOTS", "Counts", "all_counts"]

NAMES = ("requests", "hostile", "answered", "refused", "unknown", "wrong", "untyped")
"""Requests that were sent; those of them that no program in good order sends; replies without an error; typed errors;
calls of unknown outcome; results that were wrong; errors without a type, or internal ones."""
SLOTS = 8192


def all_counts(path: Path, *, create: bool = False) -> Any:
    """One row for each actor that was ever started."""
    if create:
        path.write_bytes(bytes(SLOTS * len(NAMES) * 8))
    return np.memmap(path, np.int64, "r+", shape=(SLOTS, len(NAMES)))


class Counts:
    """The row of one actor."""

    def __init__(self, path: Path, slot: int) -> None:
        self._row = all_counts(path)[slot]

    def add(self, name: str, count: int = 1) -> None:
        self._row[NAMES.index(name)] += count
