"""What clients leave under way when they go.

A launch may wait for an event of its client. If the client dies before the event comes, the launch waits for ever, and
with it whatever is to be given back to the device behind it, of others too. Nothing can take a launch off a stream
again, so the process of the device has to be replaced; but not because somebody merely closed a connection with much
work under way.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass

from tilewright_kit.errors import ResourceExhaustedError
from tilewright_server.devices.base import DeviceLostError, LastingStream

__all__ = ["MAX_DEPARTED", "Departed", "Peer"]

PATIENCE_S = 5.0
"""How long launches of a process that is dead may go on."""
UNKNOWN_PATIENCE_S = 60.0
"""As long, if nobody can tell whether it is dead: it lives in another process namespace."""
MAX_DEPARTED = 64
"""Streams that may be under way without a connection before there are no new ones."""
_CREDENTIALS = struct.Struct("3i")


class Peer:
    """The process at the other end of a connection. ``close`` it."""

    def __init__(self, connection: socket.socket) -> None:
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = int(_CREDENTIALS.unpack(data)[0])
        self._fd = -1
        self.is_known = pid > 0
        """Whether ``is_dead`` means anything."""
        try:
            if self.is_known:
                self._fd = os.pidfd_open(pid)
        except ProcessLookupError:  # dead already
            pass
        except OSError:
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


@dataclass(slots=True)
class _Left:
    stream: LastingStream
    peer: Peer
    since: float
    """When its process was first seen dead, or its connection ended if nobody can tell."""


class Departed:
    """Streams of connections that have ended. Thread-safe."""

    def __init__(self) -> None:
        self._left: list[_Left] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._left)

    def add(self, stream: object, peer: Peer) -> None:
        """The connection of ``peer`` has ended and ``stream`` was closed. Takes ``peer`` over."""
        if not isinstance(stream, LastingStream) or not stream.is_busy:
            peer.close()
            return
        with self._lock:
            self._left.append(_Left(stream, peer, time.monotonic()))

    def require_room(self) -> None:
        """Raise ``ResourceExhaustedError`` if too much is under way already."""
        if len(self._left) >= MAX_DEPARTED:
            raise ResourceExhaustedError(
                f"launches of {MAX_DEPARTED} connections that were closed are still under way",
                field="connections",
                rule="departed_connections",
                fix="keep connections open until their launches have ended, and record the events that they wait for",
                retry_after_s=1.0,
            )

    def check(self) -> None:
        """Forget what has ended. Raises ``DeviceLostError`` if only a new process can end the rest."""
        if not self._left:
            return
        now = time.monotonic()
        with self._lock:
            for left in tuple(self._left):
                if not left.stream.is_busy:
                    left.peer.close()
                    self._left.remove(left)
                elif not left.peer.is_known:
                    _require(now - left.since < UNKNOWN_PATIENCE_S)
                elif left.peer.is_dead:
                    _require(now - left.since < PATIENCE_S)
                else:
                    left.since = now


def _require(patient: bool) -> None:
    if not patient:
        raise DeviceLostError("launches of a client that died wait for something that never comes")
