"""Serving the launches of one client connection: parse frames, launch, answer in order, until the client goes away.

One thread serves a connection. Others bind and unbind meanwhile; a lock keeps them out while something is launched.
Streams of GPUs serve packets by themselves (``ServingStream``), without the interpreter, and leave to this module what
is not prepared, what fails, and what is no launch. Those of other devices are launched here, frame by frame.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from tilewright_kit.types.errors import (
    DeviceError,
    InvalidArgumentError,
    NotFoundError,
    TilewrightError,
    UnsupportedError,
)
from tilewright_server.devices.contract import (
    RECORD,
    REPLY,
    TIME,
    WAIT,
    DeviceLostError,
    LaunchStream,
    Program,
    ServedPacket,
    ServingStream,
    SignalStream,
)
from tilewright_server.devices.tracing import PacketTimes, TracedSink, TracingStream
from tilewright_server.protocol.frames import (
    ERROR,
    HEADER,
    HEADER_BYTES,
    MAX_FRAMES,
    REPLY_KIND,
    TIED,
    Kind,
    error_packet,
    malformed,
    packet,
)
from tilewright_server.protocol.request_ids import new_id, printable
from tilewright_server.protocol.request_ids import serve as serve_request

__all__ = ["LaunchLoop", "SynchronousStream"]

log = logging.getLogger(__name__)

_FLAGS = WAIT | RECORD | TIME
_ANSWERED = REPLY | TIME
_NEVER = WAIT | TIME
"""Flags that would keep a thread of this process waiting for another process."""
_PACKET_BYTES = MAX_FRAMES * HEADER_BYTES
_RECEIVED_BYTES = _PACKET_BYTES + 1
"""One more than the longest packet, so that a longer one shows."""
_LAUNCH = int(Kind.LAUNCH)
_ANSWER = _LAUNCH | REPLY_KIND


class SynchronousStream:
    """A ``LaunchStream`` of programs that are run to their end: every launch waits, and says how long it took.

    There is nothing that another process could wait for, so it has no events.
    """

    gives_back_later = False

    def open_event(self, slot: int, handle: bytes) -> bytes:  # noqa: ARG002
        raise UnsupportedError(
            "this device has no events: its launches are complete when they are answered",
            field="slot",
            value=slot,
            rule="event_support",
            fix="launch without WAIT and RECORD, and ask for replies",
        )

    def launch(self, program: Program, addresses: Sequence[int], flags: int, slot: int, workspace: int = 0) -> int:
        if flags & (WAIT | RECORD):
            raise InvalidArgumentError(
                "the slot has no events", field="slot", value=slot, rule="event_slot", fix="open its events first"
            )
        return sum(program.run(addresses, workspace))

    def synchronize(self) -> None:
        """Nothing is ever under way between launches."""

    def close(self) -> None:
        """Nothing to give back."""


class LaunchLoop:
    """A connection and what may be launched over it. ``serve`` runs in the connection's own thread."""

    def __init__(
        self,
        connection: socket.socket,
        stream: LaunchStream,
        *,
        note: memoryview | None = None,
        lost: Callable[[DeviceLostError], None] | None = None,
        events: Callable[[], str] | None = None,
        signals: Callable[[], str] | None = None,
        traced: TracedSink | None = None,
    ) -> None:
        """``events`` and ``signals`` say why this client's stream cannot be tied by them, or nothing. ``note`` is where
        each launch leaves the number of its program and the time, two words; ``lost`` is told of the end of the
        device, after the client was answered, and ``traced`` of packets that the client wants traced."""
        self._serving = stream if isinstance(stream, ServingStream) else None
        self.lock: AbstractContextManager[Any] = self._serving.lock if self._serving is not None else threading.RLock()
        self._connection = connection
        self._stream = stream
        self._note = note
        if note is not None and self._serving is not None:
            self._serving.note_in(note)
        self._lost = lost
        self._events = events
        self._signals = signals
        self._traced = traced
        self._context = b""
        """Context of the next packet, on streams that cannot measure one."""
        self._given = ""
        self._name = new_id()
        self._sequence = 0
        self._bindings: dict[int, tuple[Program, tuple[int, ...], int]] = {}
        self._device_ns = self._launches = 0
        self._workspace = 0
        self._closed = False

    @property
    def request(self) -> str:
        """Id of the packet that is served: the one that the client gave, or one by its sequence number."""
        return self._given or f"{self._name}-{self._sequence}"

    @property
    def is_synchronous(self) -> bool:
        """True if nothing runs any more when a launch returns."""
        return isinstance(self._stream, SynchronousStream)

    @property
    def workspace(self) -> int:
        """Address that programs get; changed with ``lock`` held and the stream empty."""
        return self._workspace

    @workspace.setter
    def workspace(self, address: int) -> None:
        self._workspace = address
        if self._serving is not None:
            self._serving.forget_all()

    def bind(self, binding: int, program: Program, addresses: Sequence[int], number: int = 0) -> None:
        """Let the client launch this as ``binding``; ``number`` names the program in the note of a launch. Raises
        ``NotFoundError`` after the connection's end."""
        with self.lock:
            self.require_open()
            self._forget(binding)
            self._bindings[binding] = (program, tuple(addresses), number)

    def _forget(self, binding: int) -> None:
        if self._serving is not None:
            self._serving.forget(binding)

    def require_open(self) -> None:
        """Raise ``NotFoundError`` after the connection's end."""
        if self._closed:
            raise NotFoundError(
                "the connection has ended", field="connection", rule="connection_id", fix="open another connection"
            )

    def unbind(self, binding: int) -> None:
        """Forget it; when this returns, what it uses may be given back. No error if there is none."""
        with self.lock:
            self._forget(binding)
            if self._bindings.pop(binding, None) is not None:
                self.settle()

    def settle(self) -> None:
        """Return when what launches use may be given back."""
        with self.lock:
            if not self._closed and not self._stream.gives_back_later:
                self._stream.synchronize()

    def hang_up(self) -> None:
        """End the connection from this side: ``serve`` returns soon."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        """Until the client hangs up. The stream and the connection are closed then, and all bindings forgotten."""
        serve_request(self)
        try:
            if self._serving is not None:
                self._serve_packets(self._serving)
            else:
                self._serve_frames()
        except OSError:  # as good as a hang-up
            pass
        except DeviceLostError as error:
            if self._lost is not None:
                self._lost(error)
        finally:
            self._end()
            serve_request(None)

    def _serve_packets(self, stream: ServingStream) -> None:
        connection, skip = self._connection.fileno(), False
        while (found := stream.serve(connection, skip)) is not None:
            replies = self._unserved(stream, found) if found.is_launch else self._handle(memoryview(found.data))
            skip = bool(replies) and found.is_launch
            for reply in replies:
                self._connection.send(reply)

    def _unserved(self, stream: ServingStream, found: ServedPacket) -> list[bytes]:
        """The answer to a launch that failed or cannot be made; nothing once it was prepared."""
        kind, flags, slot, sequence, binding = HEADER.unpack(found.data)
        try:
            if found.error is not None:
                raise found.error
            _check_frame(kind, flags)
            with self.lock:
                program, addresses, number = self._bindings[binding]
                stream.prepare(binding, program, addresses, self._workspace, flags & _FLAGS, slot, number)
        except Exception as error:
            tied = self._tied(stream, kind, flags, slot, sequence, error)
            return [self._failed(kind, slot, sequence, binding, error, tied)]
        return []

    @staticmethod
    def _tied(stream: ServingStream, kind: int, flags: int, slot: int, sequence: int, error: Exception) -> bool:
        """Keep the order of other launches and the client's stream, which the one that failed was to keep; False if
        that cannot be, or there was nothing to do.
        """
        if kind != _LAUNCH or not flags & (WAIT | RECORD) or flags & TIME or isinstance(error, DeviceLostError):
            return False
        with suppress(TilewrightError):
            stream.tie(flags & _FLAGS, slot, sequence)
            return True
        return False

    def _serve_frames(self) -> None:
        buffer = bytearray(_RECEIVED_BYTES)
        view = memoryview(buffer)
        while count := self._connection.recv_into(buffer):
            for reply in self._handle(view[:count]):
                self._connection.send(reply)

    def _end(self) -> None:
        with self.lock:
            self._closed = True
            self._bindings.clear()
            if self._serving is not None:
                self._serving.forget_all()
            try:
                self._stream.close()
            except DeviceLostError as error:
                if self._lost is not None:
                    self._lost(error)
            except DeviceError as error:
                log.warning("a stream did not end well: %s", error)
        self._connection.close()

    def poll_traces(self) -> None:
        """Tell of traced packets that have ended. Never waits."""
        if isinstance(self._stream, TracingStream) and not self._closed:
            self._stream.poll_traces()

    def _trace(self, context: bytes) -> None:
        """The next packet is part of a trace."""
        if self._traced is None:
            return
        if isinstance(self._stream, TracingStream):
            self._stream.trace(partial(self._traced, context))
        else:
            self._context = context

    def _run(self, data: memoryview) -> list[bytes]:
        """Launch the frames of a packet; their answers."""
        context, self._context = self._context, b""
        began = time.time_ns() if context else 0
        self._device_ns = self._launches = 0
        answers = [answer for frame in HEADER.iter_unpack(data) if (answer := self._launched(*frame))]
        if context and self._traced is not None:
            self._traced(context, PacketTimes(began, time.time_ns(), self._device_ns, self._launches, waits=True))
        return answers

    def _handle(self, data: memoryview) -> list[bytes]:
        """Replies to one packet."""
        if len(data) < HEADER_BYTES or len(data) > _PACKET_BYTES:
            return [error_packet(data[0], 0, 0, malformed("a packet of that length means nothing here", len(data)))]
        if data[0] == Kind.LAUNCH:
            if len(data) % HEADER_BYTES:
                error = malformed("a packet of launches is whole frames", len(data))
                return [error_packet(Kind.LAUNCH, 0, 0, error)]
            return self._run(data)
        return [answer] if (answer := self._other(data)) else []

    def _launched(self, kind: int, flags: int, slot: int, sequence: int, value: int) -> bytes:
        """Launch what a frame asks for; the answer, if it wants one or failed."""
        try:
            with self.lock:
                _check_frame(kind, flags)
                program, addresses, number = self._bindings[value]
                if self._note is not None:
                    self._note[0], self._note[1] = number, time.monotonic_ns()
                device_ns = self._stream.launch(program, addresses, flags & _FLAGS, slot, self._workspace)
        except Exception as error:
            return self._failed(kind, slot, sequence, value, error)
        self._launches += 1
        self._device_ns += device_ns
        return HEADER.pack(_ANSWER, 0, slot, sequence, device_ns or 0) if flags & _ANSWERED else b""

    def _opened_signals(self, slot: int, sequence: int) -> bytes:
        """The answer, or nothing once it was sent, with a descriptor."""
        stream = self._stream
        if not isinstance(stream, SignalStream):
            raise _untied(slot, "signals", "streams of this kind of device are tied in other ways")
        if self._signals is not None and (why := self._signals()):
            raise _untied(slot, "signals", why)
        with self.lock:
            file = stream.open_signals()
        try:
            socket.send_fds(self._connection, [packet(Kind.OPEN_SIGNALS | REPLY_KIND, 0, slot, sequence)], [file])
        finally:
            os.close(file)
        return b""

    def _other(self, data: memoryview) -> bytes:
        kind, _, slot, sequence, _ = HEADER.unpack_from(data)
        try:
            if kind == Kind.OPEN_SIGNALS:
                return self._opened_signals(slot, sequence)
            if kind == Kind.TRACE:
                self._trace(bytes(data[HEADER_BYTES:]))
                return b""
            if kind == Kind.REQUEST:
                self._given = printable(bytes(data[HEADER_BYTES:]))
                return b""
            if kind != Kind.OPEN_EVENT:
                raise malformed("this connection carries launches only", kind)
            if self._events is not None and (why := self._events()):
                raise _untied(slot, "events", why)
            with self.lock:
                handle = self._stream.open_event(slot, bytes(data[HEADER_BYTES:]))
            return packet(kind | REPLY_KIND, 0, slot, sequence, 0, handle)
        except Exception as error:
            return self._failed(kind, slot, sequence, 0, error)

    def _failed(self, kind: int, slot: int, sequence: int, value: int, error: Exception, tied: bool = False) -> bytes:
        if isinstance(error, KeyError) and value not in self._bindings:
            error = NotFoundError(
                "this connection has no such binding",
                field="binding",
                value=value,
                rule="binding_id",
                fix="bind again: bindings end with their memory, their plan and their connection",
            )
        self._sequence = sequence
        reply = error_packet(kind, slot, sequence, error, ERROR | TIED if tied else ERROR)
        if isinstance(error, DeviceLostError) and self._lost is not None:
            with suppress(OSError):
                self._connection.send(reply)
            self._lost(error)
        elif isinstance(error, TilewrightError):
            fields = {"field": error.field, "rule": error.rule}
            log.info("refused: %s", error.reason, extra={"fields": fields})
        else:
            log.error("a launch failed", exc_info=error)
        return reply


def _check_frame(kind: int, flags: int) -> None:
    if kind != _LAUNCH:
        raise malformed("a packet of launches holds nothing else", kind)
    if flags & _NEVER == _NEVER:
        raise _never(flags)


def _untied(slot: int, what: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} do not keep the order of launches here: {why}",
        field="slot",
        value=slot,
        rule=f"{what[:-1]}_support",
        fix="wait for the stream, launch with TIME, and use the result when that is answered",
    )


def _never(flags: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        "a launch that waits for an event of another process cannot be waited for here",
        field="flags",
        value=flags,
        rule="launch_flags",
        fix="launch with WAIT and RECORD, or with TIME when the event has been passed",
    )
