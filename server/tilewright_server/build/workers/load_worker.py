"""A process that loads shared objects for trial: what crashes or hangs when it is loaded does so here.

See ``worker_loop`` for what it answers; "compiling" is loading. ``name`` is the file's path, ``options`` are the
symbols that it must have.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright_server.build.workers.worker_loop import serve
from tilewright_server.protocol.sealed_file import sealed_file

__all__ = ["Loader"]


class Loader:
    """``worker_loop.Compiler`` that compiles nothing."""

    def identity(self) -> Mapping[str, Any]:
        return {"state": "ok"}

    def compile_source(self, text: bytes, name: str, options: Sequence[str]) -> tuple[bytes | None, str]:  # noqa: ARG002
        """Nothing at all if it can be loaded and has the symbols; None, and the loader's words, if not."""
        try:
            library = _load(Path(name))
        except OSError as error:
            return None, str(error).replace(name, Path(name).name)
        missing = [symbol for symbol in options if not hasattr(library, symbol)]
        _ctypes.dlclose(library._handle)
        return (None, f"there is no {', '.join(missing)} in it") if missing else (b"", "")


def _load(binary: Path) -> ctypes.CDLL:
    """Load a file, or where its disk forbids code (``noexec``) a copy in memory."""
    try:
        return ctypes.CDLL(str(binary))
    except OSError as error:
        descriptor = sealed_file("tw-trial", binary.read_bytes())
        try:
            return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
        except OSError:
            raise error from None
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    sys.exit(serve(Loader(), sys.argv[1:]))
