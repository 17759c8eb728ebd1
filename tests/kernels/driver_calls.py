"""Calls of a GPU's driver through ctypes, for tests that do what a framework does in a client's process."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

__all__ = ["DriverCalls"]


class DriverCalls:
    """A driver's library whose calls must succeed."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def call(self, name: str, *arguments: Any) -> None:
        assert getattr(self.library, name)(*arguments) == 0, name

    def made(self, name: str, *arguments: Any) -> int:
        """The handle or address that a call writes where its first argument points."""
        found = ctypes.c_uint64()
        self.call(name, ctypes.byref(found), *arguments)
        return found.value
