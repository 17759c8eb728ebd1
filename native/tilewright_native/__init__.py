"""The C++ kernel templates of Tilewright, shipped as package data."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["LIBRARY", "include_dir", "library_path"]

LIBRARY = Path(__file__).resolve().parent / "libtilewright.so"
"""The shared library of ``tilewright.h``; ``python -m tilewright_native.build`` makes it."""


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
    if not LIBRARY.is_file():
        raise FileNotFoundError("libtilewright.so was not built: run `python -m tilewright_native.build`")
    return LIBRARY
