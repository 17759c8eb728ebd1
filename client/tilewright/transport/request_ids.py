"""Ids of requests: the word under which a call is found in the server's log, in its error and in its trace."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

from tilewright.errors import InvalidArgumentError, TilewrightError

__all__ = ["Metadata", "Names", "given", "named", "request_id"]

HEADER = "x-request-id"
MAX_ID = 64
Metadata = tuple[tuple[str, str], ...]
E = TypeVar("E", bound=TilewrightError)

given: ContextVar[str] = ContextVar("tilewright_request", default="")
"""Id that the program gives to what it calls now; empty for none."""


@contextlib.contextmanager
def request_id(text: str) -> Iterator[None]:
    """Have calls and launches inside the block, of this thread or asyncio task, go under the program's own id: 1 to 64
    printable ASCII characters, such as the id of the request that the program serves. Raises ``InvalidArgumentError``.

        with tilewright.request_id("chat-4711"):
            client.gemm(a, b)
    """
    if not (0 < len(text) <= MAX_ID and text.isascii() and text.isprintable() and text == text.strip()):
        raise InvalidArgumentError(
            "that is no id of a request",
            field="request_id",
            value=text,
            rule="request_id",
            fix=f"give 1 to {MAX_ID} printable ASCII characters, without spaces at the ends",
        )
    token = given.set(text)
    try:
        yield
    finally:
        given.reset(token)


class Names:
    """Ids of the calls of one connection, where the program gives none. Thread-safe."""

    __slots__ = ("_numbers", "_ours")

    def __init__(self) -> None:
        self._ours = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def next(self) -> Metadata:
        """Metadata of the next call."""
        return ((HEADER, given.get() or f"{self._ours}-{next(self._numbers):x}"),)


def named(error: E, metadata: Metadata) -> E:
    """The error of a call with its id, which an error of gRPC itself lacks."""
    error.request = error.request or metadata[0][1]
    return error
