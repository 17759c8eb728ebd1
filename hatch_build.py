"""Build hook of the wheel: puts libtilewright into it, where there is a C++ compiler.

The wheel is then one for this platform and for every Python, and installs wherever glibc is as new as the library's
symbols ask. Without a compiler it is a wheel for any platform, whose users build the library themselves:
``python -m tilewright_native.build``.
"""

from __future__ import annotations

import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["LibraryHook", "platform_tag"]


class LibraryHook(BuildHookInterface):  # type: ignore[type-arg]
    """Found by its base class; ``pyproject.toml`` names this file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._folder = None
        if version == "editable":  # `make setup` builds it in the checkout
            return
        sys.path.insert(0, str(Path(self.root) / "native"))
        try:
            from tilewright_native.build import build_library
        finally:
            sys.path.pop(0)
        self._folder = Path(tempfile.mkdtemp())
        library = self._folder / "libtilewright.so"
        try:
            build_library(library)
        except (OSError, RuntimeError) as error:
            self.app.display_warning(
                f"the wheel has no libtilewright: {error}\nAfter it is installed: python -m tilewright_native.build"
            )
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(library.read_bytes())}"
        build_data["force_include"][str(library)] = "tilewright_native/libtilewright.so"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def platform_tag(library: bytes) -> str:
    """The platform of a shared object of this machine: that of the newest version of glibc whose symbols it names, or
    this system's alone where it names none (another C library).
    """
    found = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)(?:\.\d+)?(?=\0)", library)]
    machine = platform.machine()
    return f"manylinux_2_{max(found)}_{machine}" if found else f"linux_{machine}"
