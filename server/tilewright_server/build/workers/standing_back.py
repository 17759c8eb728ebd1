"""Niceness of compilers beyond that of all: of those that no live call waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["further_niceness", "standing_back"]

_here = threading.local()


@contextmanager
def standing_back(niceness: int) -> Iterator[None]:
    """Compilers that this thread starts or asks, inside, are nicer to others by so much. The thread itself is not: the
    system would not let it come back."""
    before = further_niceness()
    _here.niceness = niceness
    try:
        yield
    finally:
        _here.niceness = before


def further_niceness() -> int:
    found: int = getattr(_here, "niceness", 0)
    return found
