"""Opening memory files of other processes, and mapping them without ever trusting their owner.

A client names a memory file by its process, descriptor and a random name that only its maker knows. Whatever is wrong
with such a triple, the answer is the same: otherwise callers could probe the descriptor tables of other processes
through the server.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from tilewright_kit.types.errors import AccessError, InvalidArgumentError, NotFoundError, ResourceExhaustedError
from tilewright_server.memory.guard import Guard
from tilewright_server.memory.populated import missing

__all__ = [
    "MAX_REGION_BYTES",
    "Mapping",
    "OpenedFile",
    "not_there",
    "open_attached",
    "open_memfd",
    "open_object",
    "open_posix",
    "read_into",
    "unlink_posix",
    "view",
    "write_from",
]

MAX_REGION_BYTES = 2**46
"""Half of what a process of 47 bits of address space could map at all."""

SPARE_DESCRIPTORS = 256
"""Descriptors that registered memory never takes: connections and compilers need some."""

NAME = re.compile(r"tilewright-[0-9a-f]{32,64}\Z")
OBJECT_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}\Z")

# <linux/fcntl.h>, <linux/magic.h>; Python's fcntl module has the seals only where libc knew them at build time.
F_GET_SEALS = 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE = 0x1, 0x2, 0x8, 0x10
TMPFS_MAGIC = 0x01021994

PROT_READ, PROT_WRITE = 0x1, 0x2
MAP_SHARED = 0x1
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fstatfs.restype = ctypes.c_int
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


@dataclass(slots=True)
class OpenedFile:
    """An open memory file. The holder of ``fd`` closes it."""

    fd: int
    inode: tuple[int, int]
    bytes: int
    sealed: bool
    """True if the file can never become smaller, whatever its owner does: only then it may be mapped."""
    on_release: Callable[[int, int], None] | None = None
    """Called once when the region over the file is given back, with its descriptor, and with ``filled`` as it is then.
    """
    fills: bool = False
    """Pages that are missing are made, and charged to this process, where outputs are written."""
    filled: int = 0
    """Bytes of pages that were made so."""


class Mapping:
    """Shared, writable pages of a memory file, of which none is made here. Keeps no descriptor."""

    __slots__ = ("_guard", "address", "nbytes")

    def __init__(self, fd: int, nbytes: int, offset: int = 0) -> None:
        """``offset`` is where a page of the file begins."""
        self.nbytes = nbytes
        self.address = 0
        address = _libc.mmap(None, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset)
        if address is None or address == MAP_FAILED:
            code = ctypes.get_errno()
            if code in (errno.EPERM, errno.EACCES):
                raise _not_writable()
            raise ResourceExhaustedError(
                "the server cannot map more memory",
                field="bytes",
                value=nbytes,
                rule="region_map",
                fix="unregister regions that are no longer used",
            )
        self.address = address
        self._guard = Guard(address, nbytes)

    @property
    def is_guarded(self) -> bool:
        return self._guard.is_on

    @property
    def is_spoilt(self) -> bool:
        """True if a page was missing when it was used: then something else may stand in for it."""
        return self._guard.is_spoilt

    def close(self) -> None:
        """Unmap. Idempotent."""
        if self.address:
            self._guard.end()
            _libc.munmap(self.address, self.nbytes)
            self.address = 0


def view(address: int, nbytes: int) -> memoryview:
    """Writable bytes at an address that the caller keeps alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def open_memfd(pid: int, fd: int, name: str, nbytes: int) -> OpenedFile:
    """Open descriptor ``fd`` of process ``pid`` if it is the memory file ``name`` of at least ``nbytes`` bytes.

    Raises ``InvalidArgumentError`` for a bad name or size, and one and the same ``NotFoundError`` for everything that
    could tell about others.
    """
    _check_name(name)
    _check_bytes(nbytes)
    if pid <= 0 or fd < 0:
        raise not_there()
    wanted = f"/memfd:{name} (deleted)"
    try:
        # Look first: opening a link to something else (a device, a FIFO) could block or have effects.
        link = f"/proc/{pid}/fd/{fd}"
        if os.readlink(link) != wanted:  # noqa: PTH115 - compares text, not paths
            raise not_there()
        opened = os.open(link, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise _not_opened(error) from None
    try:
        # Look again: between the two calls the client could have put another file under the same number.
        now = os.readlink(f"/proc/self/fd/{opened}")  # noqa: PTH115
        if now != wanted or os.fstat(opened).st_nlink != 0 or not _is_tmpfs(opened):
            raise not_there()
        return _checked(opened, nbytes, sealable=True)
    except BaseException as error:
        os.close(opened)
        if isinstance(error, OSError):
            raise _not_opened(error) from None
        raise


def open_attached(fd: int, nbytes: int) -> OpenedFile:
    """A memory file of at least ``nbytes`` bytes by a descriptor that its owner sent; it stays the caller's to close.

    Raises ``InvalidArgumentError`` if it is something else, ``AccessError`` if it cannot be written.
    """
    _check_bytes(nbytes)
    try:
        opened = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    except OSError as error:
        raise _not_opened(error) from None
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 0 or not _is_tmpfs(opened):
            raise _no_memory_file()
        if fcntl.fcntl(opened, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_PATH) != os.O_RDWR:
            raise _not_writable()
        return _checked(opened, nbytes, sealable=True)
    except BaseException as error:
        os.close(opened)
        if isinstance(error, OSError):
            raise _no_memory_file() from None
        raise


def open_posix(name: str, nbytes: int) -> OpenedFile:
    """Open the POSIX shared-memory object ``name`` if it belongs to the server's own user.

    Errors as for ``open_memfd``.
    """
    plain = name[1:] if name.startswith("/") else name
    _check_name(plain)
    _check_bytes(nbytes)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
    try:
        opened = os.open(f"/dev/shm/{plain}", flags)
    except OSError as error:
        raise _not_opened(error) from None
    try:
        if os.fstat(opened).st_uid != os.geteuid() or not _is_tmpfs(opened):
            raise not_there()
        return _checked(opened, nbytes, sealable=False)
    except BaseException as error:
        os.close(opened)
        if isinstance(error, OSError):
            raise _not_opened(error) from None
        raise


def unlink_posix(name: str, inode: tuple[int, int]) -> None:
    """Take the name of an object away that ``open_posix`` opened, if it is still that object's."""
    path = f"/dev/shm/{name[1:] if name.startswith('/') else name}"
    with suppress(OSError):  # its owner was faster
        status = os.lstat(path)
        if (status.st_dev, status.st_ino) == inode:
            os.unlink(path)  # noqa: PTH108


def open_object(name: str, nbytes: int, uid: int, *, fills: bool = True) -> OpenedFile:
    """Open the POSIX shared-memory object ``name``, under any name, if it belongs to the user ``uid``.

    Clients that name objects so do not touch the pages of outputs: with ``fills`` they are made as outputs are written.
    Errors as for ``open_memfd``.
    """
    if not OBJECT_NAME.match(name) or name in (".", ".."):
        raise InvalidArgumentError(
            "the key is not the name of a shared-memory object",
            field="key",
            value=name[:256],
            rule="region_key",
            fix="use the name that was given to shm_open: a slash, and up to 255 letters, digits, dots and dashes",
        )
    _check_bytes(nbytes)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
    try:
        opened = os.open(f"/dev/shm/{name}", flags)
    except OSError as error:
        raise _not_opened(error) from None
    try:
        status = os.fstat(opened)
        writable = status.st_mode & (stat.S_IRUSR | stat.S_IWUSR) == stat.S_IRUSR | stat.S_IWUSR
        if status.st_uid != uid or not writable or status.st_nlink != 1 or not _is_tmpfs(opened):
            raise not_there()
        return replace(_checked(opened, nbytes, sealable=False), fills=fills)
    except BaseException as error:
        os.close(opened)
        if isinstance(error, OSError):
            raise _not_opened(error) from None
        raise


def read_into(fd: int, offset: int, target: memoryview) -> None:
    """Fill ``target`` from a file that may shrink at any time; ``InvalidArgumentError`` if it did."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0:
            raise _shrunk()
        done += count


def write_from(fd: int, offset: int, source: memoryview, *, fills: bool) -> None:
    """Write ``source`` to a file that may shrink. ``InvalidArgumentError`` if it did, instead of growing it again, and,
    unless the writer ``fills`` holes, if there is one now."""
    if os.fstat(fd).st_size < offset + len(source):
        raise _shrunk()
    if not fills and _write_present(fd, offset, source):
        return
    done = 0
    try:
        while done < len(source):
            done += os.pwritev(fd, [source[done:]], offset + done)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise _shrunk() from None
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise ResourceExhaustedError(
                "shared memory is full",
                field="region",
                rule="region_space",
                fix="free shared memory, or give the machine more of it",
            ) from None
        raise


def _write_present(fd: int, offset: int, source: memoryview) -> bool:
    """Write into pages that are there, by a mapping of its own; false where that cannot be guarded. Raises
    ``InvalidArgumentError``."""
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    end = offset + len(source)
    mapping = Mapping(fd, end - start, start)
    try:
        if not mapping.is_guarded:
            return False
        view(mapping.address + offset - start, len(source))[:] = source
        if mapping.is_spoilt:
            raise _shrunk() if os.fstat(fd).st_size < end else missing(offset)
    finally:
        mapping.close()
    return True


def _checked(fd: int, nbytes: int, *, sealable: bool) -> OpenedFile:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise not_there()
    if status.st_size < nbytes:
        raise InvalidArgumentError(
            "the memory file is smaller than the region",
            field="bytes",
            value=nbytes,
            rule="region_size",
            fix="size the file with ftruncate before it is registered, or register fewer bytes",
        )
    seals = fcntl.fcntl(fd, F_GET_SEALS) if sealable else 0
    if seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE):
        raise _not_writable()
    wanted = F_SEAL_SEAL | F_SEAL_SHRINK
    sealed = seals & wanted == wanted
    if not sealed and fd > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS:
        # It would stay open. Descriptors are given out from the lowest, so this one tells how many there are.
        raise ResourceExhaustedError(
            "the server has no descriptor to spare for a memory file that is not sealed",
            field="source",
            rule="region_descriptors",
            fix="seal memory files (F_SEAL_SHRINK and F_SEAL_SEAL), or unregister some",
        )
    return OpenedFile(fd, (status.st_dev, status.st_ino), nbytes, sealed)


def _is_tmpfs(fd: int) -> bool:
    """Ordinary shared memory.

    Huge-page files are refused: a page that is missing at first touch would kill the server.
    """
    buffer = ctypes.create_string_buffer(256)
    if _libc.fstatfs(fd, buffer) != 0:
        return False
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF == TMPFS_MAGIC


def _check_name(name: str) -> None:
    if not NAME.match(name):
        raise InvalidArgumentError(
            "the name of a memory file must be `tilewright-` and 32 to 64 hexadecimal digits",
            field="name",
            rule="region_name",
            fix="make the name of at least 128 random bits",
        )


def _check_bytes(nbytes: int) -> None:
    if not 0 < nbytes <= MAX_REGION_BYTES:
        raise InvalidArgumentError(
            "a region has at least one byte and at most 2**46",
            field="bytes",
            value=nbytes,
            rule="region_size",
            fix="register the part of the file that tensors lie in",
        )


def not_there() -> NotFoundError:
    """The one answer to everything that could tell a caller about other processes or sessions."""
    return NotFoundError(
        "no memory file of that name is there for this server to open",
        field="source",
        rule="region_source",
        fix="register from the process that made the file, as the server's user and in the server's process namespace",
    )


def _no_memory_file() -> InvalidArgumentError:
    return InvalidArgumentError(
        "the descriptor is not of a memory file",
        field="attached",
        rule="region_source",
        fix="send a descriptor that memfd_create gave, of ordinary pages",
    )


def _not_opened(error: OSError) -> NotFoundError | ResourceExhaustedError:
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return ResourceExhaustedError(
            "the server has no descriptor to spare",
            field="source",
            rule="file_descriptors",
            fix="unregister regions, or raise the server's limit of open files (ulimit -n)",
            retry_after_s=1.0,
        )
    return not_there()


def _not_writable() -> AccessError:
    return AccessError(
        "the memory file cannot be written",
        field="memfd",
        rule="region_writable",
        fix="make it without the seals WRITE and FUTURE_WRITE, and open it for reading and writing",
    )


def _shrunk() -> InvalidArgumentError:
    return InvalidArgumentError(
        "the region's file has shrunk after registration",
        field="region",
        rule="region_shrunk",
        fix="seal memory files (F_SEAL_SHRINK and F_SEAL_SEAL) before they are registered, and never make them smaller",
    )
