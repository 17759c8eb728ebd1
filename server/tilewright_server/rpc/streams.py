"""Open execution streams: how many there may be, and how they end when the server does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from tilewright_kit.types.errors import ResourceExhaustedError, UnavailableError
from tilewright_server.rpc.method_handlers import Context
from tilewright_server.rpc.status import set_status

__all__ = ["OpenStream", "Streams"]


class OpenStream:
    """One stream. Its handler calls ``work`` and ``rest``; whoever drains the server calls ``stop``."""

    def __init__(self, context: Context, send: Callable[[bytes | None], None]) -> None:
        self._context = context
        self._send = send
        self._lock = threading.Lock()
        self._busy = False
        self._stopping = False
        self._finished = False

    def work(self) -> bool:
        """A request came. False if the stream has ended."""
        with self._lock:
            self._busy = not self._finished
            return self._busy

    def rest(self) -> None:
        """The reply is on its way, and nothing else is to be done."""
        with self._lock:
            self._busy = False
            if self._stopping:
                self._finish(UnavailableError("the server is shutting down", rule="draining", fix="use another server"))

    def stop(self) -> None:
        """End the stream: at once if it waits for its client, else after the current request."""
        with self._lock:
            self._stopping = True
            if not self._busy:
                self._finish(UnavailableError("the server is shutting down", rule="draining", fix="use another server"))

    def complete(self) -> None:
        """The client has sent its last request."""
        with self._lock:
            self._finish(None)

    def _finish(self, error: UnavailableError | None) -> None:
        if self._finished:
            return
        self._finished = True
        if error is not None:
            set_status(self._context, error)
        self._send(None)


class Streams:
    """All open execution streams of the server."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._open: set[OpenStream] = set()
        self._stopping = False

    @contextmanager
    def open(self, context: grpc.ServicerContext, send: Callable[[bytes | None], None]) -> Iterator[OpenStream]:
        """Count a stream for as long as its handler runs. Raises ``ResourceExhaustedError`` at the limit."""
        stream = OpenStream(context, send)
        with self._lock:
            if self._stopping:
                raise UnavailableError("the server is shutting down", rule="draining", fix="use another server")
            if len(self._open) >= self.limit:
                raise ResourceExhaustedError(
                    f"no more than {self.limit} execution streams may be open",
                    field="streams",
                    value=self.limit,
                    rule="quota",
                    fix="close streams, or share one: many requests may be in flight on it",
                    retry_after_s=1.0,
                )
            self._open.add(stream)
        try:
            yield stream
            stream.complete()
        finally:
            with self._lock:
                self._open.discard(stream)

    def stop(self) -> None:
        """End all streams, see ``OpenStream.stop``; no new ones are taken."""
        with self._lock:
            self._stopping = True
            streams = list(self._open)
        for stream in streams:
            stream.stop()
