"""A path at which a server listens: taken, given by whoever started the server, left to a successor, or given back."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from tilewright_kit.types.errors import AccessError
from tilewright_server.protocol.inherited import LOCK, SOCKET, GivenSocket, Inherited
from tilewright_server.protocol.unix_paths import (
    OWNER_ONLY,
    SocketAccess,
    lock,
    lock_path,
    private_directory,
    remove_stale,
)

__all__ = ["UnixPlace"]


class UnixPlace:
    """Holds the lock of its path from the beginning, unless that is a service manager's."""

    def __init__(
        self, path: Path, kind: int, access: SocketAccess = OWNER_ONLY, inherited: Inherited | None = None
    ) -> None:
        """``kind`` is ``SOCK_STREAM`` or ``SOCK_SEQPACKET``.

        Raises ``UnavailableError`` if another server has the path, ``AccessError`` if others could meddle with it.
        """
        self.path = path
        self.given: socket.socket | None = None
        self._access = access
        self._inode: tuple[int, int] | None = None
        self._lock_fd = -1
        private_directory(path.parent, access)
        found = inherited.unix(path, kind) if inherited is not None else None
        if found is not None:
            self._adopt(found)
            return
        self._lock_fd = lock(path)
        try:
            remove_stale(path)
        except BaseException:
            self.close()
            raise

    @property
    def is_kept(self) -> bool:
        """The path stays a service manager's."""
        return self.given is not None and self._lock_fd < 0

    @property
    def is_own(self) -> bool:
        """The path is this server's, and goes with it."""
        return self._lock_fd >= 0

    def _adopt(self, found: GivenSocket) -> None:
        self.given, self._lock_fd = found.socket, found.lock
        status = self.path.lstat()
        if self._lock_fd >= 0:
            self._inode = (status.st_dev, status.st_ino)
        wider = status.st_mode & 0o777 & ~self._access.mode
        if wider & 0o066:
            self.close()
            raise AccessError(
                f"the socket that the service manager made has mode {status.st_mode & 0o777:o}: others reach it",
                field="socket_mode",
                value=f"{self._access.mode:o}",
                rule="socket_mode",
                fix="write SocketMode=0600 into the .socket unit, or give the mode that is meant as socket_mode",
            )

    @contextlib.contextmanager
    def binding(self) -> Iterator[None]:
        """Bind the path within: the socket never exists with a wider mode than it is to have."""
        old = os.umask(0o177)
        try:
            yield
        finally:
            os.umask(old)
        self._access.give(self.path)
        status = self.path.lstat()
        self._inode = (status.st_dev, status.st_ino)

    def shared(self, listening: socket.socket) -> list[tuple[int, str]]:
        """Descriptors for a successor, with their names."""
        found = [(listening.fileno(), SOCKET)]
        return [*found, (self._lock_fd, LOCK)] if self._lock_fd >= 0 else found

    def leave(self) -> None:
        """The path is the successor's now, and stays. Idempotent."""
        self._inode = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def close(self) -> None:
        """Remove the socket, unless it has become another's. Idempotent."""
        if self._lock_fd < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            status = self.path.lstat()
            if self._inode == (status.st_dev, status.st_ino):
                self.path.unlink()
        # Removed while it is held: whoever waits for it sees that the file it locked is gone, and tries again.
        with contextlib.suppress(FileNotFoundError):
            lock_path(self.path).unlink()
        self.leave()
