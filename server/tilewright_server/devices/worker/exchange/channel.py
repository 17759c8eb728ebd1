"""Packets between the server and a worker: packets over AF_UNIX SOCK_SEQPACKET, JSON or structs, descriptors
beside them. Nothing that is unpickled, nothing that grows without bound.

A packet begins with the header of ``frames``. Payloads that are too long for a packet travel in a memory file whose
descriptor is the last of the packet's.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from tilewright_kit.types import errors as kit
from tilewright_server.devices.contract import MAX_PARTS, DeviceLostError
from tilewright_server.protocol.frames import HEADER, HEADER_BYTES

__all__ = [
    "COPY",
    "FAILED",
    "NAME_BYTES",
    "PACKET_BYTES",
    "SPILLED",
    "TIMES",
    "Channel",
    "Op",
    "Packet",
    "pack_error",
    "unpack_error",
]

PACKET_BYTES = 32 << 10
"""Longest packet; a payload that does not fit is spilled."""
SPILLED_BYTES = 256 << 20
"""Longest payload of all."""
MAX_DESCRIPTORS = MAX_PARTS + 1
"""Descriptors of one packet: one may be of its payload."""
FAILED, SPILLED = 1, 2
"""Flags: the payload is an error; the payload is in a memory file."""
NAME_BYTES = 64
"""Bytes for the id of a request: UTF-8, and zeros behind it."""

TIMES = struct.Struct("<QQQII")
"""Beginning of the payload of ``TRACED``: the fields of ``PacketTimes``."""
COPY = struct.Struct("<QQQ")
"""Payload of ``WRITE`` and ``READ``: offset in the buffer, offset in the connection's slot, bytes."""

_ANCILLARY = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


class Op(IntEnum):
    """Kinds of packets between a server and its worker."""

    CALL = 16
    """A method and its arguments as JSON; answered by JSON."""
    RUN = 17
    """value: program; sequence: repeats; payload: id of the request, workspace and addresses. Answered by times, of 8
    bytes each."""
    WRITE = 18
    """value: buffer; payload: offset in it, offset in the staging area, bytes."""
    READ = 19
    """As ``WRITE``, the other way."""
    DROP = 20
    """Payload: ids of programs that nobody uses any more, 8 bytes each. Not answered."""
    ENDED = 21
    """From the worker: the client connection ``value`` has ended."""
    TRACED = 22
    """From the worker: times of a packet of the client connection ``value`` (``TIMES``), and the context it gave."""


@dataclass(slots=True)
class Packet:
    """A received packet. Whoever receives it closes ``fds``."""

    kind: int
    flags: int
    sequence: int
    value: int
    payload: bytes
    fds: list[int] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        """The payload as an object, ``{}`` if it is empty."""
        record = json.loads(self.payload) if self.payload else {}
        if not isinstance(record, dict):
            raise ValueError("a message must be an object")
        return record

    def close(self) -> None:
        """Close the descriptors that nobody has taken."""
        for fd in self.fds:
            with suppress(OSError):
                os.close(fd)
        self.fds.clear()


class Channel:
    """One end of a connection, used by one thread at a time. ``OSError`` if the other end has gone."""

    __slots__ = ("buffer", "pending", "slot", "socket", "view")

    def __init__(self, connection: socket.socket, slot: int = 0) -> None:
        self.socket = connection
        self.slot = slot
        """Part of the staging area that is this connection's."""
        self.pending = 0
        """Answers that are still to come."""
        self.buffer = bytearray(PACKET_BYTES)
        self.view = memoryview(self.buffer)

    def send(
        self,
        kind: int,
        *,
        flags: int = 0,
        sequence: int = 0,
        value: int = 0,
        payload: bytes = b"",
        fds: Sequence[int] = (),
    ) -> None:
        """Send one packet; ``fds`` stay open here. Raises ``InvalidArgumentError`` for a payload that is too long."""
        if HEADER_BYTES + len(payload) <= PACKET_BYTES:
            data = HEADER.pack(kind, flags, 0, sequence, value) + payload
            if fds:
                socket.send_fds(self.socket, [data], list(fds))
            else:
                self.socket.send(data)
        else:
            spilled = _spill(payload)
            try:
                data = HEADER.pack(kind, flags | SPILLED, 0, sequence, value)
                socket.send_fds(self.socket, [data], [*fds, spilled])
            finally:
                os.close(spilled)
        if kind != Op.DROP:  # what was not sent is not answered
            self.pending += 1

    def receive(self) -> Packet | None:
        """The next packet; None if the other end has hung up."""
        count, ancillary, lost, _ = self.socket.recvmsg_into([self.buffer], _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        fds = _descriptors(ancillary)
        self.pending -= 1
        if lost & socket.MSG_CTRUNC:
            _close(fds)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if count < HEADER_BYTES:
            _close(fds)
            return None
        kind, flags, _, sequence, value = HEADER.unpack_from(self.buffer)
        if flags & SPILLED:
            payload = _unspill(fds.pop()) if fds else b""
        else:
            payload = bytes(self.view[HEADER_BYTES:count])
        return Packet(kind, flags & ~SPILLED, sequence, value, payload, fds)

    def close(self) -> None:
        self.socket.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _spill(payload: bytes) -> int:
    if len(payload) > SPILLED_BYTES:
        raise kit.InvalidArgumentError(
            "the plan is larger than a device's process can be told",
            field="bytes",
            value=len(payload),
            rule="worker_message",
            fix="send fewer or smaller problems at a time",
        )
    fd = os.memfd_create("tw-message", os.MFD_CLOEXEC)
    try:
        rest = memoryview(payload)
        while rest:
            rest = rest[os.write(fd, rest) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unspill(fd: int) -> bytes:
    try:
        size = min(os.fstat(fd).st_size, SPILLED_BYTES)
        data = bytearray()
        while len(data) < size:
            part = os.pread(fd, size - len(data), len(data))
            if not part:
                break
            data += part
        return bytes(data)
    finally:
        os.close(fd)


# Errors

_FIELDS = ("reason", "field", "value", "rule", "fix", "log_tail", "retry_after_s")
_KINDS = {name: getattr(kit, name) for name in kit.__all__}


def pack_error(error: BaseException) -> bytes:
    """An error that the other end raises as it is; what is none of the kit's becomes an ``InternalError``."""
    if isinstance(error, KeyError):  # part of the promise of ``ProgramDevice.program``
        return json.dumps({"type": "KeyError", "reason": str(error.args[0]) if error.args else ""}).encode()
    if not isinstance(error, kit.TilewrightError):
        error = kit.InternalError(
            "the process of the device made a mistake", rule="internal", fix="report it with the server's log"
        )
    known = next(
        (kind.__name__ for kind in type(error).__mro__ if kind is DeviceLostError or kind.__name__ in _KINDS), ""
    )
    return json.dumps({"type": known, **{name: getattr(error, name) for name in _FIELDS}}).encode()


def unpack_error(payload: bytes) -> Exception:
    """The inverse of ``pack_error``; violations do not travel."""
    record = json.loads(payload)
    kind = record.pop("type", "")
    if kind == "KeyError":
        return KeyError(record.get("reason", ""))
    if kind == DeviceLostError.__name__:
        return DeviceLostError(record["reason"], device=record["value"], retry_after_s=record["retry_after_s"])
    reason = record.pop("reason", "")
    made: Exception = _KINDS.get(kind, kit.InternalError)(reason, **record)
    return made
