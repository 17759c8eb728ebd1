"""Memory files that nobody can change any more."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

__all__ = ["sealed_file"]

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_file(name: str, data: bytes) -> int:
    """Descriptor of a memory file with this content, the caller's to close. Raises ``OSError``."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
