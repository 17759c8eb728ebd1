"""Quotas: how much of everything a session may own."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REMEDIES", "Limits"]

REMEDIES = {
    "regions": "unregister regions, or put several tensors into one",
    "buffers": "free buffers that are no longer used",
    "bindings": "unbind what is no longer launched",
    "plans": "release plans that are no longer used",
}
"""For each quota of ``Limits`` that counts objects."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Quotas; those of objects hold for each session."""

    sessions: int = 1024
    regions: int = 4096
    buffers: int = 4096
    buffer_bytes: int = 4 << 30
    plans: int = 4096
    plan_bytes: int = 256 << 20
    bindings: int = 16384
