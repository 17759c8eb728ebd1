"""The result of code generation: one small translation unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["SourceUnit"]


@dataclass(frozen=True, slots=True)
class SourceUnit:
    """A translation unit that states one configuration and instantiates one template.

    The artifact's key is computed from ``text``, the content of every header that it includes, ``flags``, ``defines``
    and the compiler: two units that differ in any of these never share a binary.
    """

    name: str
    """Kernel name; also the stem of the file."""
    language: str
    """``c++``, ``cuda`` or ``hip``: which toolchain compiles it."""
    text: str
    entries: Mapping[str, str]
    """Role to exported symbol, for example ``{"main": "...", "reduce": "..."}``."""
    flags: tuple[str, ...] = ()
    """Compiler flags beyond those of the arch."""
    plugin_version: str = ""
    defines: Mapping[str, str] = field(default_factory=dict)
