"""Charges for objects of clients: pages of results are made by the server, which pays for them until they are gone.

What is registered counts as a whole. After that, pages that the server has made go on to count for whom it made them,
for as long as the object has them: until it is shorter, or has no name any more and nobody else has it open.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tilewright_kit.types.errors import ResourceExhaustedError
from tilewright_server.session.quotas import Account, Resource

__all__ = ["Charge", "Debts"]

KIND = Resource.KSERVE_REGION_BYTES


class _Debt:
    """Pages of one object that is not registered any more."""

    __slots__ = ("account", "fd", "inode", "nbytes")

    def __init__(self, account: Account, fd: int, inode: tuple[int, int], nbytes: int) -> None:
        self.account = account
        self.fd = fd
        self.inode = inode
        self.nbytes = nbytes


class Debts:
    """Objects with pages that the server has made. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], _Debt] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, account: Account, fd: int, nbytes: int) -> None:
        """Keep ``nbytes`` that ``account`` is charged with, for the object of ``fd``, which stays the caller's."""
        status = os.fstat(fd)
        debt = _Debt(account, os.dup(fd), (status.st_dev, status.st_ino), nbytes)
        with self._lock:
            known = self._open.get(debt.inode)
            self._open[debt.inode] = debt
        if known is not None:  # of the same pages
            _settle(known, 0)

    @contextmanager
    def taken_over(self, fd: int, inode: tuple[int, int]) -> Iterator[int]:
        """Bytes that are owed for an object which is registered again, here by ``fd``: a part of the new charge, or, if
        it is not registered, owed as before."""
        with self._lock:
            debt = self._open.pop(inode, None)
        owed = 0 if debt is None else debt.nbytes
        if debt is not None:
            _settle(debt, 0)
        try:
            yield owed
        except BaseException:
            if debt is not None and inode not in self._open:
                debt.account.give(KIND, -owed)  # whatever others have taken meanwhile
                self.add(debt.account, fd, owed)
            raise

    def look(self) -> None:
        """End what is owed for pages that are gone."""
        with self._lock:
            debts = list(self._open.values())
            for debt in debts:
                left = _left(debt.fd)
                if left < debt.nbytes:
                    if not left:
                        del self._open[debt.inode]
                    _settle(debt, left)

    def close(self) -> None:
        """Forget all of it: the server ends."""
        with self._lock:
            debts = list(self._open.values())
            self._open.clear()
        for debt in debts:
            _settle(debt, 0)


class Charge:
    """Bytes of an object that count for its owner, whether their pages are there or not. Ends once. Thread-safe."""

    def __init__(self, account: Account, nbytes: int, debts: Debts) -> None:
        """Raises ``ResourceExhaustedError``."""
        try:
            account.take(KIND, nbytes)
        except ResourceExhaustedError:
            debts.look()  # something may have gone just now
            account.take(KIND, nbytes)
        self._account = account
        self._debts = debts
        self._left = [nbytes]

    def end(self, fd: int = -1, filled: int = 0) -> None:
        """End it, but for ``filled`` bytes of pages that were made in the object that ``fd`` names."""
        nbytes = self._left.pop() if self._left else 0
        owed = min(filled, nbytes, os.fstat(fd).st_blocks * 512) if filled else 0
        self._account.give(KIND, nbytes - owed)
        if owed:
            self._debts.add(self._account, fd, owed)


def _settle(debt: _Debt, left: int) -> None:
    """Owe no more than ``left``."""
    debt.account.give(KIND, debt.nbytes - left)
    debt.nbytes = left
    if not left:
        os.close(debt.fd)


def _left(fd: int) -> int:
    """Bytes of an object that is open here, as far as they do not go when it is closed."""
    status = os.fstat(fd)
    if not status.st_nlink and _is_ours_alone(fd):
        return 0
    return status.st_blocks * 512


def _is_ours_alone(fd: int) -> bool:
    """True if no other process has an object open or mapped: only then the system gives a lease to write. It tells of
    others that open it meanwhile by a signal, which is one that does nothing."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return False
    except OSError:  # the system lends nothing of other users' objects: then the name decides
        return True
    return True
