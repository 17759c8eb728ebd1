"""Connections of the local socket that carry launches: one for each thread on devices that the server runs itself, one
for each stream on devices whose launches are asynchronous.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from tilewright.errors import TilewrightError, UnavailableError, unbegun
from tilewright.gpu.driver import GpuDriver
from tilewright.transport import frames
from tilewright.transport.frames import HEADER
from tilewright.transport.local import SPIN_NS, Connection
from tilewright.transport.ties import Tie, open_tie
from tilewright.transport.tracing import Returned, launching

__all__ = ["Lane", "Lanes", "NoLaneError", "StreamLane"]

T = TypeVar("T")

MAX_LANES = 12
"""Connections of one session and kind: beyond it threads share, and streams take turns. (A server allows a session
32 or so.)"""

_FRAME = HEADER.pack
_LAUNCH, _TIME = frames.LAUNCH, frames.TIME
_CPUS = len(os.sched_getaffinity(0))


class NoLaneError(UnavailableError):
    """A connection could not be made; nothing was launched. gRPC may still do."""

    repeatable = True


class Lane:
    """A connection whose launches are complete when they are answered. Thread-safe."""

    answers: Returned = "time"
    """Values of replies to launches."""

    def __init__(self, path: str, token: bytes, timeout: float | None, device: str = "") -> None:
        self.lock = threading.RLock()
        self.device = device
        self.connection = Connection(path, token, timeout)
        if device:
            self.connection.request(frames.ATTACH, 0, device.encode())
        connection, words = self.connection, {"tilewright.launch": "server"}
        self.ask = launching(connection.ask, "launch", words, self.answers, connection.announce)
        """``ask(packet, sequence)`` of the connection."""
        self.send = launching(connection.post, "launch", words, "", connection.announce)
        """``post(packet)`` of the connection."""

    @property
    def broken(self) -> str:
        return self.connection.broken

    def run(self, binding: int) -> int:
        """Launch a binding and wait for its end. Returns its device time in nanoseconds."""
        with self.lock:
            connection = self.connection
            sequence = connection.next_sequence()
            return self.ask(_FRAME(_LAUNCH, _TIME, 0, sequence, binding), sequence)

    def close(self) -> None:
        self.connection.close()

    def abandon(self) -> None:
        """In a forked child: close this process' descriptor, so that the parent's end is noticed when it comes."""
        self.connection.close()


class StreamLane(Lane):
    """A connection that is attached to a device: launches of one stream of this process, in order. Thread-safe."""

    answers = ""

    def __init__(
        self, path: str, token: bytes, timeout: float | None, device: str, gpu: GpuDriver, ordinal: int, stream: int
    ) -> None:
        self.gpu = gpu
        self.ordinal = ordinal
        self.stream = stream
        self._tie: Tie | None = None
        """How the streams are tied, once something was launched."""
        self._retained: deque[tuple[int, object]] = deque()
        super().__init__(path, token, timeout, device)
        if _CPUS >= 4:  # with fewer it would keep the server from answering
            self.connection.spin_ns = SPIN_NS

    @property
    def tie(self) -> Tie:
        if self._tie is None:
            self._tie = open_tie(self.connection, self.gpu, self.ordinal)
        return self._tie

    def begin(self) -> tuple[int, int]:
        """Slot and flags of a launch that sees what is on the stream now. See ``Tie``."""
        # First of all: it refuses streams that are being captured. And two processes take turns on a GPU: what needs no
        # event must not make it turn to us for one.
        idle = self.gpu.idle(self.ordinal, self.stream)
        return self.tie.begin(self.stream, idle)

    def launch(self, binding: int) -> int:
        """Launch a binding behind what is on the stream. Returns when the server has queued it, with the tie's mark of
        the launch.
        """
        with self.lock:
            connection, (slot, first) = self.connection, self.begin()
            tie, sequence = self.tie, connection.next_sequence()
            self.ask(_FRAME(_LAUNCH, first | tie.last, slot, sequence, binding), sequence)
            return tie.mark(slot, sequence)

    def close(self) -> None:
        if hasattr(self, "connection"):
            super().close()
        retained, self._retained = self._retained, deque()
        for event, _ in retained:
            with contextlib.suppress(TilewrightError):  # the context may be gone before the events are
                self.gpu.destroy_event(self.ordinal, event)
        if self._tie is not None:
            self._tie.close()

    def __del__(self) -> None:
        if hasattr(self, "_retained") and not sys.is_finalizing():
            self.close()

    def abandon(self) -> None:
        """In a forked child: the events are the parent's."""
        self._retained.clear()
        if self._tie is not None:
            self._tie.abandon()
        super().close()

    def retain(self, keep: object, stream: int) -> None:
        """Keep something alive until what is on the stream now is done: for memory whose owner knows no streams."""
        with self.lock:
            gpu, waiting = self.gpu, self._retained
            while waiting and gpu.finished(self.ordinal, waiting[0][0]):
                gpu.destroy_event(self.ordinal, waiting.popleft()[0])
            if keep:
                event = gpu.new_event(self.ordinal, shared=False)
                gpu.record(self.ordinal, event, stream)
                waiting.append((event, keep))


class Lanes:
    """The lanes of one session. Thread-safe."""

    def __init__(self, path: str, token: bytes, timeout: float | None) -> None:
        self._path = path
        self._token = token
        self._timeout = timeout
        self._lock = threading.Lock()
        self._own = threading.local()
        self._threads: weakref.WeakSet[Lane] = weakref.WeakSet()
        self._streams: dict[tuple[str, int], StreamLane] = {}
        self._closed = False

    def of_thread(self, device: str = "") -> Lane:
        """This thread's connection, attached to ``device`` if one is named; closed when the thread ends."""
        own: dict[str, Lane] = self._own.__dict__
        lane = own.get(device)
        if lane is None or lane.broken:
            with self._lock:
                self._check()
                lane = self._thread_lane(device)
                self._threads.add(lane)
            own[device] = lane
        return lane

    def _thread_lane(self, device: str) -> Lane:
        """One more connection; if there may be no more, one of another thread."""
        alike = [other for other in self._threads if other.device == device and not other.broken]
        try:
            if len(alike) < MAX_LANES:
                return self._open(lambda: Lane(self._path, self._token, self._timeout, device))
        except NoLaneError:
            if not alike:
                raise
        return alike[threading.get_ident() % len(alike)]

    def of_stream(self, device: str, gpu: GpuDriver, ordinal: int, stream: int) -> StreamLane:
        """The connection for a stream of this process, attached to the server's ``device``."""
        lane = self._streams.get((device, stream))
        if lane is None or lane.broken:
            with self._lock:
                self._check()
                lane = self._streams.get((device, stream))
                if lane is None or lane.broken:
                    lane = self._stream_lane(device, gpu, ordinal, stream)
                    self._streams[device, stream] = lane
        return lane

    def _stream_lane(self, device: str, gpu: GpuDriver, ordinal: int, stream: int) -> StreamLane:
        """One more connection, in place of the oldest if there may be no more. (Streams come and go, and nobody tells.
        Who still holds a lane goes on using it; it closes when it is not used any more.)
        """

        def make() -> StreamLane:
            return self._open(lambda: StreamLane(self._path, self._token, self._timeout, device, gpu, ordinal, stream))

        if len(self._streams) < MAX_LANES:
            try:
                return make()
            except NoLaneError:
                if not self._streams:
                    raise
        del self._streams[next(iter(self._streams))]
        return make()

    def _open(self, make: Callable[[], T]) -> T:
        try:
            return make()
        except (OSError, TilewrightError) as error:
            raise NoLaneError(
                f"the server takes no further local connection: {getattr(error, 'message', error)}",
                field="session",
                rule="local_socket",
                fix="start the server again if it is gone, then call reconnect(); or use fewer threads and streams",
            ) from None

    def _check(self) -> None:
        if self._closed:
            raise unbegun(
                UnavailableError("the session is over", field="session", rule="session_alive", fix="call again")
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for lane in (*self._threads, *self._streams.values()):
                lane.close()
            self._streams.clear()

    def after_fork(self) -> None:
        self._closed = True
        for lane in (*self._threads, *self._streams.values()):
            lane.abandon()
        self._streams.clear()
