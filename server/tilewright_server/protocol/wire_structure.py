"""Structure of a message on the wire, measured before it is parsed.

A parsed field takes a hundred bytes and more, and an empty one takes two on the wire: a message of nothing but empty
fields grows to dozens of times its size, in one step that holds up all other threads.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["MOST_STRUCTURE", "check_structure"]

MOST_STRUCTURE = 2 << 20
"""Bytes of a message beside the contents of operands: 16,384 operands take less than 1 MiB."""
CONTENT = 1024
"""Fields of bytes or text of that size are contents, which are not looked into."""
_FIXED = {1: 8, 5: 4}
"""Bytes of the wire types of fixed size."""
_LENGTH = 2


class _MalformedError(Exception):
    """A message that the parser will not take."""


def check_structure(kind: Descriptor, data: bytes) -> None:
    """Raise ``InvalidArgumentError`` if ``data`` has more structure than any message needs. Malformed messages pass:
    the parser says what is wrong with them."""
    if len(data) <= MOST_STRUCTURE:
        return
    try:
        _measured(kind, data, 0, len(data), 0)
    except (_MalformedError, IndexError, RecursionError):
        return


def _measured(kind: Descriptor | None, data: bytes, at: int, end: int, found: int) -> int:
    """``found``, and the bytes of structure of the message between ``at`` and ``end``."""
    fields = kind.fields_by_number if kind is not None else {}
    while at < end:
        start = at
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            _, at = _varint(data, at)
        elif wire in _FIXED:
            at += _FIXED[wire]
        elif wire == _LENGTH:
            length, at = _varint(data, at)
            if length > end - at:
                raise _MalformedError
            field = fields.get(tag >> 3)
            if length >= CONTENT and field is not None:
                found += at - start
                if field.message_type is not None:
                    found = _measured(field.message_type, data, at, at + length, found)
                elif field.type not in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING):
                    found += length
                at += length
                start = at
            else:
                at += length
        else:
            raise _MalformedError
        found += at - start
        if found > MOST_STRUCTURE:
            raise InvalidArgumentError(
                f"the request has more than {MOST_STRUCTURE >> 20} MiB beside the contents of operands",
                field="request",
                value=f"{len(data)} bytes",
                rule="request_structure",
                fix="send several requests, or put what describes operands into fewer and larger ones",
            )
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    if byte < 0x80:
        return byte, at
    value, shift = byte & 0x7F, 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise _MalformedError
