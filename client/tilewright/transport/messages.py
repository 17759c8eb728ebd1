"""Framing of execution requests by hand. Building a protobuf message in Python costs more than the rest of a call, so
serialised parts are kept and joined: the concatenation of serialised fields is the message.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

__all__ = ["execute_request", "execution", "location_field", "session_field", "varint"]

_PLAN = Struct("<BQ")
_SHORT = [bytes((value,)) for value in range(0x80)]


def varint(value: int) -> bytes:
    """Base-128 encoding of a number that is not negative."""
    if value < 0x80:
        return _SHORT[value]
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + varint(len(data)) + data


def session_field(token: bytes) -> bytes:
    """``ExecuteRequest.session``, field 1."""
    return _field(b"\x0a", token)


def location_field(location: bytes) -> bytes:
    """One of ``Execution.locations``, field 2."""
    return _field(b"\x12", location)


def execution(plan: int, locations: Iterable[bytes], repeat: int = 0) -> bytes:
    """One of ``ExecuteRequest.executions``, field 2: plan is field 1 (fixed64), repeat field 3."""
    data = _PLAN.pack(0x09, plan) + b"".join(locations)
    if repeat > 1:
        data += b"\x18" + varint(repeat)
    return _field(b"\x12", data)


def execute_request(session: bytes, executions: Iterable[bytes], timeout_ms: int = 0) -> bytes:
    """A whole request from ``session_field`` and ``execution`` parts."""
    message = session + b"".join(executions)
    return message + b"\x18" + varint(timeout_ms) if timeout_ms > 0 else message
