"""Copies between resident buffers, regions and messages, outside of any execution."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_server.memory.regions import Region
from tilewright_server.session.objects import AnyRegion
from tilewright_server.session.session import Session

__all__ = ["Begin", "check_range", "nothing", "read_buffer", "write_buffer"]

CHUNK = 4 << 20
Begin = Callable[[int], bytes]
"""Beginning of a reply that is to hold so many bytes. Raises what keeps it from being made."""


def write_buffer(session: Session, buffer_id: int, offset: int, source: bytes | tuple[int, int], nbytes: int) -> None:
    """Copy bytes, or ``nbytes`` from (region id, offset), into a buffer."""
    buffer = session.buffer(buffer_id)
    if isinstance(source, bytes):
        nbytes = len(source)
        check_range("buffer", offset, nbytes, buffer.size)
        session.pin((buffer,))
        try:
            buffer.write(offset, memoryview(source))
        finally:
            session.unpin((buffer,))
        return
    region = session.region(source[0])
    check_range("buffer", offset, nbytes, buffer.size)
    check_range("region", source[1], nbytes, region.size)
    session.pin((buffer, region))
    try:
        _check_pages(region, source[1], nbytes, written=False)
        for at, size in _chunks(nbytes):
            part = memoryview(bytearray(size))
            region.read(source[1] + at, part)
            buffer.write(offset + at, part)
    finally:
        session.unpin((buffer, region))


def nothing(_: int) -> bytes:
    """No bytes."""
    return b""


def read_buffer(
    session: Session,
    buffer_id: int,
    offset: int,
    nbytes: int,
    target: tuple[int, int] | None,
    limit: int,
    begin: Begin = nothing,
) -> bytes:
    """At most ``limit`` bytes of a buffer, behind those that ``begin`` returns, which is asked before they are copied
    and may refuse; or, with ``target`` (region id, offset), copy them there and return nothing."""
    buffer = session.buffer(buffer_id)
    check_range("buffer", offset, nbytes, buffer.size)
    if target is None:
        _check_reply(nbytes, limit)
        before = begin(nbytes)
        data = BytesIO(bytes(len(before) + nbytes))  # whose memory it takes over, and ``getvalue`` returns
        session.pin((buffer,))
        try:
            with data.getbuffer() as view:
                view[: len(before)] = before
                buffer.read(offset, view[len(before) :])
        finally:
            session.unpin((buffer,))
        return data.getvalue()
    region = session.region(target[0])
    check_range("region", target[1], nbytes, region.size)
    session.pin((buffer, region))
    try:
        _check_pages(region, target[1], nbytes, written=True)
        for at, size in _chunks(nbytes):
            part = memoryview(bytearray(size))
            buffer.read(offset + at, part)
            region.write(target[1] + at, part)
    finally:
        session.unpin((buffer, region))
    return b""


def _check_pages(region: AnyRegion, offset: int, nbytes: int, *, written: bool) -> None:
    if isinstance(region, Region):
        region.check_pages(offset, nbytes, written=written)


def check_range(kind: str, offset: int, nbytes: int, size: int) -> None:
    """``InvalidArgumentError`` unless ``nbytes`` bytes from ``offset`` lie within ``size``."""
    if nbytes < 0 or offset < 0 or offset > size or nbytes > size - offset:
        raise InvalidArgumentError(
            f"{nbytes} bytes from offset {offset} reach past the end of the {kind}, which has {size}",
            field="offset",
            value=offset,
            rule="location_bounds",
            fix=f"stay within the {kind}",
        )


def _check_reply(nbytes: int, limit: int) -> None:
    if nbytes > limit:
        raise InvalidArgumentError(
            f"a reply carries at most {limit} bytes",
            field="bytes",
            value=nbytes,
            rule="inline_limit",
            fix="read in parts, or into a region",
        )


def _chunks(nbytes: int) -> list[tuple[int, int]]:
    return [(at, min(CHUNK, nbytes - at)) for at in range(0, nbytes, CHUNK)]
