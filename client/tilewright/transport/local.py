"""The local socket: descriptors to the server, and launches without gRPC. See ``local.proto``.

A client has one connection for calls; launches go over others, ``lanes``. All of this blocks, for as long as the
server needs for a packet.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from tilewright.errors import (
    DeadlineError,
    InternalError,
    TilewrightError,
    UnavailableError,
    UnknownOutcomeError,
    from_detail,
    outcome_unknown,
    unbegun,
)
from tilewright.transport import frames
from tilewright.transport.frames import HEADER
from tilewright.transport.request_ids import given
from tilewright.transport.tracing import local_span
from tilewright_proto.v1 import error_pb2, local_pb2

__all__ = ["Connection", "Control", "Reply", "open_control"]

HELLO_TIMEOUT_S = 5.0
SPIN_NS = 50_000
"""How long a connection that spins looks for a reply before it sleeps: being woken takes longer than most replies."""
_NOW = int(socket.MSG_DONTWAIT)
_SEND_NOW = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_UNPACK = HEADER.unpack_from
_SPACE = socket.CMSG_SPACE(4 * 4)
_CREDENTIALS = struct.Struct("3i")


class Reply:
    """A reply's value, payload and the descriptors that came with it, which the taker closes."""

    __slots__ = ("fds", "payload", "value")

    def __init__(self, value: int, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        self.value = value
        self.payload = payload
        self.fds = fds


class Connection:
    """One connection, introduced to the server. Not thread-safe."""

    takes_descriptors = False

    def __init__(self, path: str, token: bytes, timeout: float | None) -> None:
        """Raises ``OSError`` if nobody listens there, ``TilewrightError`` if the server refuses."""
        self.path = path
        self.token = token
        self.timeout = timeout
        self.sequence = 0
        self.broken = ""
        """Why it cannot be used any more."""
        self.traces = False
        """The server takes the contexts of traces."""
        self._told: str | None = None
        """Id that the server has for what comes next; None: it takes none."""
        self.tied = -1
        """Sequence of the last launch that failed and left the order of streams whole."""
        self.spin_ns = 0
        """How long ``ask`` looks for its reply before it sleeps."""
        self._buffer = bytearray(frames.PACKET_BYTES)
        self._stash: dict[int, Reply | TilewrightError] = {}
        self._unwanted: set[int] = set()
        self._pid = os.getpid()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self.socket.settimeout(HELLO_TIMEOUT_S)
            self.socket.connect(path)
            self._introduce(token)
            self.socket.settimeout(None)
            if timeout is not None:
                # The kernel's own timeout: Python's would cost a poll() for every packet.
                whole = int(timeout)
                limit = struct.pack("@ll", whole, int((timeout - whole) * 1e6) or (not whole))
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        except BaseException:
            self.socket.close()
            raise

    def _introduce(self, token: bytes) -> None:
        self.send(HEADER.pack(frames.HELLO, 0, 0, self.next_sequence(), frames.VERSION) + token)
        # Whatever its number: a server that has no room answers before it has read anything.
        _, reply = self._receive()
        if isinstance(reply, TilewrightError):
            raise reply
        hello = local_pb2.HelloReply.FromString(reply.payload)
        self.traces = hello.traces
        self._told = "" if hello.requests else None

    def request(self, kind: int, value: int, payload: bytes = b"", fds: Sequence[int] = (), slot: int = 0) -> Reply:
        """Send a packet and wait for its reply. Raises what the server answers, ``UnavailableError`` if it went away,
        ``DeadlineError`` after the timeout.
        """
        sequence = self.next_sequence()
        data = HEADER.pack(kind, 0, slot, sequence, value) + payload
        self.send(data, fds)
        try:
            return self.wait(sequence)
        except UnknownOutcomeError:  # whatever it did ended with the connection
            raise self._gone() from None

    def announce(self, context: str) -> bool:
        """Say which trace the next packet is part of. False if the server does not want to know."""
        if self.traces:
            data = context.encode()
            if len(data) > frames.CONTEXT_BYTES:
                data = data.partition(b"\n")[0]
            self.send(HEADER.pack(frames.TRACE, 0, 0, 0, 0) + data)
        return self.traces

    def name_requests(self) -> None:
        """Tell the server the id that the program gives to what it asks for now, if it knows another one."""
        name = given.get()
        if name != self._told and self._told is not None:
            self.send(HEADER.pack(frames.REQUEST, 0, 0, 0, 0) + name.encode())
            self._told = name

    def post(self, data: bytes | bytearray) -> None:
        """Send a packet of launches that nobody waits for here."""
        self.name_requests()
        self.send(data)

    def next_sequence(self) -> int:
        sequence = self.sequence = (self.sequence + 1) & 0xFFFFFFFF
        return sequence

    def send(self, data: bytes | bytearray, fds: Sequence[int] = ()) -> None:
        """Send a packet. While the server does not take it, its replies are taken, so that neither waits for ever."""
        if self.broken:
            raise self._gone()
        while not self._try_send(data, fds):
            self._make_room()

    def _try_send(self, data: bytes | bytearray, fds: Sequence[int]) -> bool:
        try:
            if fds:
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                self.socket.sendmsg([data], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            else:
                self.socket.send(data, _SEND_NOW)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._break(error) from None
        return True

    def _make_room(self) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLIN | select.POLLOUT)
        for _, events in poll.poll(None if self.timeout is None else self.timeout * 1000) or [(0, 0)]:
            if events & select.POLLIN:
                self._file(*self._receive())
            elif not events:
                raise self._late()

    def wait(self, sequence: int) -> Reply:
        """The reply to a packet that was sent. Replies to others are kept for those who wait for them."""
        try:
            while sequence not in self._stash:
                got, reply = self._receive()
                if got == sequence:
                    break
                self._file(got, reply)
            else:
                reply = self._stash.pop(sequence)
        except BaseException:
            # Interrupted or too late: its reply comes some time, and is nobody's.
            self._unwanted.add(sequence)
            raise
        if isinstance(reply, TilewrightError):
            raise reply
        return reply

    def ask(self, data: bytes, sequence: int) -> int:
        """Send a packet of launches, the last one number ``sequence``, and return the value of that one's reply. Raises
        as ``request`` does, and ``UnknownOutcomeError`` if the server went away after it was sent.
        """
        if self.broken:
            raise self._gone()
        if given.get() != self._told:
            self.name_requests()
        if not self._try_send(data, ()):
            self.send(data)
        try:
            size = self._look() or self._read()[0]
            if size == HEADER.size:
                _, flags, _, got, value = _UNPACK(self._buffer)
                if got == sequence and not flags:
                    return int(value)
            self._file(*self._parsed(size, ()))
        except BaseException:
            self._unwanted.add(sequence)
            raise
        return self.wait(sequence).value

    def _look(self) -> int:
        """Bytes of the packet that comes within ``spin_ns``; 0 if none does, or the end."""
        if not self.spin_ns:
            return 0
        receive, buffer, now = self.socket.recv_into, self._buffer, time.perf_counter_ns
        limit = now() + self.spin_ns
        while True:
            try:
                return receive(buffer, 0, _NOW)
            except BlockingIOError:  # noqa: PERF203 - that is how it looks
                if now() > limit:
                    return 0
                os.sched_yield()  # to whoever else wants this CPU
            except OSError as error:
                raise self._break(error, sent=True) from None

    def _file(self, sequence: int, reply: Reply | TilewrightError) -> None:
        if sequence in self._unwanted:
            self._unwanted.discard(sequence)
            _close(reply)
        else:
            self._stash[sequence] = reply

    def take(self, first: int, count: int) -> dict[int, Reply | TilewrightError]:
        """Replies that came to the ``count`` packets from sequence ``first`` on, by their distance to it."""
        wanted = [number for number in self._stash if (number - first) & 0xFFFFFFFF < count]
        return {(number - first) & 0xFFFFFFFF: self._stash.pop(number) for number in wanted}

    def _receive(self) -> tuple[int, Reply | TilewrightError]:
        if self.broken:
            raise self._gone(sent=True)
        return self._parsed(*self._read())

    def _read(self) -> tuple[int, Sequence[tuple[int, int, bytes]]]:
        """Wait for a packet. Its size, and what came with it."""
        buffer = self._buffer
        try:
            if self.takes_descriptors:
                size, ancillary, _, _ = self.socket.recvmsg_into([buffer], _SPACE, socket.MSG_CMSG_CLOEXEC)
                return size, ancillary
            return self.socket.recv_into(buffer), ()
        except (TimeoutError, BlockingIOError):
            raise self._late() from None
        except OSError as error:
            raise self._break(error, sent=True) from None

    def _parsed(self, size: int, ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[int, Reply | TilewrightError]:
        buffer = self._buffer
        if size < HEADER.size:
            raise self._break(None if size else "the server closed it", sent=True)
        _, flags, _, sequence, value = HEADER.unpack_from(buffer)
        payload = bytes(memoryview(buffer)[HEADER.size : size]) if size > HEADER.size else b""
        if flags & frames.FAILED:
            if flags & frames.TIED:
                self.tied = sequence
            return sequence, _failure(payload)
        return sequence, Reply(value, payload, _descriptors(ancillary) if ancillary else ())

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"the server did not answer within {self.timeout or HELLO_TIMEOUT_S:g} s",
            field="timeout",
            rule="deadline",
            fix="allow more time: connect(call_timeout=...)",
        )

    def _break(self, error: Any, *, sent: bool = False) -> UnavailableError:
        self.broken = self.broken or str(error or "what came was no packet")
        self.close()
        return self._gone(sent=sent)

    def _gone(self, *, sent: bool = False) -> UnavailableError:
        """The error of a packet that the server may have had, or of one that was not ``sent``."""
        if sent:
            return outcome_unknown(f"the local connection to the server broke: {self.broken}")
        return unbegun(
            UnavailableError(
                f"the local connection to the server broke: {self.broken}",
                field="session",
                rule="local_socket",
                fix="start the server again if it is gone, then call reconnect() or make a new client",
            )
        )

    def close(self) -> None:
        """Close it; who waits for a reply is woken. In a forked child the parent goes on using it."""
        self.broken = self.broken or "it was closed"
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def __del__(self) -> None:
        if hasattr(self, "socket"):
            self.socket.close()


class _CallConnection(Connection):
    takes_descriptors = True


def _failure(payload: bytes) -> TilewrightError:
    try:
        return from_detail(error_pb2.ErrorDetail.FromString(payload))
    except DecodeError:
        return InternalError("the server's error could not be read", rule="local_socket")


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[int, ...]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            part = array.array("i")
            part.frombytes(data[: len(data) - len(data) % part.itemsize])
            found += part
    return tuple(found)


def _close(reply: Reply | TilewrightError) -> None:
    for fd in reply.fds if isinstance(reply, Reply) else ():
        with contextlib.suppress(OSError):
            os.close(fd)


class Control:
    """The connection for calls. Thread-safe: one call at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    @property
    def path(self) -> str:
        return self._connection.path

    @property
    def broken(self) -> str:
        """Why it cannot be used any more; empty while it can."""
        return self._connection.broken

    def is_own(self) -> bool:
        """True if the server belongs to this process' user, or to root: then what it sends may be run here."""
        data = self._connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(data)[1]) in (os.geteuid(), 0)

    def call(self, method: int, request: bytes, fds: Sequence[int] = ()) -> Reply:
        """Call one of the methods of ``frames`` with a serialised request."""
        with self._lock:
            connection = self._connection
            span = local_span(frames.METHODS[method]) if connection.traces else None
            connection.name_requests()
            if span is None:
                return connection.request(frames.CALL, method, request, fds)
            with span:
                connection.announce(span.context)
                return connection.request(frames.CALL, method, request, fds)

    def close(self) -> None:
        self._connection.close()


def open_control(paths: Sequence[str], token: bytes, timeout: float | None) -> Control | None:
    """The connection for calls at the first of ``paths`` where the server takes this client; ``None`` if it does at
    none: it is on another machine, or in a container that shows other files, or of another user. gRPC does the same
    then.
    """
    for path in dict.fromkeys(filter(None, paths)):
        with contextlib.suppress(OSError, TilewrightError):
            return Control(_CallConnection(path, token, timeout))
    return None
