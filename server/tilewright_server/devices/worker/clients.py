"""Clients of a worker that die, and what they leave under way.

A launch may wait for an event of its client. If the client dies before the event comes, the launch waits for ever, and
with it whatever is to be given back to the device behind it, of others too. Nothing can take a launch off a stream
again, so the process of the device has to be replaced; but not because somebody merely closed a connection with much
work under way.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tilewright_kit.types.errors import ResourceExhaustedError
from tilewright_server.devices.contract import DeviceLostError, LastingStream, SignalStream

__all__ = ["Client", "Clients", "Peer", "WaitingStream"]

PATIENCE_S = 5.0
"""How long launches of a process that is dead may wait for it."""
LONG_PATIENCE_S = 60.0
"""How long they may go on if they wait for nothing; and those of a connection that has ended, if nobody can tell
whether the process is dead: it lives in another process namespace."""
MAX_LEFT = 64
"""Streams that may be under way without a connection before there are no new ones."""
_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD = getattr(socket, "SO_PEERPIDFD", 77)
"""Linux 6.5; the number is that of every arch but PA-RISC and SPARC."""


@runtime_checkable
class WaitingStream(LastingStream, Protocol):
    """A stream that can tell work from waiting."""

    @property
    def waits(self) -> bool:
        """True if an event of its client, for which a launch may be waiting, has not come. Never waits itself."""
        ...


class Peer:
    """The process at the other end of a connection. ``close`` it."""

    def __init__(self, connection: socket.socket) -> None:
        self._fd = -1
        self.is_known = True
        """True if ``is_dead`` means anything."""
        try:
            self._fd = _process_of(connection)
        except ProcessLookupError:  # dead already
            pass
        except (OSError, AttributeError):  # an old kernel, or a Python that was built for one
            self.is_known = False

    @property
    def is_dead(self) -> bool:
        if self._fd < 0:
            return self.is_known
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _process_of(connection: socket.socket) -> int:
    """A descriptor of the process that connected. Raises ``ProcessLookupError`` if it is dead; another ``OSError`` or
    ``AttributeError`` if nobody can tell."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):  # of which kernels before 6.13 say the latter
            raise ProcessLookupError(errno.ESRCH, "the process has ended") from error
        if error.errno != errno.ENOPROTOOPT:
            raise
    # An older kernel has its number only, which by now may be that of another process.
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid = int(_CREDENTIALS.unpack(data)[0])
    if pid <= 0:
        raise OSError(errno.ENODATA, "the process is of another namespace")
    return os.pidfd_open(pid)


@dataclass(slots=True, eq=False)
class Client:
    """A connection, and what it has under way."""

    stream: object
    peer: Peer
    since: float
    """When it was last seen alive, or, if nobody can tell, connected."""
    is_connected: bool = True

    @property
    def is_busy(self) -> bool:
        """True if something of it is under way, or may be."""
        return self.is_connected or (isinstance(self.stream, LastingStream) and self.stream.is_busy)

    @property
    def waits(self) -> bool:
        """True if what is under way may be waiting for it."""
        return not isinstance(self.stream, WaitingStream) or self.stream.waits


class Clients:
    """All that are connected, and those that have left something under way. Thread-safe."""

    def __init__(self) -> None:
        self._known: list[Client] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, stream: object, peer: Peer) -> Client:
        """A client has connected; takes ``peer`` over. Raises ``ResourceExhaustedError`` if too many have left launches
        under way: then ``peer`` stays the caller's."""
        with self._lock:
            if sum(not client.is_connected for client in self._known) >= MAX_LEFT:
                raise _too_many()
            client = Client(stream, peer, time.monotonic())
            self._known.append(client)
            return client

    def end(self, client: Client) -> None:
        """Its connection has ended, and its stream was closed."""
        with self._lock:
            client.is_connected = False
            if not client.is_busy:
                self._forget(client)

    def check(self) -> None:
        """Forget what has ended. Raises ``DeviceLostError`` if only a new process can end the rest."""
        now = time.monotonic()
        with self._lock:
            for client in tuple(self._known):
                if not client.is_busy:
                    self._forget(client)
                elif client.peer.is_known:
                    if not client.peer.is_dead:
                        client.since = now
                    elif isinstance(client.stream, SignalStream):
                        client.stream.let_go()
                    if now - client.since > PATIENCE_S:
                        _require(now - client.since <= LONG_PATIENCE_S and not client.waits)
                elif client.is_connected:
                    client.since = now
                else:
                    _require(now - client.since <= LONG_PATIENCE_S)

    def _forget(self, client: Client) -> None:
        """Lock held."""
        self._known.remove(client)
        client.peer.close()


def _require(patient: bool) -> None:
    if not patient:
        raise DeviceLostError("launches of a client that died do not end")


def _too_many() -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"launches of {MAX_LEFT} connections that were closed are still under way",
        field="connections",
        rule="connections_left",
        fix="keep connections open until their launches have ended, and record the events that they wait for",
        retry_after_s=1.0,
    )
