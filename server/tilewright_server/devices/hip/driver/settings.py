"""Environment of AMD's runtime: which devices a process sees."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["VISIBLE", "VISIBLE_ELSEWHERE", "show_only", "visible_entry"]

VISIBLE = "HIP_VISIBLE_DEVICES"
VISIBLE_ELSEWHERE = "CUDA_VISIBLE_DEVICES"
"""Variable that the runtime reads where the first is not set or empty. ROCm, "GPU isolation techniques"."""


def visible_entry(ordinal: int, environ: Mapping[str, str] | None = None) -> str:
    """Word for the device that the runtime of this process calls ``ordinal`` in a list of visible devices."""
    environ = os.environ if environ is None else environ
    listed = environ.get(VISIBLE) or environ.get(VISIBLE_ELSEWHERE) or ""
    entries = [entry.strip() for entry in listed.split(",") if entry.strip()]
    return entries[ordinal] if ordinal < len(entries) else str(ordinal)


def show_only(entry: str) -> None:
    """Let this process, whose runtime is not loaded yet, and processes that it starts see one device."""
    os.environ[VISIBLE] = entry
