"""The other end of the local socket, for tests: speaks the documented packets, writes down what came, and fails on
demand.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Any

from tilewright_proto.v1 import error_pb2

HEADER = Struct("<BBHIQ")
Call = Callable[[bytes, list[int]], tuple[int, bytes, int]]
"""(payload, descriptors) to (value, payload, descriptor or -1)."""


class Fault(Exception):
    def __init__(self, code: str = "not_found", rule: str = "binding_id") -> None:
        super().__init__(code)
        self.payload = error_pb2.ErrorDetail(code=code, message="asked to fail", rule=rule).SerializeToString()


class LocalPeer:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.calls: dict[int, Call] = {}
        self.launches: list[tuple[int, int, int, int]] = []
        """(binding, flags, slot, connection), in the order in which they came."""
        self.packets: list[int] = []
        """How many launches each packet held."""
        self.attached: list[str] = []
        self.tokens: list[bytes] = []
        self.opened_events: list[bytes] = []
        self.failing: set[int] = set()
        self.ties = False
        """Launches that fail say that the order of streams was kept."""
        self.refuse: Fault | None = None
        self.go = threading.Event()
        self.go.set()
        self.room = 1000
        self.ended = 0
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        """End all connections, as a server that dies does."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                if len(self._connections) >= self.room:
                    connection.send(HEADER.pack(0x81, 1, 0, 0, 0) + Fault("resource_exhausted", "quota").payload)
                    connection.close()
                    continue
                self._connections.append(connection)
                number = len(self._connections)
                threading.Thread(target=self._serve, args=(connection, number), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with connection, contextlib.suppress(OSError):
            while True:
                data, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(64))
                if not data:
                    break
                fds = array.array("i")
                for _, _, item in ancillary:
                    fds.frombytes(item)
                self.go.wait(60)
                if data[0] == 3:
                    self._launch(connection, data, number)
                else:
                    self._answer(connection, data, list(fds))
                for fd in fds:
                    os.close(fd)
        self.ended += 1

    def _launch(self, connection: socket.socket, data: bytes, number: int) -> None:
        self.packets.append(len(data) // 16)
        for kind, flags, slot, sequence, value in HEADER.iter_unpack(data):
            self.launches.append((value, flags, slot, number))
            if value in self.failing:
                failed = 3 if self.ties and flags & 3 else 1
                connection.send(HEADER.pack(0x80 | kind, failed, slot, sequence, 0) + Fault().payload)
            elif flags & 12:
                connection.send(HEADER.pack(0x80 | kind, 0, slot, sequence, 1234))

    def _answer(self, connection: socket.socket, data: bytes, fds: list[int]) -> None:
        kind, _, slot, sequence, value = HEADER.unpack_from(data)
        payload = data[16:]
        flags, fd = 0, -1
        answer: Any = b""
        try:
            if kind == 1:
                self.tokens.append(payload)
                if self.refuse is not None:
                    raise self.refuse
            elif kind == 2:
                value, answer, fd = self.calls[value](payload, fds)
            elif kind == 4:
                self.attached.append(payload.decode())
            elif kind == 5:
                self.opened_events.append(payload)
                answer = b"C%d" % slot + bytes(62)
        except Fault as fault:
            flags, answer = 1, fault.payload
        packet = HEADER.pack(0x80 | kind, flags, slot, sequence, value) + answer
        if fd >= 0:
            connection.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
            os.close(fd)
        else:
            connection.send(packet)
