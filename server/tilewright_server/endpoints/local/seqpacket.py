"""Receiving and sending packets, with descriptors, on a connection whose other end is not trusted."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Sequence

from tilewright_kit.types.errors import InvalidArgumentError, ResourceExhaustedError
from tilewright_server.devices.contract import MAX_PARTS
from tilewright_server.protocol.frames import HEADER_BYTES, malformed

__all__ = ["MAX_PACKET", "SEND_TIMEOUT_S", "Wire", "close_all"]

MAX_PACKET = 65536
SEND_TIMEOUT_S = 10.0
"""A client that does not take replies for so long is given up."""
_SPACE = socket.CMSG_SPACE((MAX_PARTS + 1) * 4)
"""For one descriptor more than a packet may carry, so that it shows."""
_NOW = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_LOST = socket.MSG_TRUNC | socket.MSG_CTRUNC
_TIMEVAL = struct.Struct("@ll")


class Wire:
    """One connection, read and written by one thread. Blocking, but for ``SEND_TIMEOUT_S``."""

    def __init__(self, connection: socket.socket, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        self.socket = connection
        connection.setblocking(True)
        # Of the open socket, not of this object: it still holds when a device has taken the connection over.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_timeout_s))
        self._buffer = bytearray(MAX_PACKET)
        self._view = memoryview(self._buffer)
        self._receive = connection.recvmsg_into

    def wait_at_most(self, seconds: float) -> None:
        """How long ``receive`` waits; 0: for ever."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def receive(self, descriptors: list[int], *, wait: bool = True) -> memoryview:
        """The next packet, valid until the next call; empty at the end of the connection.

        What comes with it is appended to ``descriptors``, whose holder closes them, also on errors. Raises ``OSError``
        (``BlockingIOError`` when ``wait_at_most`` has passed, or there is none now and it is not to ``wait``);
        ``InvalidArgumentError`` for a packet that is too large, ``ResourceExhaustedError`` if the server has no
        descriptor to spare.
        """
        how = socket.MSG_CMSG_CLOEXEC if wait else _NOW
        count, ancillary, flags, _ = self._receive((self._buffer,), _SPACE, how)
        if ancillary:
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    found = array.array("i")
                    found.frombytes(data[: len(data) - len(data) % found.itemsize])
                    descriptors.extend(found)
        if count < HEADER_BYTES:
            self._buffer[count:HEADER_BYTES] = bytes(HEADER_BYTES - count)
        if flags & _LOST or len(descriptors) > MAX_PARTS:
            self._refuse(count, flags, descriptors)
        return self._view[:count]

    @property
    def head(self) -> memoryview:
        """The header of the last packet, for replies to one that could not be taken; zeros where it was too short."""
        return self._view[:HEADER_BYTES]

    @staticmethod
    def _refuse(count: int, flags: int, descriptors: Sequence[int]) -> None:
        if flags & socket.MSG_TRUNC:
            raise malformed(f"a packet has at most {MAX_PACKET} bytes", f"more than {count}")
        if len(descriptors) > MAX_PARTS:
            raise InvalidArgumentError(
                f"a packet carries {MAX_PARTS} descriptors at most",
                field="packet",
                rule="packet_descriptors",
                fix="register memory of so many parts piece by piece",
            )
        raise ResourceExhaustedError(
            "the server has no descriptor to spare",
            field="packet",
            rule="file_descriptors",
            fix="unregister regions, or raise the server's limit of open files (ulimit -n)",
            retry_after_s=1.0,
        )

    def send(self, data: bytes, descriptor: int = -1) -> None:
        """Raises ``OSError`` if the client has gone, or does not read."""
        if descriptor < 0:
            self.socket.send(data, socket.MSG_NOSIGNAL)
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        self.socket.sendmsg([data], rights, socket.MSG_NOSIGNAL)

    def send_at_once(self, data: bytes) -> bool:
        """``send``, if the client has room for it now."""
        try:
            self.socket.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def shut(self, how: int = socket.SHUT_RDWR) -> None:
        """Wake whoever waits in ``receive`` or ``send``, from any thread."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(how)

    def close(self) -> None:
        self.socket.close()


def close_all(descriptors: list[int]) -> None:
    """Close and forget them."""
    while descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptors.pop())


def _timeval(seconds: float) -> bytes:
    return _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
