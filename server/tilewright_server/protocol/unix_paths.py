"""Paths of Unix sockets: private folders, locks that die with their server, and what dead servers left behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from tilewright_kit.types.errors import AccessError, UnavailableError

__all__ = ["MAX_UNIX_PATH", "lock", "lock_path", "private_directory", "remove_stale"]

MAX_UNIX_PATH = 107
"""Bytes of a socket's path that Linux takes."""


def private_directory(folder: Path) -> None:
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


def lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def lock(path: Path) -> int:
    """Hold the lock of a socket's path for as long as the server lives: it dies with the process, however that ends."""
    name = lock_path(path)
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
            raise in_use(path) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def remove_stale(path: Path) -> None:
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
        raise in_use(path)
    path.unlink(missing_ok=True)


def in_use(path: Path) -> UnavailableError:
    return UnavailableError(
        "another server listens there",
        field="listen",
        value=f"unix:{path}",
        rule="listenin_use",
        fix="use that server, stop it, or listen on another path",
    )
