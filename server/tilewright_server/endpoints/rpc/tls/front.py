"""The server's side of the process that terminates TLS (``terminator``): what it accepts goes through a relay.

gRPC terminates TLS itself where there is no relay; what a client sends is then counted by nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from tilewright_server.endpoints.rpc.access.credentials import Certificates
from tilewright_server.endpoints.rpc.access.peers import Certificate
from tilewright_server.endpoints.rpc.relay import Relay
from tilewright_server.endpoints.rpc.tls.terminator import HANDSHAKE_S, PACKET_BYTES
from tilewright_server.protocol.subprocess_command import run_module

__all__ = ["Front"]

log = logging.getLogger("tilewright.tls")

MODULE = "tilewright_server.endpoints.rpc.tls.terminator"
AGAIN_S = 0.5
"""Time before a process that has ended is started anew."""
END_S = 5.0


class Front:
    """Listens from ``start`` to ``close``."""

    def __init__(self, listening: Sequence[socket.socket], relay: Relay, certificates: Certificates, most: int) -> None:
        """``listening`` sockets become its own. ``most`` connections may be open at a time."""
        self._listening, self._relay, self._certificates, self._most = list(listening), relay, certificates, most
        self._tags = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, tuple[int, socket.socket]] = {}
        """Tags of connections and copies of their sockets, by the number that the process gave them."""
        self._shown: dict[int, Certificate] = {}
        self._ending = threading.Event()
        self._leaving = False
        self._left = threading.Event()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="tls", daemon=True)

    def start(self) -> None:
        """Raises ``OSError`` or ``RuntimeError`` if the system refuses a process or a thread."""
        self._spawn()
        try:
            self._thread.start()
        except RuntimeError:
            self._end_process()
            raise

    def certificate(self, tag: int) -> Certificate | None:
        """The proofs of a connection that the relay has adopted; None if it has ended."""
        return self._shown.get(tag)

    def leave(self) -> None:
        """Accept nobody any more, and wait until the relay has everyone who was accepted; connections go on."""
        with self._lock:
            self._leaving = True
            if self._control is None:
                self._left.set()
            else:
                with contextlib.suppress(OSError):
                    self._control.send(b"leave")
        for item in self._listening:
            item.close()
        if self._thread.is_alive() and not self._left.wait(HANDSHAKE_S + END_S):
            log.warning("the process that terminates TLS does not say that its handshakes have ended")

    def close(self) -> None:
        """End the process and all connections. Idempotent."""
        self._ending.set()
        with self._lock:
            control = self._control
        if control is not None:
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join()
        self._end_process()
        for item in self._listening:
            item.close()

    def _spawn(self) -> None:
        files = self._certificates.files
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            for end in (own, its):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
            listening = [] if self._leaving else [item.fileno() for item in self._listening]
            paths = [None if path is None else str(path) for path in (files.certificate, files.key, files.client_ca)]
            spec = json.dumps({"listeners": listening, "files": paths, "most": self._most})
            try:
                process = subprocess.Popen(
                    run_module(MODULE, str(its.fileno()), spec),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(its.fileno(), *listening),
                )
            except BaseException:
                own.close()
                raise
        with self._lock:
            self._control, self._process = own, process

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._serve()
            except Exception:
                log.exception("the process that terminates TLS is started anew")
            self._end_process()
            while not self._ending.wait(AGAIN_S):
                log.error("the process that terminates TLS has ended; it is started anew")
                try:
                    self._spawn()
                except (OSError, RuntimeError) as error:
                    log.error("it cannot be started: %s", error)
                    continue
                break

    def _serve(self) -> None:
        """Take connections until the process ends."""
        control = self._control
        assert control is not None
        while True:
            packet, numbers, _, _ = socket.recv_fds(control, PACKET_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
            received = [socket.socket(fileno=number) for number in numbers]
            if not packet:
                return
            try:
                self._take(json.loads(packet), received)
            finally:
                for item in received:
                    item.close()

    def _take(self, record: dict[str, Any], received: list[socket.socket]) -> None:
        if "open" in record and len(received) == 2:
            with contextlib.suppress(OSError):  # it has ended already
                self._adopt(record, *received)
        elif "end" in record:
            tag, way = self._open.pop(record["end"], (0, None))
            self._shown.pop(tag, None)
            if way is not None:
                way.close()
        elif "left" in record:
            self._left.set()
        elif "log" in record:
            log.warning("%s", record["log"])

    def _adopt(self, record: dict[str, Any], inner: socket.socket, way: socket.socket) -> None:
        """Raises ``OSError``."""
        self._certificates.latest()  # a list of those that were revoked is as new as the handshake
        address = way.getpeername()
        tag = next(self._tags) & 0xFFFFFFFF
        self._shown[tag] = {name: [item.encode() for item in items] for name, items in record["shown"].items()}
        try:
            self._relay.adopt(inner, address[0], address[1], tag)
            # Not ``way.dup()``, which would have the process's socket, too, wait.
            self._open[record["open"]] = tag, socket.socket(fileno=os.dup(way.fileno()))
        except OSError:
            del self._shown[tag]
            raise

    def _end_process(self) -> None:
        with self._lock:
            control, self._control = self._control, None
            process, self._process = self._process, None
            if self._leaving:
                self._left.set()
        if control is not None:
            control.close()
        for _, way in self._open.values():
            with contextlib.suppress(OSError):
                way.shutdown(socket.SHUT_RDWR)
            way.close()
        self._open.clear()
        self._shown.clear()
        if process is None:
            return
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
