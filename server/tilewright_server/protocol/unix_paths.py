"""Paths of Unix sockets: private folders, locks that die with their server, and what dead servers left behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import logging
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from tilewright_kit.types.errors import AccessError, InvalidArgumentError, UnavailableError

__all__ = [
    "MAX_UNIX_PATH",
    "OWNER_ONLY",
    "SocketAccess",
    "lock",
    "lock_path",
    "own_place",
    "private_directory",
    "remove_stale",
    "socket_access",
]

log = logging.getLogger("tilewright.listen")

MAX_UNIX_PATH = 107
"""Bytes of a socket's path that Linux takes."""


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """Mode of sockets, and their group; -1 leaves the group as it is."""

    mode: int = 0o600
    group: int = -1

    def give(self, path: Path) -> None:
        """Give a socket that was made for its owner alone its mode and group. Raises ``AccessError``."""
        if self == OWNER_ONLY:
            return
        try:
            if self.group >= 0:
                os.chown(path, -1, self.group)
            path.chmod(self.mode)
        except PermissionError as error:
            raise AccessError(
                f"the socket cannot be given to the group: {error.strerror}",
                field="socket_group",
                value=self.group,
                rule="socket_group",
                fix="name a group that the server's user is in",
            ) from error

    def open_folder(self, folder: Path) -> None:
        """Let those for whom the socket is through a folder that the server has made."""
        if self.group >= 0:
            os.chown(folder, -1, self.group)
        folder.chmod(0o700 | (0o010 if self.mode & 0o060 else 0) | (0o001 if self.mode & 0o006 else 0))


OWNER_ONLY = SocketAccess()


def socket_access(mode: str, group: str) -> SocketAccess:
    """Access by the settings ``socket_mode`` and ``socket_group``. Raises ``InvalidArgumentError``."""
    number = -1
    if group:
        try:
            number = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
        except KeyError:
            raise InvalidArgumentError(
                "there is no such group",
                field="socket_group",
                value=group,
                rule="socket_group",
                fix="name a group of /etc/group, or its number",
            ) from None
    return SocketAccess(int(mode, 8), number)


def own_place(path: Path, tell: bool = True) -> Path:
    """``path``, or one in a folder of ours below its own where that is open to others: a volume of a pod, say.

    Only below folders of root or of the server's user: whoever else owns one could replace what is in it.
    """
    folder = path.parent
    try:
        status = folder.stat()
    except OSError:
        return path
    open_to_others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if not open_to_others or status.st_uid not in (os.geteuid(), 0):
        return path
    place = folder / f"tilewright-{os.geteuid()}" / path.name
    if tell:
        log.warning("%s is open to others (mode %o): listening on %s instead", folder, status.st_mode & 0o7777, place)
    return place


def private_directory(folder: Path, access: SocketAccess = OWNER_ONLY) -> None:
    """Make the folder for us alone, or for those of ``access``; refuse one in which others could replace the socket."""
    try:
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            access.open_folder(folder)
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
