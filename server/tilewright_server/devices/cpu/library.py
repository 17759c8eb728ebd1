"""Loading shared objects from a private copy in memory.

The file in the cache may be truncated or overwritten by anybody's backup tool while its code is mapped, and the next
instruction would kill the server. A sealed copy cannot change.
"""

from __future__ import annotations

import _ctypes
import ctypes
import fcntl
import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path

__all__ = ["Library", "resident_library"]

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_resident: dict[str, Library] = {}
_resident_lock = threading.Lock()


class Library:
    """A loaded shared object. Raises ``OSError`` if it is none."""

    def __init__(self, binary: Path, data: bytes | None = None) -> None:
        self._fd = _sealed_copy(binary.parent.name[:32], binary.read_bytes() if data is None else data)
        try:
            # The descriptor stays open while the code is loaded: the loader knows libraries by name, and the number is
            # part of the name.
            self.handle = ctypes.CDLL(f"/proc/self/fd/{self._fd}", mode=ctypes.RTLD_LOCAL, use_errno=True)
        except OSError:
            os.close(self._fd)
            # Where code may not run from memory (vm.memfd_noexec), the file itself has to do.
            self._fd = -1
            self.handle = ctypes.CDLL(str(binary), mode=ctypes.RTLD_LOCAL, use_errno=True)

    def unload(self) -> None:
        """Nothing of it may be running or be called afterwards."""
        _ctypes.dlclose(self.handle._handle)
        if self._fd >= 0:
            os.close(self._fd)


def resident_library(binary: Path) -> Library:
    """A library that is never unloaded, because it leaves handlers with the C library; one for equal contents."""
    data = binary.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    with _resident_lock:
        library = _resident.get(digest)
        if library is None:
            library = _resident[digest] = Library(binary, data)
        return library


def _sealed_copy(name: str, data: bytes) -> int:
    fd = os.memfd_create(f"tw-kernel-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
