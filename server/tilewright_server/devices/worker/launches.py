"""Serving the launches of one client connection: parse frames, launch, answer in order, until the client goes away.

One thread serves a connection. Others bind and unbind meanwhile; a lock keeps them out while a packet is launched.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from tilewright_kit.errors import DeviceError, InvalidArgumentError, NotFoundError, TilewrightError, UnsupportedError
from tilewright_server.devices.base import RECORD, REPLY, TIME, WAIT, DeviceLostError, LaunchStream, Program
from tilewright_server.devices.worker.frames import (
    HEADER,
    HEADER_BYTES,
    MAX_FRAMES,
    REPLY_KIND,
    Kind,
    error_packet,
    malformed,
    packet,
)

__all__ = ["LaunchLoop", "SynchronousStream"]

log = logging.getLogger(__name__)

_FLAGS = WAIT | RECORD | TIME
_ANSWERED = REPLY | TIME
_PACKET_BYTES = MAX_FRAMES * HEADER_BYTES
_RECEIVED_BYTES = _PACKET_BYTES + 1
"""One more than the longest packet, so that a longer one shows."""


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
        note: Callable[[int], None] | None = None,
        lost: Callable[[DeviceLostError], None] | None = None,
    ) -> None:
        """``note`` is told of each binding before it is launched; ``lost`` of the end of the device, after the client
        was answered."""
        self.workspace = 0
        """Address that programs get; changed with ``lock`` held and the stream empty."""
        self.lock = threading.RLock()
        self._connection = connection
        self._stream = stream
        self._note = note
        self._lost = lost
        self._bindings: dict[int, tuple[Program, tuple[int, ...]]] = {}
        self._closed = False

    @property
    def is_synchronous(self) -> bool:
        """Whether nothing runs any more when a launch returns."""
        return isinstance(self._stream, SynchronousStream)

    def bind(self, binding: int, program: Program, addresses: Sequence[int]) -> None:
        """Let the client launch this as ``binding``. Raises ``NotFoundError`` after the connection's end."""
        with self.lock:
            self.require_open()
            self._bindings[binding] = (program, tuple(addresses))

    def require_open(self) -> None:
        """Raise ``NotFoundError`` after the connection's end."""
        if self._closed:
            raise NotFoundError(
                "the connection has ended", field="connection", rule="connection_id", fix="open another connection"
            )

    def unbind(self, binding: int) -> None:
        """Forget it; when this returns, what it uses may be given back. No error if there is none."""
        with self.lock:
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
        buffer = bytearray(_RECEIVED_BYTES)
        view = memoryview(buffer)
        receive, send = self._connection.recv_into, self._connection.send
        try:
            while count := receive(buffer):
                for reply in self._handle(view[:count]):
                    send(reply)
        except OSError:  # as good as a hang-up
            pass
        finally:
            self._end()

    def _end(self) -> None:
        with self.lock:
            self._closed = True
            self._bindings.clear()
            try:
                self._stream.close()
            except DeviceLostError as error:
                if self._lost is not None:
                    self._lost(error)
            except DeviceError as error:
                log.warning("a stream did not end well: %s", error)
        self._connection.close()

    def _handle(self, data: memoryview) -> list[bytes]:
        """Replies to one packet."""
        if len(data) < HEADER_BYTES or len(data) > _PACKET_BYTES:
            return [error_packet(data[0], 0, 0, malformed("a packet of that length means nothing here", len(data)))]
        if data[0] == Kind.LAUNCH:
            if len(data) % HEADER_BYTES:
                error = malformed("a packet of launches is whole frames", len(data))
                return [error_packet(Kind.LAUNCH, 0, 0, error)]
            return self._launches(data)
        return [self._other(data)]

    def _launches(self, data: memoryview) -> list[bytes]:
        replies: list[bytes] = []
        launch, note = self._stream.launch, self._note
        with self.lock:
            bindings, workspace = self._bindings, self.workspace
            for kind, flags, slot, sequence, value in HEADER.iter_unpack(data):
                try:
                    if kind != Kind.LAUNCH:
                        raise malformed("a packet of launches holds nothing else", kind)
                    program, addresses = bindings[value]
                    if note is not None:
                        note(value)
                    device_ns = launch(program, addresses, flags & _FLAGS, slot, workspace)
                    if flags & _ANSWERED:
                        replies.append(HEADER.pack(Kind.LAUNCH | REPLY_KIND, 0, slot, sequence, device_ns or 0))
                except Exception as error:  # noqa: PERF203 - one failure must not end the others
                    replies.append(self._failed(kind, slot, sequence, value, error))
        return replies

    def _other(self, data: memoryview) -> bytes:
        kind, _, slot, sequence, _ = HEADER.unpack_from(data)
        try:
            if kind != Kind.OPEN_EVENT:
                raise malformed("this connection carries launches only", kind)
            with self.lock:
                handle = self._stream.open_event(slot, bytes(data[HEADER_BYTES:]))
            return packet(kind | REPLY_KIND, 0, slot, sequence, 0, handle)
        except Exception as error:
            return self._failed(kind, slot, sequence, 0, error)

    def _failed(self, kind: int, slot: int, sequence: int, value: int, error: Exception) -> bytes:
        if isinstance(error, KeyError) and value not in self._bindings:
            error = NotFoundError(
                "this connection has no such binding",
                field="binding",
                value=value,
                rule="binding_id",
                fix="bind again: bindings end with their memory, their plan and their connection",
            )
        reply = error_packet(kind, slot, sequence, error)
        if isinstance(error, DeviceLostError) and self._lost is not None:
            with suppress(OSError):
                self._connection.send(reply)
            self._lost(error)
        elif not isinstance(error, TilewrightError):
            log.error("a launch failed", exc_info=error)
        return reply
