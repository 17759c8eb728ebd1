"""Open execution streams: how many there may be, and how they end when the server does."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tilewright_kit.types.errors import ResourceExhaustedError, UnavailableError
from tilewright_server.clients.client import Client
from tilewright_server.endpoints.rpc.transport.calls import WireCall
from tilewright_server.session.quotas import Quotas, Resource

__all__ = ["OpenStream", "Streams"]


class OpenStream:
    """One stream. Whoever serves it calls ``work`` and ``answer``; whoever drains the server calls ``stop``."""

    def __init__(self, call: WireCall) -> None:
        self._call = call
        self.client = call.client
        """Charged for it."""
        self.heard = False
        """A request has come."""
        self._lock = threading.Lock()
        self._busy = False
        self._stopping = False
        self._finished = False

    def work(self) -> bool:
        """A request came. False if the stream has ended."""
        with self._lock:
            self._busy = not self._finished
            return self._busy

    def answer(self, reply: bytes, received: Callable[[bytes | None], None], later: Callable[[], None]) -> None:
        """Send the reply, and wait for the next request: nothing else is to be done. See ``WireCall.exchange``."""
        with self._lock:
            self._call.exchange(reply, received, later)
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

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._lock = threading.Lock()
        self._open: dict[OpenStream, None] = {}
        """In the order of their opening."""
        self._stopping = False

    def open(self, call: WireCall) -> OpenStream:
        """Count a stream until its call has ended. Raises ``ResourceExhaustedError`` beyond the quota, unless a stream
        that has said nothing yet can give way."""
        stream = OpenStream(call)
        with self._lock:
            if self._stopping:
                raise _draining()
        try:
            self._quotas.take(Resource.STREAMS, stream.client)
        except ResourceExhaustedError as error:
            if not self._evict(stream, error):
                raise
        with self._lock:
            self._open[stream] = None
        if not call.on_end(lambda: self._gone(stream)):
            self._gone(stream)
        return stream

    def heard(self, stream: OpenStream, client: Client) -> None:
        """A request has come, by which the client is known."""
        with self._lock:
            stream.heard = True
            if stream not in self._open or client.process == stream.client.process:
                return
            old, stream.client = stream.client, client
            self._quotas.move({Resource.STREAMS: 1}, old, client)

    def _evict(self, new: OpenStream, error: ResourceExhaustedError) -> bool:
        """Give a stream the place of the oldest of the same client that has said nothing. False if there is none."""
        with self._lock:
            silent = (item for item in self._open if not item.heard and item.client.process == new.client.process)
            oldest = next(silent, None)
            if oldest is None:
                return False
            del self._open[oldest]
        oldest.fail(error)
        return True

    def _gone(self, stream: OpenStream) -> None:
        with self._lock:
            if self._open.pop(stream, self) is self:  # its place is another's
                return
            client = stream.client
        self._quotas.give(Resource.STREAMS, client)

    def stop(self) -> None:
        """End all streams, see ``OpenStream.stop``; no new ones are taken."""
        with self._lock:
            self._stopping = True
            streams = list(self._open)
        for stream in streams:
            stream.stop()


def _draining() -> UnavailableError:
    return UnavailableError("the server is shutting down", rule="draining", fix="use another server")
