"""The seam between the artifact cache and the file system: durable writes, locks on open files, and one translation of
``OSError``.

Locks are ``flock`` on an open file or directory. The kernel drops them when the process dies, whoever it was and
however it died, so there is no stale lock to break and no pid to misread in another container.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path
from types import TracebackType

from tilewright_kit.types.errors import InternalError, ResourceExhaustedError, TilewrightError

__all__ = ["Files", "Lock", "io_error", "is_full"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def is_full(error: OSError) -> bool:
    """True if the disk, a quota or a file size limit was the reason."""
    return error.errno in _FULL


def io_error(error: OSError, doing: str) -> TilewrightError:
    """The typed error for a failed file operation. Names no path: that is for the log."""
    if is_full(error):
        return ResourceExhaustedError(
            f"the disk of the kernel cache is full ({doing})",
            rule="cache_full",
            fix="free space, lower the cache's size budget, or put it on another disk",
            retry_after_s=30.0,
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ResourceExhaustedError(
            f"no file descriptor is left ({doing})",
            rule="file_descriptors",
            fix="raise the limit of open files (ulimit -n)",
            retry_after_s=5.0,
        )
    name = errno.errorcode.get(error.errno or 0, "unknown error")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return InternalError(
            f"the kernel cache cannot be written: {name} ({doing})",
            field="cache_dir",
            value=name,
            rule="cache_unwritable",
            fix="let cache_dir be a folder that the server's user can write, or below a volume where the root is "
            "read-only",
        )
    return InternalError(
        f"the kernel cache failed: {name} ({doing})",
        field="cache_dir",
        value=name,
        rule="cache_io",
        fix="look for the reason in the server's log; `tilewright doctor` checks the cache's folder",
    )


class Lock:
    """A held ``flock``; closing it gives it back."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def fd(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Files:
    """Every file operation that can fail in an interesting way.

    Tests replace single methods to make the N-th call fail.
    """

    def make_dir(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def write(self, path: Path, data: bytes) -> None:
        """Create ``path`` with ``data`` and have it on the disk when this returns."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: Path, limit: int) -> bytes:
        """All of a file. Raises ``ValueError`` for anything else, or beyond ``limit`` bytes."""
        # Whoever opens a pipe waits for its other end, unless he says not to.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not a file")
            if status.st_size > limit:
                raise ValueError(f"{status.st_size} bytes, more than {limit}")
            return file.read(limit + 1)

    def sync(self, path: Path) -> None:
        """Have a file or a directory on the disk when this returns."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove_tree(self, path: Path) -> None:
        """Remove what can be removed; what cannot is left for the next clean-up."""
        shutil.rmtree(path, ignore_errors=True)

    def lock_entry(self, path: Path, *, exclusive: bool) -> Lock | None:
        """Lock an existing file or directory; None if it, or a folder before it, is not there, was replaced meanwhile,
        or is locked by others in a conflicting way.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:  # a link, where it is no folder, or before it
                raise
            return None
        lock = Lock(fd)
        if not self._try(fd, exclusive) or not self.still_there(fd, path):
            lock.close()
            return None
        return lock

    def try_lock_file(self, path: Path) -> Lock | None:
        """Create a lock file if need be and lock it exclusively; None if others hold it."""
        fd = _lock_file(path)
        lock = Lock(fd)
        # A holder unlinks the file before it lets go, so a lock won on an unlinked file protects nothing.
        if not self._try(fd, True) or not self.still_there(fd, path):
            lock.close()
            return None
        return lock

    def wait_lock(self, path: Path, *, exclusive: bool) -> Lock:
        """Lock a file that is never unlinked; meant for moments only."""
        fd = _lock_file(path)
        lock = Lock(fd)
        fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        return lock

    @staticmethod
    def _try(fd: int, exclusive: bool) -> bool:
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @staticmethod
    def still_there(fd: int, path: Path) -> bool:
        try:
            there = path.lstat()
        except FileNotFoundError:
            return False
        ours = os.fstat(fd)
        return (there.st_ino, there.st_dev) == (ours.st_ino, ours.st_dev)


def _lock_file(path: Path) -> int:
    """Open a lock file, made if need be. A link in its place is none of ours, and is removed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    path.unlink(missing_ok=True)
    return os.open(path, flags, 0o600)
