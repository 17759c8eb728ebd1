"""Connections of gRPC, counted by process: grpcio shows none, but the process's own table of descriptors does.

Whoever opens more than a process may have loses those that are too many, so descriptors are left for others.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator

from tilewright_server.endpoints.rpc.listeners import TcpAddress, UnixAddress
from tilewright_server.endpoints.rpc.relay import process_share

__all__ = ["Connections"]

log = logging.getLogger("tilewright.connections")

INTERVAL_S = 0.25
"""Time between two looks."""
_CREDENTIALS = struct.Struct("3i")
_TCP_INFO = struct.Struct("=52xI64xQ")
"""Fields of ``struct tcp_info`` (linux/tcp.h): ms since data came, and bytes that arrived at the other end."""
Holder = tuple[str, str]
"""Principal and process, as far as the kernel tells them."""


class Connections:
    """Looks from ``start`` to ``close``."""

    def __init__(self, addresses: Collection[UnixAddress | TcpAddress], limit: int) -> None:
        """``limit`` connections to all ``addresses`` may be open together; a principal may have seven eighths of them,
        and a process half of that."""
        self._names = {str(item.path) for item in addresses if isinstance(item, UnixAddress)}
        self._ports = {item.port for item in addresses if isinstance(item, TcpAddress)}
        self._limit = limit
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)

    def start(self) -> None:
        """Raises ``RuntimeError`` if the system refuses its thread."""
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            try:
                self._look()
            except Exception:  # noqa: PERF203 - the next look is made all the same
                log.exception("connections could not be counted")

    def _look(self) -> None:
        share = self._limit - self._limit // 8
        numbers = _descriptors()
        if len(numbers) <= process_share(self._limit):  # so no process has more
            return
        found: dict[Holder, list[int]] = defaultdict(list)
        for number in numbers:
            holder = self._holder(number)
            if holder is not None:
                found[holder].append(number)
        for holder, items in found.items():
            if not holder[1]:  # a host, from which many may call: those of least use are last, and go first
                items.sort(key=self._uselessness)
        for holder, surplus in _surplus(found, self._limit, share):
            ended = sum(self._end(number, holder) for number in surplus)
            if ended:
                log.warning(
                    "%d connections of gRPC were ended: %s had %d, and %d may be open in all",
                    *(ended, "/".join(filter(None, holder)), len(found[holder]) + len(surplus), self._limit),
                )

    def _holder(self, number: int) -> Holder | None:
        with _socket(number) as accepted:
            return None if accepted is None else self._peer(accepted)

    def _peer(self, accepted: socket.socket) -> Holder | None:
        """Client of a connection that gRPC has accepted; None for any other socket."""
        with contextlib.suppress(OSError):
            if accepted.type != socket.SOCK_STREAM or accepted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            name = accepted.getsockname()
            if accepted.family == socket.AF_UNIX:
                if name not in self._names:
                    return None
                data = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                pid, uid, _ = _CREDENTIALS.unpack(data)
                return f"uid:{uid}", f"pid:{pid}"
            if accepted.family in (socket.AF_INET, socket.AF_INET6) and name[1] in self._ports:
                return f"tcp:{accepted.getpeername()[0]}", ""
        return None

    @staticmethod
    def _uselessness(number: int) -> tuple[bool, int]:
        """Over TCP: connections over which nothing was ever answered, such as handshakes that stall, come behind the
        others; among equals those that have said nothing for longest."""
        with _socket(number) as accepted, contextlib.suppress(OSError, struct.error):
            if accepted is not None:
                data = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                quiet_ms, arrived = _TCP_INFO.unpack(data)
                return arrived <= 1, quiet_ms  # the connection itself counts as one
        return False, 0

    def _end(self, number: int, holder: Holder) -> bool:
        """Shut a connection down; gRPC closes it. False if the descriptor has become another's."""
        with _socket(number) as accepted, contextlib.suppress(OSError):
            if accepted is not None and self._peer(accepted) == holder:
                accepted.shutdown(socket.SHUT_RDWR)
                return True
        return False


def _surplus(found: dict[Holder, list[int]], limit: int, share: int) -> Iterator[tuple[Holder, list[int]]]:
    """Connections beyond what a process, a principal and all together may have, taken off ``found``: of whoever has
    most."""
    for holder in found:
        most = process_share(limit) if holder[1] else share
        if len(found[holder]) > most:
            yield holder, _taken(found[holder], len(found[holder]) - most)
    for principal in {holder[0] for holder in found}:
        yield from _cut({holder: items for holder, items in found.items() if holder[0] == principal}, share)
    yield from _cut(found, limit)


def _cut(found: dict[Holder, list[int]], most: int) -> Iterator[tuple[Holder, list[int]]]:
    total = sum(map(len, found.values()))
    while total > most:
        holder = max(found, key=lambda item: len(found[item]))
        count = min(total - most, max(1, len(found[holder]) // 2))
        total -= count
        yield holder, _taken(found[holder], count)


def _taken(items: list[int], count: int) -> list[int]:
    """The last ``count`` of ``items``, removed from them."""
    taken = items[-count:]
    del items[-count:]
    return taken


def _descriptors() -> Collection[int]:
    """Numbers of this process's descriptors; all that there may be if there is none left to look with."""
    try:
        return sorted(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - thousands, as text
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


@contextlib.contextmanager
def _socket(number: int) -> Iterator[socket.socket | None]:
    """The socket behind a descriptor; none if it is something else. Others may close the number at any time, so it is
    duplicated, unless there is no descriptor left for that."""
    own = True
    try:
        try:
            copy = os.dup(number)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            copy, own = number, False
        try:
            found = socket.socket(fileno=copy)
        except OSError:
            if own:
                os.close(copy)
            raise
    except OSError:
        yield None
        return
    try:
        yield found
    finally:
        if own:
            found.close()
        else:
            found.detach()
