"""A bug to plant: an edit of a few words, and the tests that must fail with it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Bug"]


@dataclass(frozen=True)
class Bug:
    """``old``, which stands once in ``file``, becomes ``new``. ``tests`` are arguments of pytest."""

    kind: str
    file: str
    old: str
    new: str
    tests: str
