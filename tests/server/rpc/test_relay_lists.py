"""Lists of headers that pass the relay: counted as they are when they are decoded, and held to bounds."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
from header_blocks import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    NEWEST,
    PADDED,
    PREFACE,
    PRIORITY,
    RESET,
    SETTINGS,
    call,
    frame,
    indexed,
    literal,
    number,
    text,
)
from relay_harness import WAIT_S, Server, behind, say, sender
from rpc_harness import eventually

from tilewright_server.settings.rates import Rates

__all__ = ["behind"]

LIST_BYTES, OPEN_BYTES = Rates().relay_list_bytes, Rates().relay_open_bytes
ONE = LIST_BYTES // 64
"""Bytes of a header, with the 32 that each costs, of which 64 just fit."""
LARGE = literal(b"a", b"v" * (ONE - 33), remember=True)


def listed(block: bytes, stream: int = 1, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, block, stream, flags)


class Seen(NamedTuple):
    """Bytes that reached the server, and a word to it to go on."""

    data: bytearray
    go_on: threading.Event


def started(behind: Callable[..., Server], replies: bytes = b"") -> tuple[Server, Seen]:
    """A server that sends its settings, reads, and says ``replies`` when it is told to go on."""
    seen = Seen(bytearray(), threading.Event())

    def answer(way: socket.socket) -> None:
        way.sendall(frame(SETTINGS))

        def last() -> None:
            seen.go_on.wait(WAIT_S)
            with contextlib.suppress(OSError):
                way.sendall(replies)

        threading.Thread(target=last, daemon=True).start()
        while part := way.recv(1 << 16):
            seen.data.extend(part)

    return behind(answer), seen


LEGAL = {
    "one after the other": b"".join(listed(call(b"/s/m"), 2 * index + 1) for index in range(20)),
    "with a priority": listed(bytes(5) + call(b"/s/m"), 1, END_HEADERS | PRIORITY),
    "in three frames": frame(HEADERS, call(b"/s/m")[:9], 1)
    + frame(CONTINUATION, b"", 1)
    + frame(CONTINUATION, call(b"/s/m")[9:], 1, END_HEADERS),
    "empty": listed(b""),
    "all forms of a header": listed(
        number(0, 5, 0x20)
        + number(4096, 5, 0x20)
        + literal(b"name", b"value", remember=True)
        + number(NEWEST, 6, 0x40)
        + text(b"other", huffman=True)
        + number(NEWEST + 1, 4)
        + text(b"")
        + number(15, 4, 0x10)
        + text(b"x" * 300)
        + indexed(NEWEST)
        + indexed(NEWEST + 1)
        + literal(b"", b"")
    ),
    "as many as fit": listed(LARGE + indexed(NEWEST) * 63),
    "small ones beside a large one": listed(LARGE + literal(b"b", b"w", remember=True) + indexed(NEWEST) * 600),
    "many that are forgotten": listed(literal(b"b", b"w", remember=True) * 500),
    "no list": frame(DATA, LARGE + indexed(NEWEST) * 1000, 1) + frame(0x77, indexed(NEWEST) * 1000),
}


@pytest.mark.parametrize("sent", LEGAL.values(), ids=LEGAL)
def test_legal_lists_pass_as_they_are(behind: Callable[..., Server], sent: bytes) -> None:
    server, seen = started(behind)
    whole = PREFACE + sent
    with sender(server, 1) as process:
        for at in range(0, len(whole), 11) if len(whole) < 1000 else (0,):  # in pieces, too
            say(process, whole[at : at + 11] if len(whole) < 1000 else whole)
        assert eventually(lambda: len(seen.data) >= len(whole), WAIT_S)
        assert seen.data == whole
    assert server.relay.counts().ended == 0


AGED = LARGE + b"".join(literal(b"b", bytes([index]), remember=True) for index in range(20))
WRONG = {
    "too many of one": listed(LARGE + indexed(NEWEST) * 64),
    "too many small ones": listed(literal(b"b", b"w", remember=True) + indexed(NEWEST) * 1000),
    "in further frames": frame(HEADERS, LARGE + indexed(NEWEST) * 40, 1) + frame(CONTINUATION, indexed(NEWEST) * 30, 1),
    "an old one": listed(AGED + indexed(NEWEST + 20) * 64),
    "an old name": listed(
        literal(b"n" * 3000, b"", remember=True) + (number(NEWEST, 4) + text(b"")) * 10,
    ),
    "remembered by an earlier list": listed(LARGE) + listed(indexed(NEWEST) * 65, 3),
    "a length": listed(b"\0" + text(b"name") + number(LIST_BYTES + 1, 7)),
    "a short code": listed(b"\0" + text(b"name") + text(b"\0" * (LIST_BYTES * 3 // 4), huffman=True)),
    "index 0": listed(indexed(0)),
    "an index that nothing can have": listed(indexed(NEWEST + 128)),
    "a number without an end": listed(b"\xff" + b"\x80" * 12),
    "half a header": listed(literal(b"name", b"value")[:-1]),
    "half a priority": listed(bytes(3), 1, END_HEADERS | PRIORITY),
    "padding": listed(b"\0" + call(b"/s/m"), 1, END_HEADERS | PADDED),
    "another frame within": frame(HEADERS, b"", 1) + frame(DATA, b"", 1),
    "a second list within": frame(HEADERS, b"", 1) + listed(b""),
    "a continuation of nothing": frame(CONTINUATION, b"", 1, END_HEADERS),
    "a long list of no stream": listed(LARGE * 4, 0),
}


@pytest.mark.parametrize("sent", WRONG.values(), ids=WRONG)
def test_a_connection_with_a_list_that_is_too_long_or_not_legal_is_ended(
    behind: Callable[..., Server], sent: bytes
) -> None:
    server, seen = started(behind)
    with sender(server, 1) as process:
        say(process, PREFACE + frame(SETTINGS))
        assert eventually(lambda: len(seen.data) == len(PREFACE) + 9, WAIT_S)
        say(process, sent)
        assert eventually(lambda: server.relay.counts().ended == 1, WAIT_S)
        process.stdin.close()  # type: ignore[union-attr]
        told = bytes.fromhex(process.stdout.read().split()[-1])  # type: ignore[union-attr]
    assert told.endswith(b"a list of headers is too long or not legal")
    assert eventually(lambda: server.relay.counts().open == 0)


LISTS = OPEN_BYTES // (LIST_BYTES - ONE - 1024) + 2
"""Long lists of which one is too many to be open."""


@pytest.mark.parametrize("end", [DATA, HEADERS, RESET])
def test_a_process_has_so_many_bytes_of_long_lists_open(behind: Callable[..., Server], end: int) -> None:
    def ended(stream: int) -> bytes:
        if end == RESET:
            return frame(RESET, bytes(4), stream)
        return frame(end, b"", stream, END_STREAM | (END_HEADERS if end == HEADERS else 0))

    # Numbers far apart share places of a table.
    streams = [2 * index + 1 + (index % 3) * 2048 * 4 for index in range(LISTS)]
    blocks = [listed((LARGE if not index else b"") + indexed(NEWEST) * 63, s) for index, s in enumerate(streams)]
    server, seen = started(behind, b"".join(map(ended, streams)))
    whole = PREFACE + b"".join(blocks)
    with sender(server, 1) as process:
        say(process, whole)
        assert eventually(lambda: len(seen.data) >= len(whole) - 2 * len(blocks[-1]), WAIT_S)
        paced = server.relay.counts().paced
        assert eventually(lambda: server.relay.counts().paced > paced + 3, WAIT_S)
        assert len(seen.data) < len(whole), "the last waits"
        with sender(server, 1) as other:  # of another process
            say(other, PREFACE)
            assert eventually(lambda: seen.data.count(PREFACE) == 2, WAIT_S)
        seen.go_on.set()
        assert eventually(lambda: len(seen.data) == len(whole) + len(PREFACE), WAIT_S)
    assert server.relay.counts().ended == 0
