"""The process that terminates TLS: ``python -m tilewright_server.endpoints.rpc.tls.terminator CONTROL SPEC``.

It accepts, shakes hands, gives the server one end of a pair of sockets for each connection with what TLS has proved,
and passes bytes between the pair's other end and the client. What it decrypts goes through the server's relay, which
counts what a host sends. It ends when the server does.

One thread, one loop: a client that stalls holds a descriptor, and gives way when others need that.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tilewright_server.endpoints.rpc.access.contexts import PROTOCOL, Contexts, TlsFiles

__all__ = ["PACKET_BYTES", "Terminator", "properties"]

HANDSHAKE_S = 10.0
"""Time for a handshake."""
ACCEPTS = 16
"""Connections that are accepted in a row."""
CHUNK = 64 * 1024
RECORD = 16 * 1024
"""Bytes of a record of TLS, at most."""
TURN = 4
"""Chunks that one connection passes before others have their turn."""
LARGEST_CERTIFICATE = 64 * 1024
PACKET_BYTES = 4 * LARGEST_CERTIFICATE
"""Bytes of a packet to the server, at most."""
DEAF_S = 0.1
"""Time without accepting after the system had no descriptor left."""
DRAIN_S = 5.0
"""Time for a client to read what the server said last."""

READ, WRITE, GONE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR
Handle = Callable[[int], None]


class Link:
    """One connection: TLS at one side, bytes in clear at the other."""

    def __init__(self, owner: Terminator, tls: ssl.SSLSocket, host: str) -> None:
        self._owner = owner
        self.tls = tls
        self.host = host
        self.number = 0
        self.plain: socket.socket | None = None
        self._up: memoryview | bytes = b""
        self._down: memoryview | bytes = b""
        self._up_ended = self._down_ended = self._shut = False
        self._left = False  # the server has closed: what it said last is still to be passed on

    def shake(self, _: int) -> None:
        """Go on with the handshake."""
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            self._owner.watch(self.tls, READ)
            return
        except ssl.SSLWantWriteError:
            self._owner.watch(self.tls, WRITE)
            return
        if self.tls.selected_alpn_protocol() != PROTOCOL:
            raise ConnectionError("no client of gRPC")
        self.plain = self._owner.hand_over(self)
        self._owner.handle(self.tls, self._client_moved)
        self._owner.handle(self.plain, self._server_moved)
        self.move()

    def _client_moved(self, events: int) -> None:
        if events & GONE:
            self._owner.end(self)
        else:
            self.move(up=bool(events & READ), down=bool(self._down))

    def _server_moved(self, events: int) -> None:
        if events & GONE and not self._left:
            self._left = True
            assert self.plain is not None
            self._owner.drain(self, self.plain)
        self.move(up=bool(self._up), down=True)

    def go_on(self, _: int) -> None:
        """Take the next turn."""
        self.move()

    def move(self, *, up: bool = True, down: bool = True) -> None:
        """Pass on what there is, and watch for more."""
        plain = self.plain
        assert plain is not None
        if (up and not self._left and not self._raise(plain)) or (down and not self._lower(plain)):
            self._owner.end(self)
            return
        reads = not self._up and not self._up_ended and not self._left
        self._owner.watch(self.tls, READ * reads | WRITE * bool(self._down))
        if not self._left:
            self._owner.watch(plain, READ * (not self._down) | WRITE * bool(self._up))
        if (self._left and not self._down) or (reads and self.tls.pending()):
            self._owner.again(self)

    def _raise(self, plain: socket.socket) -> bool:
        """From the client to the server. False: the connection has ended."""
        for _ in range(TURN):
            if self._up:
                try:
                    self._up = self._up[plain.send(self._up) :]
                except BlockingIOError:
                    return True
                continue
            if self._up_ended:
                if not self._shut:
                    self._shut = True
                    plain.shutdown(socket.SHUT_WR)
                return True
            got = self._read(self._owner.room)
            if got:
                self._up = self._owner.room[:got]
                with contextlib.suppress(BlockingIOError):
                    self._up = self._up[plain.send(self._up) :]
                self._up = bytes(self._up)  # the room is for others, too
            if got < CHUNK and not self._up and not self._up_ended:
                return True
        return True

    def _read(self, room: memoryview) -> int:
        """Decrypt as much as there is, a record after the other."""
        got = 0
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while got < CHUNK:
                some = self.tls.recv_into(room[got:])
                if not some:
                    self._up_ended = True
                    break
                got += some
                if some < RECORD and not self.tls.pending():  # most likely all: epoll tells if not
                    break
        return got

    def _lower(self, plain: socket.socket) -> bool:
        """From the server to the client. False: the connection has ended."""
        for _ in range(TURN):
            if self._down:
                try:
                    self._down = self._down[self.tls.send(self._down) :]
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    return True
                continue
            if self._down_ended:
                return False
            try:
                self._down = plain.recv(CHUNK)
            except BlockingIOError:
                return True
            self._down_ended = not self._down
            last = len(self._down) < CHUNK  # most likely
            if last and not self._down_ended:
                with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    self._down = self._down[self.tls.send(self._down) :]
                return True
        return True


class Terminator:
    """All connections of the listeners."""

    def __init__(self, control: socket.socket, listeners: Sequence[socket.socket], files: TlsFiles, most: int) -> None:
        """``most`` connections may be open, of a host seven eighths of them. Raises what ``Contexts`` does."""
        self._control, self._listeners, self._most = control, list(listeners), most
        self._contexts = Contexts(files)
        self._epoll = select.epoll()
        self._handles: dict[int, Handle] = {}
        self._watched: dict[int, int] = {}
        self._links: dict[int, Link] = {}
        self._shaking: dict[Link, float] = {}
        """Handshakes under way with their deadlines, the oldest first."""
        self._ending: dict[Link, float] = {}
        """Connections that the server has closed, likewise."""
        self._hosts: Counter[str] = Counter()
        self._again: set[Link] = set()
        self._new: set[int] = set()
        """Descriptors since the last look, of which an event may be another's that had the number."""
        self._deaf_until = 0.0
        self._leaving = False
        self._count = 0
        self.room = memoryview(bytearray(CHUNK))

    def run(self) -> None:
        """Serve until the server's end of the control socket is closed."""
        self.handle(self._control, self._told)
        for listener in self._listeners:
            self.handle(listener, partial(self._accept, listener))
        while self._control.fileno() >= 0:
            waits = self._shaking or self._ending or self._deaf_until
            self._new.clear()
            for number, events in self._epoll.poll(0 if self._again else DEAF_S if waits else -1):
                handle = self._handles.get(number)
                if handle is not None and number not in self._new:
                    self._guarded(handle, events, self._links.get(number))
            again, self._again = self._again, set()
            for link in again:
                if link.number:
                    self._guarded(link.go_on, 0, link)
            self._look_at_times()

    def _guarded(self, handle: Handle, events: int, link: Link | None) -> None:
        """Nothing that one connection does ends others."""
        try:
            handle(events)
        except Exception as error:
            if link is None:
                raise
            if not isinstance(error, (OSError, ValueError)):  # which peers that go away cause
                self._tell({"log": repr(error)})
            self.end(link)

    def handle(self, item: socket.socket, handle: Handle) -> None:
        """Have ``handle`` called with the events of a socket, and with its end in any case."""
        number = item.fileno()
        self._handles[number] = handle
        if number not in self._watched:
            self._new.add(number)
            self._watched[number] = READ
            self._epoll.register(number, READ)

    def watch(self, item: socket.socket, events: int) -> None:
        """Look for these events of a socket, which has a handle."""
        number = item.fileno()
        if self._watched[number] != events:
            self._epoll.modify(number, events)
            self._watched[number] = events

    def _forget(self, number: int) -> None:
        """Look for nothing: a copy of the descriptor elsewhere would keep it in epoll."""
        self._handles.pop(number, None)
        if self._watched.pop(number, None) is not None:
            self._epoll.unregister(number)

    def drain(self, link: Link, plain: socket.socket) -> None:
        """The server has closed: its side tells of nothing more."""
        self._forget(plain.fileno())
        self._ending[link] = time.monotonic() + DRAIN_S

    def again(self, link: Link) -> None:
        """Move what a connection has decrypted already, after others had their turn."""
        self._again.add(link)

    def _accept(self, listener: socket.socket, _: int) -> None:
        for _ in range(ACCEPTS):
            try:
                way, address = listener.accept()
            except (BlockingIOError, ConnectionError, InterruptedError):
                return
            except OSError:  # no descriptor, say
                self._give_way("")
                self._listen(False)
                return
            try:
                self._begin(way, address[0])
            except (OSError, ValueError):
                way.close()

    def _begin(self, way: socket.socket, host: str) -> None:
        """Begin a handshake. Raises ``OSError`` if the host has too many connections, or the client is gone."""
        crowded = self._hosts[host] >= self._most - self._most // 8
        full = len(self._links) >= 2 * self._most
        if (crowded and not self._give_way(host)) or (full and not self._give_way("")):
            raise ConnectionError("too many")
        way.setblocking(False)
        way.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(self, self._wrapped(way), host)
        self._hosts[host] += 1
        self._links[link.tls.fileno()] = link
        self._shaking[link] = time.monotonic() + HANDSHAKE_S
        self.handle(link.tls, link.shake)

    def _wrapped(self, way: socket.socket) -> ssl.SSLSocket:
        return self._contexts.latest().wrap_socket(way, server_side=True, do_handshake_on_connect=False)

    def _give_way(self, host: str) -> bool:
        """End the oldest handshake, of ``host`` if it is named; False if there is none."""
        oldest = next((link for link in self._shaking if not host or link.host == host), None)
        if oldest is not None:
            self.end(oldest)
        return oldest is not None

    def hand_over(self, link: Link) -> socket.socket:
        """Give the server its end of a connection that is ready; returns the other. Raises ``OSError``."""
        del self._shaking[link]
        near, far = socket.socketpair()
        try:
            near.setblocking(False)
            shown = properties(link.tls)
            self._count += 1
            packet = json.dumps({"open": self._count, "shown": shown}).encode()
            socket.send_fds(self._control, [packet], [far.fileno(), link.tls.fileno()])
        except BaseException:
            near.close()
            raise
        finally:
            far.close()
        link.number = self._count
        self._links[near.fileno()] = link
        return near

    def end(self, link: Link) -> None:
        """Close a connection. Idempotent."""
        self._shaking.pop(link, None)
        self._ending.pop(link, None)
        for item in (link.tls, link.plain):
            number = -1 if item is None else item.fileno()
            if item is None or number < 0:
                continue
            if self._links.pop(number, None) is not None and item is link.tls:
                self._hosts[link.host] -= 1
                if not self._hosts[link.host]:
                    del self._hosts[link.host]
            self._forget(number)
            if item is link.tls and link.plain is not None:
                with contextlib.suppress(OSError, ValueError):
                    link.tls.unwrap()  # says that it ends; nobody waits for the answer
            with contextlib.suppress(OSError):
                socket.socket.shutdown(item, socket.SHUT_RDWR)  # the server holds copies
            item.close()
        if link.number:
            self._tell({"end": link.number})
            link.number = 0

    def _tell(self, record: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(record).encode())

    def _told(self, _: int) -> None:
        """The server wants no more connections, or is gone."""
        if self._control.recv(64):
            self._listen(None)
        else:
            self._control.close()

    def _listen(self, on: bool | None) -> None:
        """``None``: never again."""
        if on is None:
            for listener in self._listeners:
                self._forget(listener.fileno())
                listener.close()
            self._listeners = []
            self._leaving = True
        self._deaf_until = 0.0 if on is not False else time.monotonic() + DEAF_S
        for listener in self._listeners:
            self.watch(listener, READ if on else 0)

    def _look_at_times(self) -> None:
        now = time.monotonic()
        if self._deaf_until and now >= self._deaf_until:
            self._listen(True)
        for deadlines in (self._shaking, self._ending):
            for link, deadline in list(deadlines.items()):
                if deadline > now:
                    break
                self.end(link)
        if self._leaving and not self._shaking:
            self._leaving = False
            self._tell({"left": True})  # the server has heard of everyone


def properties(tls: ssl.SSLSocket) -> dict[str, list[str]]:
    """The proofs of a connection, as gRPC names them. Raises ``ValueError`` for a certificate that is too large."""
    shown: dict[str, list[str]] = {"transport_security_type": ["ssl"]}
    der = tls.getpeercert(binary_form=True)
    if der is None:
        return shown
    if len(der) > LARGEST_CERTIFICATE:
        raise ValueError("the certificate is too large")
    content: dict[str, Any] = tls.getpeercert() or {}
    names = content.get("subjectAltName", ())
    identities = [value for kind, value in names if kind == "URI"]
    common = [value for part in content.get("subject", ()) for key, value in part if key == "commonName"]
    shown["x509_pem_cert"] = [ssl.DER_cert_to_PEM_cert(der)]
    shown["x509_common_name"] = common[:1]
    known = ("DNS", "URI", "email", "IP Address")
    shown["x509_subject_alternative_name"] = [value for kind, value in names if kind in known]
    if len(identities) == 1 and identities[0].startswith("spiffe://"):  # more than one is none (SPIFFE's X.509-SVID)
        shown["peer_spiffe_id"] = identities
    return shown


def main(control: str, spec: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are the server's, at whose end this ends
    given = json.loads(spec)
    files = TlsFiles(*(path and Path(path) for path in given["files"]))
    listeners = [socket.socket(fileno=number) for number in given["listeners"]]
    for listener in listeners:
        listener.setblocking(False)
    with socket.socket(fileno=int(control)) as way:
        try:
            terminator = Terminator(way, listeners, files, given["most"])
        except (OSError, ValueError) as error:
            way.send(json.dumps({"log": f"TLS cannot be served: {error}"}).encode())
            return
        terminator.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
