"""Frames of HTTP/2 with lists of headers, as clients that misbehave write them."""

from __future__ import annotations

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM, END_HEADERS, PADDED, PRIORITY = 1, 4, 8, 0x20
DATA, HEADERS, RESET, SETTINGS, CONTINUATION = 0, 1, 3, 4, 9
NEWEST = 62
"""Index of the header that was remembered last."""


def frame(kind: int, payload: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def number(value: int, bits: int, first: int = 0) -> bytes:
    """An integer whose first byte has ``bits`` bits for it."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    out, value = [first | most], value - most
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def text(value: bytes, *, huffman: bool = False) -> bytes:
    return number(len(value), 7, 0x80 if huffman else 0) + value


def literal(name: bytes, value: bytes, *, remember: bool = False) -> bytes:
    return bytes([0x40 if remember else 0]) + text(name) + text(value)


def indexed(index: int) -> bytes:
    return number(index, 7, 0x80)


def call(path: bytes) -> bytes:
    """The list of headers of a call of gRPC."""
    return (
        indexed(3)
        + indexed(6)
        + literal(b":path", path)
        + literal(b":authority", b"x")
        + literal(b"content-type", b"application/grpc")
        + literal(b"te", b"trailers")
    )
