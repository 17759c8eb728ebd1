"""Connections of the local socket that carry launches: one for each thread on devices that the server runs itself, one
for each stream on devices whose launches are asynchronous.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from tilewright.errors import TilewrightError, UnavailableError, UnsupportedError, unbegun
from tilewright.gpu.driver import GpuDriver
from tilewright.transport import frames
from tilewright.transport.frames import HEADER
from tilewright.transport.local import SPIN_NS, Connection

__all__ = ["Lane", "Lanes", "NoLaneError", "StreamLane"]

T = TypeVar("T")

MAX_LANES = 12
"""Connections of one session and kind: beyond it threads share, and streams take turns. (A server allows a session
32 or so.)"""
PATIENCE_NS = 20_000
RETRY_AFTER = 63
"""A launch that was not over in this time makes so many after it go without waiting."""
_UNTIED = "event_support"
"""Rule of the server's refusal to tie streams by events."""
SLOTS = 4
"""Pairs of events of one stream: an event is used again by the launch after the next ones."""

_FRAME = HEADER.pack
_LAUNCH, _TIME, _ANSWERED = frames.LAUNCH, frames.TIME, frames.RECORD | frames.REPLY
_CPUS = len(os.sched_getaffinity(0))


class NoLaneError(UnavailableError):
    """A connection could not be made; nothing was launched. gRPC may still do."""

    repeatable = True


class Lane:
    """A connection whose launches are complete when they are answered. Thread-safe."""

    def __init__(self, path: str, token: bytes, timeout: float | None, device: str = "") -> None:
        self.lock = threading.RLock()
        self.device = device
        self.connection = Connection(path, token, timeout)
        if device:
            self.connection.request(frames.ATTACH, 0, device.encode())

    @property
    def broken(self) -> str:
        return self.connection.broken

    def run(self, binding: int) -> int:
        """Launch a binding and wait for its end. Returns its device time in nanoseconds."""
        with self.lock:
            connection = self.connection
            sequence = connection.next_sequence()
            return connection.ask(_FRAME(_LAUNCH, _TIME, 0, sequence, binding), sequence)

    def close(self) -> None:
        self.connection.close()

    def abandon(self) -> None:
        """In a forked child: close this process' descriptor, so that the parent's end is noticed when it comes."""
        self.connection.close()


class StreamLane(Lane):
    """A connection that is attached to a device: launches of one stream of this process, in order. Thread-safe."""

    def __init__(
        self, path: str, token: bytes, timeout: float | None, device: str, gpu: GpuDriver, ordinal: int, stream: int
    ) -> None:
        self.gpu = gpu
        self.ordinal = ordinal
        self.stream = stream
        self._slots: list[tuple[int, int]] = []
        """(producer event, completion event) by number."""
        self._turn = -1
        self.by_host = False
        """True if this process waits for its stream before it launches, and for launches before it goes on: the server
        has refused to tie the streams by events."""
        self._impatient = 0
        self._retained: deque[tuple[int, object]] = deque()
        super().__init__(path, token, timeout, device)
        if _CPUS >= 4:  # with fewer it would keep the server from answering
            self.connection.spin_ns = SPIN_NS

    def slot(self) -> int:
        """The next pair of events."""
        turn = (self._turn + 1) % SLOTS
        if turn == len(self._slots):
            self._slots.append(self._open(turn))
        self._turn = turn
        return turn

    def _open(self, slot: int) -> tuple[int, int]:
        gpu, ordinal = self.gpu, self.ordinal
        producer = gpu.new_event(ordinal)
        try:
            reply = self.connection.request(frames.OPEN_EVENT, 0, gpu.export_event(ordinal, producer), slot=slot)
            return producer, gpu.open_event(ordinal, reply.payload)
        except TilewrightError:
            gpu.destroy_event(ordinal, producer)
            raise

    def begin(self) -> tuple[int, int]:
        """A slot for launches that see what is on the stream now, and the flags of the first of them: to wait for the
        slot's producer event, unless there is nothing to wait for.
        """
        gpu = self.gpu
        # First of all: it refuses streams that are being captured. And two processes take turns on a GPU: what needs no
        # event must not make it turn to us for one.
        idle = gpu.idle(self.ordinal, self.stream)
        slot = 0 if self.by_host else self._tied_slot()
        if idle:
            return slot, 0
        if self.by_host:
            gpu.synchronize(self.ordinal, self.stream)
            return slot, 0
        gpu.record(self.ordinal, self._slots[slot][0], self.stream)
        return slot, frames.WAIT

    def _tied_slot(self) -> int:
        """The next slot, or 0 where events cannot tie the streams: from then on the host waits."""
        try:
            return self.slot()
        except UnsupportedError as error:
            if error.rule != _UNTIED:
                raise
            self.by_host = True
            return 0

    def finished(self, slot: int, stream: int) -> bool:
        """True if the launches up to the one of ``slot``, which were queued for ``stream``, are over."""
        if self.by_host:
            return True
        if self.gpu.trusts_shared_events:
            return self.gpu.finished(self.ordinal, self._slots[slot][1])
        self.follow(slot, stream)
        return self.gpu.idle(self.ordinal, stream)

    def finish(self, slot: int, stream: int) -> None:
        """Wait, on the host, for the launches up to the one of ``slot``, which were queued for ``stream``."""
        if self.by_host:
            return
        if self.gpu.trusts_shared_events:
            self.gpu.finish(self.ordinal, self._slots[slot][1])
        else:
            self.follow(slot, stream)
            self.gpu.synchronize(self.ordinal, stream)

    def launch(self, binding: int) -> int:
        """Launch a binding behind what is on the stream. Returns when the server has queued it, with its slot: waiting
        for the slot's completion event now means waiting for the launch.
        """
        with self.lock:
            connection, (slot, first) = self.connection, self.begin()
            sequence = connection.next_sequence()
            flags = _TIME if self.by_host else first | _ANSWERED
            connection.ask(_FRAME(_LAUNCH, flags, slot, sequence, binding), sequence)
            return slot

    def follow(self, slot: int, stream: int) -> bool:
        """Make a stream wait for the launches up to the one of ``slot``. True if they are over: then nothing is put on
        it.
        """
        if self.by_host:
            return True
        event = self._slots[slot][1]
        if self.gpu.trusts_shared_events and self._is_over_soon(event):
            return True
        self.gpu.wait(self.ordinal, stream, event)
        return False

    def _is_over_soon(self, event: int) -> bool:
        """True if an event passes within a short while. What waits on a stream makes the GPU turn to this process for
        it, which takes longer than a small kernel; so where launches were over in time lately, look on a little.
        """
        gpu, ordinal = self.gpu, self.ordinal
        if gpu.finished(ordinal, event):
            return True
        if self._impatient:
            self._impatient -= 1
            return False
        end = time.perf_counter_ns() + PATIENCE_NS
        while time.perf_counter_ns() < end:
            if gpu.finished(ordinal, event):
                return True
        self._impatient = RETRY_AFTER
        return False

    def close(self) -> None:
        if hasattr(self, "connection"):
            super().close()
        slots, self._slots = self._slots, []
        events = [event for pair in slots for event in pair] + [event for event, _ in self._retained]
        self._retained.clear()
        for event in events:
            with contextlib.suppress(TilewrightError):  # the context may be gone before the events are
                self.gpu.destroy_event(self.ordinal, event)

    def __del__(self) -> None:
        if hasattr(self, "_slots") and not sys.is_finalizing():
            self.close()

    def abandon(self) -> None:
        """In a forked child: the events are the parent's."""
        self._slots = []
        self._retained.clear()
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
