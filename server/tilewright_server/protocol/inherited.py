"""Listening sockets that this process was started with: of a service manager, or of the server that it succeeds."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tilewright_kit.types.errors import UnsupportedError

__all__ = ["KEPT", "LOCK", "READY", "SOCKET", "GivenSocket", "Inherited", "chosen_port"]

log = logging.getLogger("tilewright.listen")

SOCKET = "tilewright-socket"
"""Name of a listening socket that a server leaves to its successor."""
KEPT = "tilewright-kept"
"""Name of one over TCP that a server leaves to its successor, and a service manager keeps for the next."""
LOCK = "tilewright-lock"
"""Name of the lock of such a socket's path, which goes over with it."""
READY = "tilewright-ready"
"""Name of the pipe by which the successor says that it serves."""


@dataclass(frozen=True, slots=True)
class GivenSocket:
    """A listening socket."""

    socket: socket.socket
    lock: int = -1
    """Descriptor of the lock of its path, with which the path is ours, too; -1: it stays the giver's."""
    kept: bool = False
    """True over TCP: a service manager keeps it, for the next server."""


class Inherited:
    """Descriptors by what they are. Each is taken once; ``close`` closes those that nobody took."""

    def __init__(self, descriptors: Iterable[tuple[int, str]] = ()) -> None:
        """``descriptors`` come with their names, as in ``LISTEN_FDNAMES``."""
        self._sockets: list[tuple[object, int, GivenSocket]] = []
        self._locks: dict[str, int] = {}
        self._ready = -1
        for number, name in descriptors:
            os.set_inheritable(number, False)
            if name == LOCK:
                with contextlib.suppress(OSError):
                    self._locks[str(Path(f"/proc/self/fd/{number}").readlink())] = number
            elif name == READY:
                self._ready = number
            else:
                self._add(number, kept=name != SOCKET)

    def _add(self, number: int, *, kept: bool) -> None:
        try:
            found = socket.socket(fileno=number)
            listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:
            listens = 0
        if not listens:
            log.warning("descriptor %d was given to this server, and is no socket that listens", number)
            return
        name = found.getsockname()
        place = _place(Path(name)) if found.family == socket.AF_UNIX and isinstance(name, str) else name
        self._sockets.append((place, found.type, GivenSocket(found, kept=kept)))

    def unix(self, path: Path, kind: int) -> GivenSocket | None:
        """The socket of a ``kind`` (``SOCK_STREAM``, ``SOCK_SEQPACKET``) that listens at ``path``, if one was given."""
        found = self._take(_place(path), kind)
        if found is None:
            return None
        return GivenSocket(found.socket, self._locks.pop(f"{path}.lock", -1))

    def tcp(self, host: str, port: int) -> GivenSocket | None:
        """The socket that listens at a TCP address, if one was given."""
        taken = (self._take(name, socket.SOCK_STREAM) for name in self._tcp_names(host, port))
        return next(filter(None, taken), None)

    @staticmethod
    def _tcp_names(host: str, port: int) -> list[object]:
        with contextlib.suppress(OSError):
            return [item[4] for item in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        return []

    def _take(self, place: object, kind: int) -> GivenSocket | None:
        for item in self._sockets:
            if item[:2] == (place, kind):
                self._sockets.remove(item)
                item[2].socket.setblocking(False)  # two servers may wait for the same connection
                return item[2]
        return None

    def say_ready(self) -> None:
        """Tell the server before this one that it may end, and close what nobody took."""
        if self._ready >= 0:
            with contextlib.suppress(OSError):
                os.write(self._ready, b"1")
        self.close()

    def close(self) -> None:
        """Idempotent."""
        for _, _, given in self._sockets:
            name = given.socket.getsockname()
            log.warning("a socket was given to this server that it does not listen on: %s", name)
            given.socket.close()
        self._sockets.clear()
        for number in (*self._locks.values(), self._ready):
            if number >= 0:
                os.close(number)
        self._locks.clear()
        self._ready = -1


def _place(path: Path) -> tuple[str, str]:
    """A path by its real folder: ``/var/run`` and ``/run`` are one."""
    return os.path.realpath(path.parent), path.name


def chosen_port(setting: str, value: str) -> UnsupportedError:
    """The refusal of a successor where the system has chosen a port: the settings do not say it."""
    return UnsupportedError(
        "the system has chosen the port: the successor would listen at another",
        field=setting,
        value=value,
        rule="succession",
        fix="name a port instead of 0",
    )
