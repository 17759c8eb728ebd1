"""Addresses to listen on: who may reach them, and what becomes of a socket that a dead server left behind."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import grpc

from tilewright_kit.types.errors import AccessError, InvalidArgumentError, UnavailableError, UnsupportedError
from tilewright_server.endpoints.rpc.access.peers import Peers
from tilewright_server.endpoints.rpc.relay import BACKLOG, Relay
from tilewright_server.protocol.inherited import Inherited
from tilewright_server.protocol.unix_paths import MAX_UNIX_PATH, OWNER_ONLY, SocketAccess, own_place
from tilewright_server.protocol.unix_place import UnixPlace

__all__ = ["Listener", "TcpAddress", "UnixAddress", "parse_address"]

log = logging.getLogger("tilewright.listen")

INNER = "~"
"""Beginning of the name of the socket that gRPC itself listens on, where a relay stands before it."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(
    text: str, *, authenticated: bool = False, insecure: bool, network: bool = False
) -> UnixAddress | TcpAddress:
    """Check one value of ``listen``. ``authenticated``: TLS and a proof of who calls stand before it; ``insecure``: the
    operator does without on this machine; ``network``: also beyond it.

    Raises ``InvalidArgumentError``, or ``AccessError`` for TCP that is not allowed.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path or "\0" in path or len(os.fsencode(str(Path(path).absolute()))) > MAX_UNIX_PATH:
            raise _bad_address(text, f"the path of a socket has 1 to {MAX_UNIX_PATH} bytes")
        return UnixAddress(Path(path).absolute())
    host, _, port = text.removeprefix("tcp:").rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise _bad_address(text, "expected unix:PATH or HOST:PORT")
    if authenticated:
        return TcpAddress(host, int(port))
    if not _is_loopback(host) and not (insecure and network):
        raise AccessError(
            "beyond loopback this server listens only where TLS protects calls and callers prove who they are",
            field="listen",
            value=text,
            rule="listen_loopback",
            fix="set tls_cert, tls_key and tls_client_ca (or a policy with tokens), or listen on 127.0.0.1 or [::1], or"
            " give --insecure and --insecure-network if all who reach the address are trusted",
        )
    if not insecure:
        raise AccessError(
            "TCP listeners have no access control: every user of this machine could run kernels and fill its memory",
            field="listen",
            value=text,
            rule="listen_insecure",
            fix="listen on unix:PATH, set tls_cert, tls_key and tls_client_ca, or allow TCP with --insecure if all"
            " users of this machine are trusted",
        )
    return TcpAddress(host, int(port))


class Listener:
    """One bound address. ``address`` has the port that the system chose, if it was asked to, and the path of the
    socket."""

    def __init__(
        self,
        address: UnixAddress | TcpAddress,
        access: SocketAccess = OWNER_ONLY,
        *,
        peers: Peers | None = None,
        inherited: Inherited | None = None,
    ) -> None:
        """With ``peers``, a relay that these know stands before a Unix socket, if there can be one; else gRPC listens
        there itself. A socket of ``inherited`` that listens at the address is taken over."""
        self.address = address
        self.relay: Relay | None = None
        self._access = access
        self._peers = peers
        self._inherited = inherited
        self._inner = -1
        self._listening: socket.socket | None = None
        self._place: UnixPlace | None = None

    def bind(self, server: grpc.Server, credentials: grpc.ServerCredentials | None = None) -> None:
        """Bind ``server`` to the address. Over TCP, ``credentials`` have it speak TLS.

        Raises ``UnavailableError`` if another server has it, ``AccessError`` if others could meddle with it.
        """
        if isinstance(self.address, TcpAddress):
            port = _add_port(server, str(self.address), str(self.address), credentials)
            self.address = TcpAddress(self.address.host, port)
            return
        path = own_place(self.address.path)
        if len(os.fsencode(str(path))) > MAX_UNIX_PATH:
            raise _bad_address(f"unix:{path}", f"the path of a socket has 1 to {MAX_UNIX_PATH} bytes")
        self.address = UnixAddress(path)
        self._place = UnixPlace(path, socket.SOCK_STREAM, self._access, self._inherited)
        try:
            if self._place.given is not None:
                self._take_over(server, path, self._place.given)
                return
            with self._place.binding():
                if not self._bind_behind_relay(server, path):
                    _add_port(server, f"unix:{path}", str(self.address))
        except BaseException:
            self.close()
            raise

    def _take_over(self, server: grpc.Server, path: Path, given: socket.socket) -> None:
        """Raises ``UnavailableError`` where there can be no relay, which alone takes a socket."""
        if not self._relayed(server, path, given):
            given.close()
            raise UnavailableError(
                "gRPC takes no socket that was made before: only the relay can accept on it",
                field="relay",
                value=f"unix:{path}",
                rule="listen_given",
                fix="leave the setting relay on and install libtilewright, or start the server without a .socket unit",
            )

    def _bind_behind_relay(self, server: grpc.Server, path: Path) -> bool:
        """False, with a word in the log, where there can be no relay."""
        if self._peers is None:
            return False
        with contextlib.ExitStack() as undo:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            undo.callback(listening.close)
            listening.bind(str(path))
            undo.callback(path.unlink, missing_ok=True)
            listening.listen(BACKLOG)
            if not self._relayed(server, path, listening):
                return False
            undo.pop_all()
        return True

    def _relayed(self, server: grpc.Server, path: Path, listening: socket.socket) -> bool:
        """Have a relay accept on ``listening``; False, with a word in the log, where there can be none."""
        inner = path.with_name(INNER + secrets.token_hex(4))
        if self._peers is None or len(os.fsencode(str(inner))) > MAX_UNIX_PATH:
            return False
        old = os.umask(0o177)
        try:
            _add_port(server, f"unix:{inner}", str(self.address))
            # Without a name: nobody gets past the relay, and a killed server leaves nothing behind.
            self._inner = os.open(inner, os.O_PATH | os.O_CLOEXEC)
            inner.unlink()
            self.relay = Relay(listening, Path(f"/proc/self/fd/{self._inner}"))
            self.relay.start()
        except (OSError, RuntimeError) as error:
            log.warning("gRPC listens without a relay: one process can hold up all: %s", error)
            self._end_relay()
            self.relay = None
            inner.unlink(missing_ok=True)
            return False
        finally:
            os.umask(old)
        self._listening = listening
        self._peers.add(self.relay)
        return True

    def _end_relay(self) -> None:
        if self.relay is not None:
            self.relay.close()
        if self._inner >= 0:
            os.close(self._inner)
            self._inner = -1

    @property
    def is_kept(self) -> bool:
        """The socket is a service manager's, which keeps it for the next server."""
        return self._place is not None and self._place.is_kept

    def shared(self) -> list[tuple[int, str]]:
        """Descriptors for a successor, with their names. Raises ``UnsupportedError`` if gRPC itself has the socket."""
        if self._listening is None or self._place is None:
            raise UnsupportedError(
                "gRPC gives the socket that it listens on to nobody",
                field="listen",
                value=str(self.address),
                rule="succession",
                fix="listen on Unix sockets with the relay alone, or stop this server and start the next",
            )
        return self._place.shared(self._listening)

    def leave(self) -> None:
        """Accept nobody any more, and have clients make new calls elsewhere; the address is the successor's. Calls that
        have begun go on. Idempotent."""
        if self.relay is not None:
            self.relay.leave()
        if self._place is not None:
            self._place.leave()

    def close(self) -> None:
        """Remove the socket, unless it has become another's, and end its connections. Idempotent."""
        self._end_relay()
        if self._place is not None:
            self._place.close()


def _add_port(server: grpc.Server, address: str, shown: str, credentials: grpc.ServerCredentials | None = None) -> int:
    try:
        if credentials is not None:
            port = int(server.add_secure_port(address, credentials))
        else:
            port = int(server.add_insecure_port(address))
    except RuntimeError:
        port = 0
    if not port:
        raise UnavailableError(
            f"cannot listen on {shown}",
            field="listen",
            value=shown,
            rule="listen",
            fix="choose an address that is free",
        )
    return port


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bad_address(text: str, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"not an address to listen on: {reason}", field="listen", value=text, rule="listen", fix="use unix:PATH"
    )
