"""The address of the local socket, and who may connect to it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection
from pathlib import Path

from tilewright_kit.types.errors import AccessError, InvalidArgumentError, UnavailableError
from tilewright_server.engine.client import Client
from tilewright_server.protocol.unix_paths import (
    MAX_UNIX_PATH,
    OWNER_ONLY,
    SocketAccess,
    lock,
    lock_path,
    private_directory,
    remove_stale,
)
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

    def __init__(self, path: Path, access: SocketAccess = OWNER_ONLY) -> None:
        """Bind. Raises ``UnavailableError`` if another server has it, ``AccessError`` if others could meddle."""
        self.path = path
        self._inode: tuple[int, int] | None = None
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._lock_fd = -1
        try:
            private_directory(path.parent, access)
            self._lock_fd = lock(path)
            remove_stale(path)
            self._bind()
            access.give(path)
        except BaseException:
            self.close()
            raise

    def _bind(self) -> None:
        old = os.umask(0o177)  # the socket must never exist with a wider mode
        try:
            self.socket.bind(str(self.path))
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on the local socket: {error.strerror}",
                field="listen",
                value=str(self.path),
                rule="listen",
                fix="choose a path that is free, or switch the local socket off",
            ) from error
        finally:
            os.umask(old)
        status = self.path.lstat()
        self._inode = (status.st_dev, status.st_ino)
        self.socket.listen(BACKLOG)

    def close(self) -> None:
        """Remove the socket, unless it has become another's. Whoever waits in ``accept`` hears of it. Idempotent."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        if self._lock_fd < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            status = self.path.lstat()
            if self._inode == (status.st_dev, status.st_ino):
                self.path.unlink()
        with contextlib.suppress(FileNotFoundError):
            lock_path(self.path).unlink()
        os.close(self._lock_fd)
        self._lock_fd = -1


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
