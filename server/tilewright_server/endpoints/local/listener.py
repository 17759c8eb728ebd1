"""The address of the local socket, and who may connect to it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Collection
from pathlib import Path

from tilewright_kit.types.errors import AccessError, InvalidArgumentError, UnavailableError
from tilewright_server.clients.client import Client
from tilewright_server.protocol.inherited import Inherited
from tilewright_server.protocol.unix_paths import MAX_UNIX_PATH, OWNER_ONLY, SocketAccess
from tilewright_server.protocol.unix_place import UnixPlace
from tilewright_server.session.processes import kernel_client

__all__ = ["LocalListener", "check_peer", "local_path", "peer_client", "peer_uid"]

SUFFIX = ".local"
BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")


def local_path(grpc_path: Path) -> Path:
    """Where the local socket lies that belongs to a Unix socket of gRPC. ``InvalidArgumentError`` if that is too long
    for Linux."""
    path = grpc_path.with_name(grpc_path.name + SUFFIX)
    if len(os.fsencode(str(path))) > MAX_UNIX_PATH:
        raise InvalidArgumentError(
            f"the path of the local socket has more than {MAX_UNIX_PATH} bytes",
            field="listen",
            value=str(path),
            rule="listen",
            fix="listen on a shorter path, or switch the local socket off",
        )
    return path


class LocalListener:
    """A bound, listening SOCK_SEQPACKET socket; ``check_peer`` says who may use it."""

    def __init__(self, path: Path, access: SocketAccess = OWNER_ONLY, inherited: Inherited | None = None) -> None:
        """Bind, or take over a socket of ``inherited`` that listens there.

        Raises ``UnavailableError`` if another server has it, ``AccessError`` if others could meddle."""
        self.path = path
        self._place = UnixPlace(path, socket.SOCK_SEQPACKET, access, inherited)
        self._woken, self._wake = socket.socketpair()
        self._accepting = False
        given = self._place.given
        self.socket = given or socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.socket.setblocking(False)
        try:
            if given is None:
                self._bind()
        except BaseException:
            self.close()
            raise

    def _bind(self) -> None:
        try:
            with self._place.binding():
                self.socket.bind(str(self.path))
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on the local socket: {error.strerror}",
                field="listen",
                value=str(self.path),
                rule="listen",
                fix="choose a path that is free, or switch the local socket off",
            ) from error
        self.socket.listen(BACKLOG)

    def accept(self) -> socket.socket | None:
        """The next connection; None if ``leave`` or ``close`` was called. Raises ``OSError``."""
        self._accepting = True
        waiting = select.poll()
        for number in (self.socket.fileno(), self._woken.fileno()):
            if number < 0:
                return None
            waiting.register(number, select.POLLIN)
        while True:
            found = waiting.poll()
            if any(number == self._woken.fileno() for number, _ in found):
                return None
            with contextlib.suppress(BlockingIOError):  # a successor has taken it
                return self.socket.accept()[0]

    @property
    def is_kept(self) -> bool:
        """The socket is a service manager's, which keeps it for the next server."""
        return self._place.is_kept

    def shared(self) -> list[tuple[int, str]]:
        """Descriptors for a successor, with their names."""
        return self._place.shared(self.socket)

    def leave(self) -> None:
        """Accept nobody any more: the path is a successor's. Idempotent."""
        self._wake.close()
        self._place.leave()

    def close(self) -> None:
        """Remove the socket, unless it has become another's. Whoever waits in ``accept`` hears of it. Idempotent."""
        self._wake.close()
        if self._place.is_own:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # who comes now is refused at once
        self._place.close()
        if not self._accepting:
            self._release()

    def end(self) -> None:
        """After the last ``accept``. Idempotent."""
        self.close()
        self._release()

    def _release(self) -> None:
        self.socket.close()
        self._woken.close()


def peer_client(connection: socket.socket) -> Client:
    """The process at the other end, as the kernel knows it."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return kernel_client(pid, uid)


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end, as the kernel knows it."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


def check_peer(connection: socket.socket, allowed: Collection[int] = ()) -> None:
    """``AccessError`` unless the server's own user, root, or one of the ``allowed`` is at the other end."""
    if peer_uid(connection) not in (os.geteuid(), 0, *allowed):
        raise AccessError(
            "the local socket is not for processes of this user",
            field="peer",
            rule="peer_user",
            fix="run the client as the server's user, have the operator add yours to allowed_uids, or use gRPC alone",
        )
