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

from tilewright_kit.types.errors import AccessError, InvalidArgumentError, UnavailableError
from tilewright_server.endpoints.rpc.access.peers import Peers
from tilewright_server.endpoints.rpc.relay import BACKLOG, Relay
from tilewright_server.protocol.unix_paths import (
    MAX_UNIX_PATH,
    OWNER_ONLY,
    SocketAccess,
    lock,
    lock_path,
    own_place,
    private_directory,
    remove_stale,
)

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
        self, address: UnixAddress | TcpAddress, access: SocketAccess = OWNER_ONLY, *, peers: Peers | None = None
    ) -> None:
        """With ``peers``, a relay that these know stands before a Unix socket, if there can be one; else gRPC listens
        there itself."""
        self.address = address
        self.relay: Relay | None = None
        self._access = access
        self._peers = peers
        self._inner = -1
        self._lock_fd = -1
        self._inode: tuple[int, int] | None = None

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
        private_directory(path.parent, self._access)
        self._lock_fd = lock(path)
        try:
            remove_stale(path)
            old = os.umask(0o177)  # the socket must never exist with a wider mode
            try:
                if not self._bind_behind_relay(server, path):
                    _add_port(server, f"unix:{path}", str(self.address))
            finally:
                os.umask(old)
            self._access.give(path)
            status = path.lstat()
            self._inode = (status.st_dev, status.st_ino)
        except BaseException:
            self.close()
            raise

    def _bind_behind_relay(self, server: grpc.Server, path: Path) -> bool:
        """False, with a word in the log, where there can be no relay."""
        inner = path.with_name(INNER + secrets.token_hex(4))
        if self._peers is None or len(os.fsencode(str(inner))) > MAX_UNIX_PATH:
            return False
        with contextlib.ExitStack() as undo:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            undo.callback(listening.close)
            listening.bind(str(path))
            undo.callback(path.unlink, missing_ok=True)
            listening.listen(BACKLOG)
            try:
                _add_port(server, f"unix:{inner}", str(self.address))
                # Without a name: nobody gets past the relay, and a killed server leaves nothing behind.
                self._inner = os.open(inner, os.O_PATH | os.O_CLOEXEC)
                undo.callback(self._close_inner)
                inner.unlink()
                self.relay = Relay(listening, Path(f"/proc/self/fd/{self._inner}"))
                undo.callback(self.relay.close)
                self.relay.start()
            except (OSError, RuntimeError) as error:
                log.warning("gRPC listens without a relay: one process can hold up all: %s", error)
                self.relay = None
                return False
            self._peers.add(self.relay)
            undo.pop_all()
        return True

    def _close_inner(self) -> None:
        if self._inner >= 0:
            os.close(self._inner)
            self._inner = -1

    def close(self) -> None:
        """Remove the socket, unless it has become another's, and end its connections. Idempotent."""
        if isinstance(self.address, TcpAddress) or self._lock_fd < 0:
            return
        path = self.address.path
        if self.relay is not None:
            self.relay.close()
        self._close_inner()
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if self._inode == (status.st_dev, status.st_ino):
                path.unlink()
        # Removed while it is held: whoever waits for it sees that the file it locked is gone, and tries again.
        with contextlib.suppress(FileNotFoundError):
            lock_path(path).unlink()
        os.close(self._lock_fd)
        self._lock_fd = -1


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
