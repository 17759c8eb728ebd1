"""Connections that are open to this process: the leases of what clients of the Open Inference Protocol register.

gRPC shows neither the end of a connection nor the process behind it. The kernel does: by the descriptors that this
process holds, and by its table of TCP sockets.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

__all__ = ["Connection", "maps_object", "open_connections", "peer_port", "uid_of_port"]

ESTABLISHED = "01"
"""State of a TCP socket in the kernel's table."""
TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))


@dataclass(frozen=True, slots=True)
class Connection:
    """The server's end of an accepted connection."""

    inode: int
    """Number of the socket, which does not come again."""
    port: int
    """Port of the client over TCP; 0 over a Unix socket."""
    pid: int
    """Process that connected over a Unix socket, as far as this one sees it; 0 if it does not."""


def open_connections(paths: Collection[str], ports: Collection[int]) -> list[Connection]:
    """Connections that were accepted at the Unix sockets and the TCP ports that are named."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a descriptor may be closed meanwhile
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - not a path
            if not target.startswith("socket:["):
                continue
            end = socket.socket(fileno=int(name))
            try:
                connection = _accepted(end, int(target[8:-1]), paths, ports)
            finally:
                end.detach()
            if connection is not None:
                found.append(connection)
    return found


def _accepted(end: socket.socket, inode: int, paths: Collection[str], ports: Collection[int]) -> Connection | None:
    """Raises ``OSError`` for a socket that has no other end."""
    own = end.getsockname()
    if end.family == socket.AF_UNIX:
        if own not in paths:
            return None
        end.getpeername()
        pid, _, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return Connection(inode, 0, pid)
    if end.family in (socket.AF_INET, socket.AF_INET6) and own[1] in ports:
        return Connection(inode, int(end.getpeername()[1]), 0)
    return None


def peer_port(peer: str) -> int:
    """Port of a peer as gRPC writes it (``ipv4:127.0.0.1:5000``) if it is on this machine; 0 if not."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    loopback = host.startswith("127.") if kind == "ipv4" else host.strip("[]") == "::1"
    return int(port) if kind in ("ipv4", "ipv6") and loopback and port.isdigit() else 0


def uid_of_port(port: int, ports: Collection[int]) -> int | None:
    """User that owns the client's end of a TCP connection within this machine to one of our ``ports``."""
    for table in TABLES:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in table.read_text().splitlines()[1:]:
                row = line.split()
                own, other = (int(row[index].rpartition(":")[2], 16) for index in (1, 2))
                if own == port and other in ports and row[3] == ESTABLISHED:
                    return int(row[7])
    return None


def maps_object(pid: int, name: str) -> bool:
    """Tell if a process has a POSIX shared-memory object mapped, as far as this one may look."""
    if pid <= 0:
        return False
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False
    return any(line.endswith(f" /dev/shm/{name}") for line in text.splitlines())
