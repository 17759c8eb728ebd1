"""Open execution streams: how many there may be, and how they end when the server does."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tilewright_kit.types.errors import ResourceExhaustedError, UnavailableError
from tilewright_server.rpc.calls import WireCall

__all__ = ["OpenStream", "Streams"]


class OpenStream:
    """One stream. Whoever serves it calls ``work`` and ``answer``; whoever drains the server calls ``stop``."""

    def __init__(self, call: WireCall) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._busy = False
        self._stopping = False
        self._finished = False

    def work(self) -> bool:
        """A request came. False if the stream has ended."""
        with self._lock:
            self._busy = not self._finished
            return self._busy

    def answer(self, reply: bytes, received: Callable[[bytes | None], None]) -> None:
        """Send the reply, and wait for the next request: nothing else is to be done."""
        with self._lock:
            self._call.exchange(reply, received)
            self._busy = False
            if self._stopping:
                self._finish(_draining())

    def stop(self) -> None:
        """End the stream: at once if it waits for its client, else after the current request."""
        with self._lock:
            self._stopping = True
            if not self._busy:
                self._finish(_draining())

    def complete(self) -> None:
        """The client has sent its last request."""
        with self._lock:
            self._finish(None)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        if self._finished:
            return
        self._finished = True
        if error is None:
            self._call.finish()
        else:
            self._call.fail(error)


class Streams:
    """All open execution streams of the server."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._open: set[OpenStream] = set()
        self._stopping = False

    def open(self, call: WireCall) -> OpenStream:
        """Count a stream until its call has ended. Raises ``ResourceExhaustedError`` at the limit."""
        stream = OpenStream(call)
        with self._lock:
            if self._stopping:
                raise _draining()
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
        if not call.on_end(lambda: self._gone(stream)):
            self._gone(stream)
        return stream

    def _gone(self, stream: OpenStream) -> None:
        with self._lock:
            self._open.discard(stream)

    def stop(self) -> None:
        """End all streams, see ``OpenStream.stop``; no new ones are taken."""
        with self._lock:
            self._stopping = True
            streams = list(self._open)
        for stream in streams:
            stream.stop()


def _draining() -> UnavailableError:
    return UnavailableError("the server is shutting down", rule="draining", fix="use another server")
