"""Addresses to listen on: who may reach them, and what becomes of a socket that a dead server left behind."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from tilewright_kit.types.errors import AccessError, InvalidArgumentError, UnavailableError, UnsupportedError
from tilewright_server.endpoints.rpc.access.peers import Peers
from tilewright_server.endpoints.rpc.relay import BACKLOG, Relay
from tilewright_server.protocol.inherited import KEPT, SOCKET, GivenSocket, Inherited, chosen_port
from tilewright_server.protocol.unix_paths import MAX_UNIX_PATH, OWNER_ONLY, SocketAccess, own_place
from tilewright_server.protocol.unix_place import UnixPlace
from tilewright_server.settings import Settings

if TYPE_CHECKING:
    from tilewright_server.endpoints.rpc.access.credentials import Certificates
    from tilewright_server.endpoints.rpc.tls.front import Front

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
        settings: Settings | None = None,
        setting: str = "listen",
    ) -> None:
        """With ``peers``, relays that these know stand before gRPC, if there can be such; else gRPC listens there
        itself. A socket of ``inherited`` that listens at the address is taken over. Rates of relays are those of
        ``settings``, else the defaults. ``setting`` names the one where the address stands."""
        self.address = address
        self.relays: list[Relay] = []
        self._access = access
        self._peers = peers
        self._inherited = inherited
        self._inner = -1
        self._settings, self._setting = settings or Settings(), setting
        self._front: Front | None = None
        self._waiting: list[Relay | Front] = []
        self._listening: socket.socket | None = None
        self._shared: list[tuple[int, str]] = []
        self._kept = False
        self._place: UnixPlace | None = None

    def start(self) -> None:
        """Accept on a socket that was taken over: from here on, a server that had it before need not. Others are
        accepted on as soon as they are bound. Idempotent. Raises ``OSError`` or ``RuntimeError`` if the system refuses
        a process or a thread."""
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            item.start()

    def bind(self, server: grpc.Server, certificates: Certificates | None = None) -> None:
        """Bind ``server`` to the address. Over TCP, ``certificates`` have it speak TLS.

        Raises ``UnavailableError`` if another server has it, ``AccessError`` if others could meddle with it.
        """
        if isinstance(self.address, TcpAddress):
            if not self._bind_tcp_behind_relay(server, self.address, certificates):
                credentials = None if certificates is None else certificates.credentials()
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
        if not self._relayed(server, path, given, at_once=False):
            given.close()
            raise _given_in_vain(str(self.address))

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

    def _relayed(self, server: grpc.Server, path: Path, listening: socket.socket, *, at_once: bool = True) -> bool:
        """Have a relay accept on ``listening``, at once or from ``start`` on; False, with a word in the log, where
        there can be none."""
        inner = path.with_name(INNER + secrets.token_hex(4))
        if len(os.fsencode(str(inner))) > MAX_UNIX_PATH or not self._relay_to(
            server, inner, [listening], at_once=at_once
        ):
            return False
        self._listening = listening
        return True

    def _bind_tcp_behind_relay(
        self, server: grpc.Server, address: TcpAddress, certificates: Certificates | None
    ) -> bool:
        """False, with a word in the log, where there can be no relay. Raises ``UnavailableError``."""
        given = self._given(address)
        if self._peers is None and not given:
            return False
        listening = [item.socket for item in given] or _listen(address)
        self.address = TcpAddress(address.host, listening[0].getsockname()[1])
        with tempfile.TemporaryDirectory(prefix="tilewright-", ignore_cleanup_errors=True) as folder:
            inner = Path(folder) / INNER
            if certificates is None:
                done = self._relay_to(server, inner, listening, at_once=not given)
            else:
                done = self._relay_to(server, inner, [None], (listening, certificates), at_once=not given)
        if not done:
            for item in listening:
                item.close()
            if given:
                raise _given_in_vain(str(address))
        elif address.port:
            self._kept = any(item.kept for item in given)
            self._shared = [(item.fileno(), KEPT if self._kept else SOCKET) for item in listening]
        return done

    def _given(self, address: TcpAddress) -> list[GivenSocket]:
        """Sockets that listen at an address already, for this server."""
        found: list[GivenSocket] = []
        for host in dict.fromkeys((address.host, "::" if address.host == "0.0.0.0" else address.host)):
            while self._inherited is not None and (one := self._inherited.tcp(host, address.port)) is not None:
                found.append(one)
        return found

    def _relay_to(
        self,
        server: grpc.Server,
        inner: Path,
        listening: Sequence[socket.socket | None],
        tls: tuple[Sequence[socket.socket], Certificates] | None = None,
        *,
        at_once: bool = True,
    ) -> bool:
        """Have gRPC listen at ``inner``, and a relay to there for each socket; with ``tls``, for what comes of that."""
        if self._peers is None:
            return False
        old = os.umask(0o177)
        try:
            _add_port(server, f"unix:{inner}", str(self.address))
            # Without a name: nobody gets past the relay, and a killed server leaves nothing behind.
            self._inner = os.open(inner, os.O_PATH | os.O_CLOEXEC)
            inner.unlink()
            for item in listening:
                self.relays.append(Relay(item, Path(f"/proc/self/fd/{self._inner}"), self._settings))
                if at_once:
                    self.relays[-1].start()
                else:
                    self._waiting.append(self.relays[-1])
            if tls is not None:
                self._front = self._terminating(*tls, at_once=at_once)
        except (OSError, RuntimeError) as error:
            log.warning("gRPC listens without a relay: one process can hold up all: %s", error)
            self._end_relay()
            inner.unlink(missing_ok=True)
            return False
        finally:
            os.umask(old)
        for relay in self.relays:
            self._peers.add(relay, None if self._front is None else self._front.certificate)
        return True

    def _terminating(self, listening: Sequence[socket.socket], certificates: Certificates, *, at_once: bool) -> Front:
        """A process that terminates TLS before the relay. Raises ``OSError`` or ``RuntimeError``."""
        from tilewright_server.endpoints.rpc.tls.front import Front

        # Each takes four descriptors of this process, not three.
        front = Front(listening, self.relays[0], certificates, max(1, self._settings.max_connections * 3 // 4))
        if at_once:
            front.start()
        else:
            self._waiting.append(front)
        return front

    def _end_relay(self) -> None:
        if self._front is not None:
            self._front.close()
        for relay in self.relays:
            relay.close()
        self.relays = []
        if self._inner >= 0:
            os.close(self._inner)
            self._inner = -1

    @property
    def is_kept(self) -> bool:
        """The socket is a service manager's, which keeps it for the next server."""
        return self._kept or (self._place is not None and self._place.is_kept)

    def shared(self) -> list[tuple[int, str]]:
        """Descriptors for a successor, with their names. Raises ``UnsupportedError`` if gRPC itself has the socket, or
        nothing in the settings says which one it is."""
        if self._shared:
            return self._shared
        if self._listening is None or self._place is None:
            if self.relays:
                raise chosen_port(self._setting, str(self.address))
            raise UnsupportedError(
                "gRPC gives the socket that it listens on to nobody",
                field=self._setting,
                value=str(self.address),
                rule="succession",
                fix="listen with the relay alone, or stop this server and start the next",
            )
        return self._place.shared(self._listening)

    def leave(self) -> None:
        """Accept nobody any more, and have clients make new calls elsewhere; the address is the successor's. Calls that
        have begun go on. Idempotent."""
        if self._front is not None:
            self._front.leave()
        for relay in self.relays:
            relay.leave()
        if self._place is not None:
            self._place.leave()

    def close(self) -> None:
        """Remove the socket, unless it has become another's, and end its connections. Idempotent."""
        self._end_relay()
        if self._place is not None:
            self._place.close()


def _listen(address: TcpAddress) -> list[socket.socket]:
    """Sockets that listen at all addresses of a host; as gRPC has it, those of no host in particular of both versions
    of IP. Raises ``UnavailableError``."""
    listening: list[socket.socket] = []
    port = address.port
    try:
        if address.host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():
            places = [(socket.AF_INET6, "::")]
        else:
            found = socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            places = list(dict.fromkeys((family, str(place[0])) for family, _, _, _, place in found))
        for family, host in places:
            both = host == "::" and len(places) == 1
            try:
                way = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(places) > 1:
                    continue  # localhost names addresses that not every machine has
                raise
            way.setblocking(False)
            listening.append(way)
            port = way.getsockname()[1]
    except (OSError, ValueError) as error:
        log.debug("cannot listen on %s: %s", address, error)
        for way in listening:
            way.close()
        listening = []
    if not listening:
        raise _unavailable(str(address))
    return listening


def _add_port(server: grpc.Server, address: str, shown: str, credentials: grpc.ServerCredentials | None = None) -> int:
    try:
        if credentials is not None:
            port = int(server.add_secure_port(address, credentials))
        else:
            port = int(server.add_insecure_port(address))
    except RuntimeError:
        port = 0
    if not port:
        raise _unavailable(shown)
    return port


def _given_in_vain(shown: str) -> UnavailableError:
    return UnavailableError(
        "gRPC takes no socket that was made before: only the relay can accept on it",
        field="relay",
        value=shown,
        rule="listen_given",
        fix="leave the setting relay on and install libtilewright, or start the server without a .socket unit",
    )


def _unavailable(shown: str) -> UnavailableError:
    return UnavailableError(
        f"cannot listen on {shown}",
        field="listen",
        value=shown,
        rule="listen",
        fix="choose an address that is free",
    )


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
