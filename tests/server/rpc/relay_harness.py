"""Servers behind a relay, and processes that send what they are told."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilewright_server.endpoints.rpc.relay import Relay
from tilewright_server.settings.rates import Rates

WAIT_S = 60.0
SENDER = """
import socket, sys, time
held = []
for _ in range(int(sys.argv[2])):
    way = socket.socket(socket.AF_UNIX)
    way.connect(sys.argv[1])
    held.append(way)
print("connected", flush=True)
for line in sys.stdin:
    way, frames = held[0], bytes.fromhex(line)
    way.sendall(frames)
    print("sent", flush=True)
print(held[-1].recv(200).hex(), flush=True)
"""
"""A process that opens connections, then sends what it is told over the first, then reads what came over the last."""


class Server:
    """A server that answers as ``answer`` does, in a thread for each connection, behind a relay."""

    def __init__(self, folder: Path, answer: Callable[[socket.socket], None], tcp: bool, rates: Rates | None) -> None:
        self.address: Path | tuple[str, int] = folder / "s"
        self._answer = answer
        self._inner = socket.socket(socket.AF_UNIX)
        self._inner.bind(str(folder / "s~"))
        self._inner.listen(1024)
        listener = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(("127.0.0.1", 0) if tcp else str(self.address))
        listener.listen(1024)
        if tcp:
            self.address = listener.getsockname()
        self.relay = Relay(listener, folder / "s~", rates)
        threading.Thread(target=self._accept, daemon=True).start()
        self.relay.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                way, _ = self._inner.accept()
                threading.Thread(target=self._serve, args=(way,), daemon=True).start()

    def _serve(self, way: socket.socket) -> None:
        with way, contextlib.suppress(OSError):
            self._answer(way)

    def connect(self) -> socket.socket:
        if isinstance(self.address, tuple):
            return socket.create_connection(self.address, WAIT_S)
        way = socket.socket(socket.AF_UNIX)
        way.settimeout(WAIT_S)
        way.connect(str(self.address))
        return way

    def close(self) -> None:
        self.relay.close()
        self._inner.shutdown(socket.SHUT_RDWR)
        self._inner.close()


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[socket.socket], None], tcp: bool = False, rates: Rates | None = None) -> Server:
            server = Server(tmp_path, answer, tcp, rates)
            stack.callback(server.close)
            return server

        yield start


@contextlib.contextmanager
def sender(server: Server, connections: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SENDER, str(server.address), str(connections)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        yield process
        process.kill()


def say(process: subprocess.Popen[str], frames: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(frames.hex() + "\n")
    process.stdin.flush()


def echo(way: socket.socket) -> None:
    while part := way.recv(1 << 16):
        way.sendall(part)


def everything(way: socket.socket) -> bytes:
    parts = []
    while part := way.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)
