"""The local socket of a server: accepts connections, counts them, and ends them."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright_kit.types.errors import ResourceExhaustedError, TilewrightError, UnavailableError
from tilewright_server.clients.refusals import over_session_quota
from tilewright_server.endpoints.local.connection import Connection
from tilewright_server.endpoints.local.listener import LocalListener, peer_client
from tilewright_server.endpoints.local.shared_thread import SharedThread
from tilewright_server.endpoints.rpc.transport.tracing import Tracer
from tilewright_server.protocol.frames import Kind, error_packet
from tilewright_server.protocol.inherited import Inherited
from tilewright_server.protocol.unix_paths import OWNER_ONLY, SocketAccess
from tilewright_server.session.quotas import Resource

if TYPE_CHECKING:
    from tilewright_server.service import Service
    from tilewright_server.session.session import Session

__all__ = ["LocalServer"]

log = logging.getLogger("tilewright.transport.local")

FEW = 8
"""Up to so many connections are each served by a thread of their own."""
BUSY_S = 0.05
"""Pause after a failure to accept: the process has no descriptors left, most likely."""


class LocalServer:
    """Listens from the beginning; serves from ``start`` to ``drain``; ``close`` waits for its threads."""

    def __init__(
        self,
        service: Service,
        path: Path,
        per_session: int,
        access: SocketAccess = OWNER_ONLY,
        allowed: Collection[int] = (),
        inherited: Inherited | None = None,
    ) -> None:
        """Raises what ``LocalListener`` does. The quotas of the service's sessions count connections by process."""
        self.tracer: Tracer | None = None
        self._service = service
        self._quotas = service.sessions.quotas
        self._per_session = per_session
        self._allowed = allowed
        self._lock = threading.Lock()
        self._open: dict[Connection, threading.Thread] = {}
        self._sessions: dict[Connection, Session] = {}
        self._draining = False
        self.launches = SharedThread()
        self._accepting = threading.Thread(target=self._accept, name="local-accept", daemon=True)
        self._listener = LocalListener(path, access, inherited)

    @property
    def path(self) -> Path:
        return self._listener.path

    def __len__(self) -> int:
        """Connections that are open."""
        return len(self._open)

    def start(self) -> None:
        self._accepting.start()

    def drain(self) -> None:
        """Take no new connections and no new requests; what was asked for is answered. Idempotent."""
        with self._lock:
            self._draining = True
            connections = list(self._open)
        self._listener.close()
        for connection in connections:
            connection.finish()

    def close(self, timeout: float = 1.0) -> bool:
        """End all connections and wait for their threads. False if some are still at work."""
        self.drain()
        with self._lock:
            threads = dict(self._open)
        deadline = time.monotonic() + timeout
        # The replies to what has just ended are still to be sent; only clients that do not read them are cut off.
        _join(threads.values(), time.monotonic() + timeout / 2)
        for connection in threads:
            connection.stop()
        _join([*threads.values(), self._accepting], deadline)
        if not self._accepting.is_alive():
            self._listener.end()
        if self._open:
            return False
        self.launches.close()
        return True

    def shared(self) -> list[tuple[int, str]]:
        """Descriptors for a successor, with their names."""
        return self._listener.shared()

    @property
    def is_kept(self) -> bool:
        """The socket is a service manager's."""
        return self._listener.is_kept

    def leave(self) -> None:
        """Accept nobody any more: the path is a successor's. Connections that are open go on."""
        self._listener.leave()

    # For connections

    @property
    def crowded(self) -> bool:
        """True if connections are more than a few."""
        return len(self._open) > FEW

    def admit(self, connection: Connection, session: Session) -> None:
        """Count one more of a session."""
        with self._lock:
            if sum(other is session for other in self._sessions.values()) >= self._per_session:
                raise _too_many(self._per_session)
            self._sessions[connection] = session

    def gone(self, connection: Connection) -> None:
        with self._lock:
            known = self._open.pop(connection, None)
            self._sessions.pop(connection, None)
        if known is not None:
            self._quotas.give(Resource.CONNECTIONS, connection.client)

    def _accept(self) -> None:
        failing = False
        while not self._draining:
            try:
                accepted = self._listener.accept()
                failing = False
            except OSError as error:
                if self._draining:
                    return
                if not failing:
                    log.warning("cannot accept local connections: %s", error)
                failing = True
                time.sleep(BUSY_S)
                continue
            if accepted is None:
                return
            try:
                self._begin(accepted)
            except Exception:
                log.exception("a local connection could not begin")
                accepted.close()

    def _begin(self, accepted: socket.socket) -> None:
        try:
            client = peer_client(accepted)
            self._quotas.take(Resource.CONNECTIONS, client)
        except TilewrightError as error:
            _refuse(accepted, error)
            return
        connection = Connection(self._service, accepted, self, client, self._allowed)
        thread = threading.Thread(target=connection.run, name="local", daemon=True)
        with self._lock:
            draining = self._draining
            self._open[connection] = thread
        try:
            if draining:
                raise UnavailableError("the server is shutting down", rule="draining", fix="use another server")
            thread.start()
        except TilewrightError as error:
            _refuse(accepted, error)
            self.gone(connection)
        except RuntimeError as error:
            log.warning("the system refuses a thread for a local connection: %s", error)
            _refuse(accepted, _no_thread())
            self.gone(connection)


def _join(threads: Iterable[threading.Thread], deadline: float) -> None:
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


def _refuse(accepted: socket.socket, error: TilewrightError) -> None:
    with contextlib.suppress(OSError):
        accepted.send(error_packet(Kind.HELLO, 0, 0, error), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
    accepted.close()


def _no_thread() -> ResourceExhaustedError:
    return ResourceExhaustedError(
        "the system refuses a thread for another connection",
        field="connections",
        rule="threads",
        fix="raise the limit of processes (ulimit -u, or the container's), or lower the setting local_connections",
        retry_after_s=1.0,
    )


def _too_many(limit: int) -> ResourceExhaustedError:
    return over_session_quota(
        "session_connections",
        limit,
        f"a session has at most {limit} local connections, and this one holds them all",
        "close connections that are not needed, or launch several things over one",
    )
