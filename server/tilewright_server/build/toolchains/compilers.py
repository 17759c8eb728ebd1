"""Programs that compile: how they are told apart, and noticed when they change."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "ALLOW_SPILLS",
    "Stamp",
    "answer_of",
    "digest",
    "environment",
    "file_stamp",
    "have_module",
    "without_folders",
    "zig_binary",
    "zig_environment",
]

ALLOW_SPILLS = "TW_ALLOW_SPILLS"
"""A unit that defines this may use more registers than there are."""

_VERSION_TIMEOUT_S = 20.0

Stamp = tuple[int, int, int]
"""Inode, time and size of a file: another one is another file."""


def file_stamp(path: Path) -> Stamp | None:
    """None if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def digest(*paths: Path) -> str:
    """Fingerprint of the contents of files, in this order. Raises ``OSError``."""
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                found.update(part)
    return found.hexdigest()[:16]


def answer_of(argv: Sequence[str]) -> str | None:
    """Output of a program; None if it does not end well."""
    env = {"PATH": f"{Path(argv[0]).parent}:/usr/bin:/bin", "LC_ALL": "C", "HOME": "/nonexistent"}
    try:
        answer = subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, timeout=_VERSION_TIMEOUT_S, env=env
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.decode("utf-8", "replace") if answer.returncode == 0 else None


def _first_line(argv: Sequence[str]) -> str | None:
    """The first line of the answer, which names version and packaging revision; None if there is no good answer."""
    lines = (answer_of(argv) or "").splitlines()
    return lines[0].strip() if lines else None


def have_module(name: str) -> bool:
    """True if a module of a package that need not be there is there. Imports its parents only."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def zig_binary() -> tuple[Path, str] | None:
    """The ``zig`` binary of the wheel ``ziglang`` and its identity; None if it is not installed.

    It is called directly: ``python -m ziglang`` would add the start of an interpreter.
    """
    spec = importlib.util.find_spec("ziglang")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder) / "zig"
        version = _first_line((str(binary), "version")) if binary.is_file() else None
        stamp = file_stamp(binary)
        if version is not None and stamp is not None:
            # Size instead of a digest: the binary has well over 100 MB, and a released wheel never changes.
            return binary, f"zig {version} [{stamp[2]}]"
    return None


def environment(binary: Path, workdir: Path) -> dict[str, str]:
    """Environment of a compiler."""
    path = os.pathsep.join((str(binary.parent), "/usr/local/bin", "/usr/bin", "/bin"))
    return {"PATH": path, "LC_ALL": "C", "TMPDIR": str(workdir)}


def zig_environment(binary: Path, workdir: Path, scratch: Path | None) -> dict[str, str]:
    """The same for zig, which insists on caches: the global one holds zig's own runtime, which takes seconds to build;
    the local one grows by the call."""
    shared, private = str(scratch or workdir / "zig"), str(workdir / "zig-local")
    caches = {"ZIG_GLOBAL_CACHE_DIR": shared, "ZIG_LOCAL_CACHE_DIR": private, "HOME": private}
    return environment(binary, workdir) | caches


def without_folders(log: str, folders: Sequence[Path]) -> str:
    """Diagnostics go to callers, and a caller has no business with the server's folders."""
    for folder in folders:
        log = log.replace(f"{folder}/", "")
    return log
