"""Loading shared objects from a private copy in memory.

The file in the cache may be truncated or overwritten by anybody's backup tool while its code is mapped, and the next
instruction would kill the server. A sealed copy cannot change.
"""

from __future__ import annotations

import _ctypes
import ctypes
import hashlib
import itertools
import os
import threading
from pathlib import Path

from tilewright_server.protocol.sealed_file import sealed_file

__all__ = ["Library", "resident_library"]

_resident: dict[str, Library] = {}
_resident_lock = threading.Lock()
_serials = itertools.count(1)


class Library:
    """A loaded shared object. Raises ``OSError`` if it is none."""

    def __init__(self, binary: Path, data: bytes | None = None) -> None:
        name = f"tw-kernel-{binary.parent.name[:32]}"
        fd = sealed_file(name, binary.read_bytes() if data is None else data)
        try:
            self.handle = ctypes.CDLL(_unique_path(fd), mode=ctypes.RTLD_LOCAL, use_errno=True)
        except OSError:
            # Where code may not run from memory (vm.memfd_noexec), the file itself has to do.
            self.handle = ctypes.CDLL(str(binary), mode=ctypes.RTLD_LOCAL, use_errno=True)
        finally:
            os.close(fd)  # the mappings keep the copy alive

    def unload(self) -> None:
        """Nothing of it may be running or be called afterwards."""
        _ctypes.dlclose(self.handle._handle)


def _unique_path(fd: int) -> str:
    """A name for the file behind a descriptor that no other load has.

    The loader takes two libraries of one name for the same, and numbers of descriptors come again. So a serial number
    is spelled in parts of the path that mean nothing. The first of them tells our paths from those of libtilewright,
    which a process may use as well.
    """
    spelled = "".join(".//" if digit == "1" else "./" for digit in f"{next(_serials):b}")
    return f"/proc/self/./fd/{spelled}{fd}"


def resident_library(binary: Path) -> Library:
    """A library that is never unloaded, because it leaves handlers with the C library; one for equal contents."""
    data = binary.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    with _resident_lock:
        library = _resident.get(digest)
        if library is None:
            library = _resident[digest] = Library(binary, data)
        return library
