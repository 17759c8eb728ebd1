"""Identity of clients' processes, as far as the kernel proves it."""

from __future__ import annotations

import os
from pathlib import Path

from tilewright_server.engine.client import Client
from tilewright_server.memory.shm import NAME

__all__ = ["is_known", "process_client", "proved_process"]

PROC = Path("/proc")
UNKNOWN = "connection:"
"""Prefix of processes that only their connection is known of."""


def is_known(client: Client) -> bool:
    """The kernel named its process, not only its connection."""
    return not client.process.startswith(UNKNOWN)


def process_client(pid: int, uid: int | None = None) -> Client | None:
    """The client that a process is; None if it has gone, or lies outside of what this server sees."""
    try:
        uid = (PROC / str(pid)).stat().st_uid if uid is None else uid
        # The name of the program, in brackets, may hold anything, brackets too.
        started = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
        namespace = (PROC / str(pid) / "ns" / "pid").stat().st_ino
        own = (PROC / "self" / "ns" / "pid").stat().st_ino
    except (OSError, IndexError, UnicodeDecodeError):
        return None
    user = f"uid:{uid}" if namespace == own else f"uid:{uid}@{namespace}"
    return Client(user, f"pid:{pid}@{started}", b"")


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
