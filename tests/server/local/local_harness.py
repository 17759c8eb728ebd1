"""A client of the local socket that says exactly what a test wants it to say."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "rpc"))

from rpc_harness import Client, MemoryFile

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import error_pb2
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

HEADER = struct.Struct("<BBHIQ")
HELLO, CALL, LAUNCH, ATTACH, OPEN_EVENT, TRACE = 1, 2, 3, 4, 5, 7
REGISTER, BIND, UNBIND, EXPORT, UNREGISTER = 1, 2, 3, 4, 5
WAIT, RECORD, REPLY, TIME = 1, 2, 4, 8


class Reply(NamedTuple):
    kind: int
    flags: int
    slot: int
    sequence: int
    value: int
    payload: bytes

    @property
    def error(self) -> error_pb2.ErrorDetail | None:
        return error_pb2.ErrorDetail.FromString(self.payload) if self.flags & 1 else None


class Wire:
    """A connection. ``hello`` is sent unless ``token`` is None."""

    def __init__(self, path: str, token: bytes | None = None, timeout: float = 10.0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sequence = 0
        try:
            self.socket.settimeout(timeout)
            self.socket.connect(path)
            if token is not None:
                reply = self.ask(HELLO, 1, token)
                assert reply.error is None, reply.error
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([data], rights)

    def receive(self) -> Reply | None:
        """The next reply; None at the end of the connection."""
        try:
            data = self.socket.recv(1 << 17)
        except ConnectionResetError:
            return None
        return Reply(*HEADER.unpack(data[:16]), data[16:]) if data else None

    def ask(
        self, kind: int, value: int = 0, payload: bytes = b"", fds: Sequence[int] = (), flags: int = 0, slot: int = 0
    ) -> Reply:
        """Send one packet and take its reply."""
        self.sequence += 1
        self.send(HEADER.pack(kind, flags, slot, self.sequence, value) + payload, fds)
        reply = self.receive()
        assert reply is not None, "the server hung up"
        assert (reply.kind, reply.slot, reply.sequence) == (0x80 | kind, slot, self.sequence)
        return reply

    def call(self, method: int, request: Any, fds: Sequence[int] = ()) -> Reply:
        return self.ask(CALL, method, request.SerializeToString(), fds)

    def register(self, file: MemoryFile, nbytes: int | None = None) -> int:
        """Register by descriptor; returns the id."""
        request = mp.RegisterRegionRequest(attached={}, bytes=file.nbytes if nbytes is None else nbytes)
        reply = self.call(REGISTER, request, [file.fd])
        assert reply.error is None, reply.error
        assert mp.RegisterRegionReply.FromString(reply.payload).region == reply.value
        return reply.value

    def bind(self, plan: int, *locations: tp.Location, **more: Any) -> int:
        reply = self.call(BIND, bind_request(plan, *locations, **more))
        assert reply.error is None, reply.error
        return reply.value

    def launch(self, binding: int, flags: int = TIME) -> Reply:
        return self.ask(LAUNCH, binding, flags=flags)

    def is_closed(self) -> bool:
        """Whether the server hung up (in a moment)."""
        with contextlib.suppress(TimeoutError):
            while self.receive() is not None:
                pass
            return True
        return False


def bind_request(plan: int, *locations: tp.Location, **more: Any) -> dp.BindRequest:
    repeat = more.pop("repeat", 0)
    return dp.BindRequest(execution=dp.Execution(plan=plan, locations=locations, repeat=repeat), **more)


def launches(*bindings: int, flags: int = 0) -> bytes:
    """One packet of launches, numbered from 100."""
    return b"".join(HEADER.pack(LAUNCH, flags, 0, 100 + place, value) for place, value in enumerate(bindings))


def expect(reply: Reply | None, code: str, rule: str = "") -> error_pb2.ErrorDetail:
    """The reply is this error."""
    assert reply is not None, "the server hung up"
    assert reply.error is not None, reply
    assert (reply.error.code, reply.error.rule) == (code, rule or reply.error.rule), reply.error
    return reply.error


@contextlib.contextmanager
def session_of(address: str) -> Iterator[tuple[Client, Wire]]:
    """A session with one local connection."""
    with Client(address) as client, Wire(client.opened.local_socket, client.token) as wire:
        yield client, wire


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - counts, of a folder that changes
