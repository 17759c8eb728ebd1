"""Packets of the local socket: the header, the kinds, and how errors are answered (``docs/protocol.md``).

Every packet begins with one header of 16 bytes, little endian; a packet of launches is 1 to 64 headers and nothing
else. The client has its own copy of this by protocol.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from tilewright_kit.types.errors import InternalError, InvalidArgumentError, TilewrightError

__all__ = [
    "ERROR",
    "HANDLE_BYTES",
    "HEADER",
    "HEADER_BYTES",
    "MAX_FRAMES",
    "REPLY_KIND",
    "TIED",
    "Kind",
    "error_packet",
    "malformed",
    "packet",
]

HEADER = struct.Struct("<BBHIQ")
"""kind, flags, slot, sequence, value"""
HEADER_BYTES = HEADER.size
MAX_FRAMES = 64
"""Launches in one packet."""
HANDLE_BYTES = 64
"""Bytes of an interprocess event's handle."""
REPLY_KIND = 0x80
"""Set in the kind of a reply."""
ERROR = 1
"""Flag of a reply whose payload is an ``ErrorDetail``."""
TIED = 2
"""Flag of the reply to a launch that failed: what its flags say of the client's stream was done all the same."""


class Kind(IntEnum):
    """Kinds of packets from a client."""

    HELLO = 1
    CALL = 2
    LAUNCH = 3
    ATTACH = 4
    OPEN_EVENT = 5
    OPEN_SIGNALS = 6
    TRACE = 7
    REQUEST = 8


def packet(kind: int, flags: int = 0, slot: int = 0, sequence: int = 0, value: int = 0, payload: bytes = b"") -> bytes:
    """One packet of one frame."""
    return HEADER.pack(kind, flags, slot, sequence, value) + payload


def error_packet(kind: int, slot: int, sequence: int, error: BaseException, flags: int = ERROR) -> bytes:
    """The reply to a frame that failed. ``flags``: ``ERROR``, with ``TIED`` or without."""
    # Imported here: a worker that never fails needs no protobuf.
    from tilewright_server.protocol.errors import to_detail

    if not isinstance(error, TilewrightError):
        error = InternalError("the server made a mistake", rule="internal", fix="report it with the server's log")
    detail = to_detail(error)
    return packet(kind | REPLY_KIND, flags, slot, sequence, 0, detail.SerializeToString())


def malformed(reason: str, value: object) -> InvalidArgumentError:
    """For a packet that no client of this protocol sends."""
    return InvalidArgumentError(
        reason, field="packet", value=value, rule="packet_format", fix="use the protocol's version that HELLO agreed on"
    )
