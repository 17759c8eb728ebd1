"""Namespaces of the process at the other end of a connection."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

__all__ = ["shares_names"]

_CREDENTIALS = struct.Struct("3i")
_SHARED_MEMORY = "dev/shm"


def shares_names(connection: socket.socket) -> bool:
    """True if the peer sees the same process numbers and the same ``/dev/shm`` as this process: only then does a name
    made of both mean the same thing there. False where nobody can tell."""
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = int(_CREDENTIALS.unpack(data)[0])
        if pid <= 0:
            return False
        if Path(f"/proc/{pid}/ns/pid").readlink() != Path("/proc/self/ns/pid").readlink():
            return False
        theirs, ours = Path(f"/proc/{pid}/root/{_SHARED_MEMORY}").stat(), Path(f"/{_SHARED_MEMORY}").stat()
    except OSError:
        return False
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
