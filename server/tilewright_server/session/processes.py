"""Identity of clients' processes, as far as the kernel proves it."""

from __future__ import annotations

import os
from pathlib import Path

from tilewright_server.clients.client import Client
from tilewright_server.memory.shm import NAME

__all__ = ["UNKNOWN", "is_known", "kernel_client", "pid_of", "process_client", "proved_process"]

PROC = Path("/proc")
ELSEWHERE = "elsewhere"
"""PID namespaces that are not seen from the server's, in the place of a number."""
KNOWN = "pid:"
"""Prefix of processes that the kernel named."""
UNKNOWN = "connection:"
"""Prefix of processes that only their connection is known of."""


def is_known(client: Client) -> bool:
    """The kernel named its process, not only its connection."""
    return client.process.startswith(KNOWN)


def pid_of(client: Client) -> int | None:
    """Number of a client's process, 0 in a namespace that is not seen; None if only its connection is known."""
    if not is_known(client):
        return None
    return int(client.process.removeprefix("pid:").partition("@")[0])


def process_client(pid: int, uid: int | None = None) -> Client | None:
    """The client that a process is; None if it has gone, or lies outside of what this server sees."""
    try:
        uid = (PROC / str(pid)).stat().st_uid if uid is None else uid
        # The name of the program, in brackets, may hold anything, brackets too.
        started = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[19]
        own = (PROC / "self" / "ns" / "pid").stat().st_ino
        try:
            namespace = (PROC / str(pid) / "ns" / "pid").stat().st_ino
        except PermissionError:  # of another user
            namespace = own
    except (OSError, IndexError):
        return None
    user = f"uid:{uid}" if namespace == own else f"uid:{uid}@{namespace}"
    return Client(user, f"pid:{pid}@{started}", b"")


def kernel_client(pid: int, uid: int) -> Client:
    """The client at the other end of a Unix socket, of which the kernel names process and user (``SO_PEERCRED``).

    A process of a namespace that is not below the server's has no number here: those of a user count as one.
    """
    if pid <= 0:
        return Client(f"uid:{uid}@{ELSEWHERE}", "pid:0", b"")
    return process_client(pid, uid) or Client(f"uid:{uid}", f"pid:{pid}", b"")


def proved_process(proof: str) -> Client | None:
    """The client that ``proof`` shows: ``PID:FD:NAME``, a descriptor of an open memory file whose random name only its
    maker knows. None if it shows nothing.
    """
    pid, _, rest = proof.partition(":")
    descriptor, _, name = rest.partition(":")
    if not (pid.isdigit() and descriptor.isdigit() and len(pid) < 10 and len(descriptor) < 10 and NAME.match(name)):
        return None
    try:
        link = os.readlink(PROC / pid / "fd" / descriptor)  # noqa: PTH115 - compares text, not paths
    except OSError:
        return None
    return process_client(int(pid)) if link == f"/memfd:{name} (deleted)" else None
