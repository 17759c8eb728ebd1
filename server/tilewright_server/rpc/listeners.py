"""Addresses to listen on: who may reach them, and what becomes of a socket that a dead server left behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

import grpc

from tilewright_kit.errors import AccessError, InvalidArgumentError, UnavailableError

__all__ = ["Listener", "TcpAddress", "UnixAddress", "parse_address"]

MAX_UNIX_PATH = 107
"""Bytes of a socket's path that Linux takes."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, insecure: bool) -> UnixAddress | TcpAddress:
    """Check one value of ``listen``.

    Raises ``InvalidArgumentError``, or ``AccessError`` for TCP that is not allowed.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path or "\0" in path or len(os.fsencode(str(Path(path).absolute()))) > MAX_UNIX_PATH:
            raise _bad_address(text, f"the path of a socket has 1 to {MAX_UNIX_PATH} bytes")
        return UnixAddress(Path(path).absolute())
    host, _, port = text.removeprefix("tcp:").rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise _bad_address(text, "expected unix:PATH or HOST:PORT")
    if not _is_loopback(host):
        raise AccessError(
            "this server listens on loopback addresses only: TCP carries no proof of who calls",
            field="listen",
            value=text,
            rule="listen_loopback",
            fix="listen on 127.0.0.1 or [::1], or on a Unix socket that is shared with the client",
        )
    if not insecure:
        raise AccessError(
            "TCP listeners have no access control: every user of this machine could run kernels and fill its memory",
            field="listen",
            value=text,
            rule="listen_insecure",
            fix="listen on unix:PATH, or allow TCP with --insecure if all users of this machine are trusted",
        )
    return TcpAddress(host, int(port))


class Listener:
    """One bound address. ``address`` has the port that the system chose, if it was asked to."""

    def __init__(self, address: UnixAddress | TcpAddress) -> None:
        self.address = address
        self._lock_fd = -1
        self._inode: tuple[int, int] | None = None

    def bind(self, server: grpc.Server) -> None:
        """Bind ``server`` to the address.

        Raises ``UnavailableError`` if another server has it, ``AccessError`` if others could meddle with it.
        """
        if isinstance(self.address, TcpAddress):
            port = _add_port(server, str(self.address), str(self.address))
            self.address = TcpAddress(self.address.host, port)
            return
        path = self.address.path
        _private_directory(path.parent)
        self._lock_fd = _lock(path)
        try:
            _remove_stale(path)
            old = os.umask(0o177)  # the socket must never exist with a wider mode
            try:
                _add_port(server, f"unix:{path}", str(self.address))
            finally:
                os.umask(old)
            status = path.lstat()
            self._inode = (status.st_dev, status.st_ino)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the socket, unless it has become another's. Idempotent."""
        if isinstance(self.address, TcpAddress) or self._lock_fd < 0:
            return
        path = self.address.path
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if self._inode == (status.st_dev, status.st_ino):
                path.unlink()
        # Removed while it is held: whoever waits for it sees that the file it locked is gone, and tries again.
        with contextlib.suppress(FileNotFoundError):
            _lock_path(path).unlink()
        os.close(self._lock_fd)
        self._lock_fd = -1


def _add_port(server: grpc.Server, address: str, shown: str) -> int:
    try:
        port = int(server.add_insecure_port(address))
    except RuntimeError:
        port = 0
    if not port:
        raise UnavailableError(
            f"cannot listen on {shown}",
            field="listen",
            value=shown,
            rule="listen",
            fix="choose an address that is free",
        )
    return port


def _private_directory(folder: Path) -> None:
    """Make the folder for us alone; refuse one in which others could replace the socket."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise UnavailableError(
            f"cannot make the socket's folder: {error.strerror}",
            field="listen",
            value=str(folder),
            rule="socket_folder",
            fix="listen in a folder that the server's user can write",
        ) from error
    open_to_others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in (os.geteuid(), 0) or open_to_others or (folder.is_symlink() and _symlink_of_others(folder)):
        raise AccessError(
            "the socket's folder can be changed by other users, who could put their own server there",
            field="listen",
            value=str(folder),
            rule="socket_folder",
            fix="use a folder that belongs to the server's user, with mode 0700",
        )


def _symlink_of_others(path: Path) -> bool:
    return path.lstat().st_uid not in (os.geteuid(), 0)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _lock(path: Path) -> int:
    """Hold the lock of a socket's path for as long as the server lives: it dies with the process, however that ends."""
    name = _lock_path(path)
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(fd)
            with contextlib.suppress(FileNotFoundError):
                current = name.stat()
                if (current.st_dev, current.st_ino) == (held.st_dev, held.st_ino):
                    return fd
        except BlockingIOError:
            os.close(fd)
            raise _in_use(path) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UnavailableError(
            "there is a file, but no socket, at the address",
            field="listen",
            value=f"unix:{path}",
            rule="listen",
            fix="remove the file, or listen elsewhere",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(1.0)
        code = probe.connect_ex(str(path))
    if code not in (errno.ECONNREFUSED, errno.ENOENT):
        raise _in_use(path)
    path.unlink(missing_ok=True)


def _in_use(path: Path) -> UnavailableError:
    return UnavailableError(
        "another server listens there",
        field="listen",
        value=f"unix:{path}",
        rule="listen_in_use",
        fix="use that server, stop it, or listen on another path",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bad_address(text: str, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"not an address to listen on: {reason}", field="listen", value=text, rule="listen", fix="use unix:PATH"
    )
