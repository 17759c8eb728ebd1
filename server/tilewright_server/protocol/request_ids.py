"""Ids of requests: the word under which one request is found in the logs of its client, the server and the processes of
devices, in its error and in its trace.

The client gives it, or else it is made when somebody asks for it. A thread says whose request it serves before it
begins; whoever logs or fails in that thread need not be told.
"""

from __future__ import annotations

import secrets
import threading
from typing import Protocol

__all__ = ["HEADER_NAME", "MAX_ID", "Given", "Named", "current", "new_id", "printable", "serve"]

HEADER_NAME = "x-request-id"
"""Metadata by which a client names its call."""
MAX_ID = 64
"""Characters of an id; what is longer is cut."""


class Named(Protocol):
    """Something that is served, with its id."""

    @property
    def request(self) -> str: ...


class Given:
    """A request of which the id is all that is known."""

    __slots__ = ("request",)

    def __init__(self, request: str) -> None:
        self.request = request


class _Thread(threading.local):
    served: Named | None = None


_thread = _Thread()


def serve(named: Named | None) -> None:
    """Note what the calling thread serves from now on; None: nothing."""
    _thread.served = named


def current() -> str:
    """Id of the request that the calling thread serves; empty for none."""
    served = _thread.served
    return "" if served is None else served.request


def new_id() -> str:
    """An id for a request that came without one. It tells nothing of others."""
    return secrets.token_hex(8)


def printable(text: object) -> str:
    """An id as it is written, from what a client sent: at most ``MAX_ID`` printable characters."""
    if isinstance(text, bytes):
        text = text[: 4 * MAX_ID].decode("utf-8", "replace")
    return "".join(letter for letter in str(text)[:MAX_ID] if letter.isprintable())
