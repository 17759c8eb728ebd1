"""The C++ kernel templates of Tilewright, shipped as package data."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["include_dir", "library_path"]


@cache
def include_dir() -> Path:
    """The folder to pass to a compiler as ``-I``: it holds ``tilewright/{core,cpu,...}``.

    In an installed wheel the headers lie inside this package; in a source checkout they lie beside it.
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "include", package.parent / "include"):
        if (candidate / "tilewright").is_dir():
            return candidate
    raise FileNotFoundError(f"the kernel templates are missing: no include/tilewright in {package} or {package.parent}")


def library_path() -> Path:
    """The shared library of ``tilewright.h``, which lies in this package. Raises ``FileNotFoundError`` where it was not
    built."""
    found = Path(__file__).resolve().parent / "libtilewright.so"
    if not found.is_file():
        raise FileNotFoundError("libtilewright.so was not built")
    return found
