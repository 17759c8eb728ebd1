"""All sessions of the server, by their tokens."""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass

from tilewright_server.clients.client import ANONYMOUS, Client
from tilewright_server.memory import guard
from tilewright_server.memory.errors import unknown_session
from tilewright_server.memory.regions import InodeOwners
from tilewright_server.session.quotas import Account, Limits, Quotas, Resource
from tilewright_server.session.session import Session

__all__ = ["Sessions", "Usage"]

TOKEN_BYTES = 16
MAX_CLIENT_NAME = 256


@dataclass(slots=True)
class Usage:
    """Totals over all sessions."""

    sessions: int = 0
    regions: int = 0
    region_bytes: int = 0
    buffers: int = 0
    buffer_bytes: int = 0
    bindings: int = 0
    attached_connections: int = 0


class Sessions:
    """All sessions of the server."""

    def __init__(self, limits: Limits | None = None, quotas: Quotas | None = None) -> None:
        self._limits = limits or Limits()
        self.quotas = quotas or Quotas()
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Session] = {}
        self._inodes = InodeOwners()
        guard.prepare()

    def open(self, client_name: str, *, local: bool, client: Client = ANONYMOUS) -> Session:
        """A new session under a random token; ``ResourceExhaustedError`` if there are too many."""
        token = secrets.token_bytes(TOKEN_BYTES)
        account = Account(self.quotas, client)
        account.take(Resource.SESSIONS)
        session = Session(token, client_name[:MAX_CLIENT_NAME], local, self._limits, self._inodes, account)
        with self._lock:
            self._sessions[token] = session
        return session

    def find(self, token: bytes) -> Session | None:
        return self._sessions.get(token)

    def get(self, token: bytes) -> Session:
        """The session of a token; the same ``NotFoundError`` for one that never was and one that has ended."""
        session = self._sessions.get(token)
        if session is None:
            raise unknown_session()
        return session

    def close(self, session: Session) -> None:
        """End a session. Idempotent."""
        with self._lock:
            known = self._sessions.pop(session.token, None)
        session.close()
        if known is not None:
            session.account.give(Resource.SESSIONS)

    def close_all(self, timeout: float) -> bool:
        """End all sessions and wait until their memory is given back; False if work in flight still holds some."""
        with self._lock:
            sessions = list(self._sessions.values())
            self._sessions.clear()
        for session in sessions:
            session.close()
        deadline = time.monotonic() + timeout
        released = [session.wait_released(max(0.0, deadline - time.monotonic())) for session in sessions]
        return all(released)

    def all(self) -> list[Session]:
        """Those that are open, the oldest first."""
        with self._lock:
            return list(self._sessions.values())

    def collect_launches(self) -> bool:
        """Count what clients have launched in their own processes; False if none of them can."""
        with self._lock:
            sessions = list(self._sessions.values())
        return sum(session.caller_launches.collect() for session in sessions) > 0

    def announce_choices(self) -> None:
        """Tell clients that launch by themselves that their plans may get better kernels when they ask again."""
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.caller_launches.announce()

    def usage(self) -> Usage:
        total = Usage()
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            regions, buffers, _ = session.objects()
            total.sessions += 1
            total.regions += len(regions)
            total.region_bytes += sum(region.size for region in regions)
            total.buffers += len(buffers)
            total.buffer_bytes += sum(buffer.size for buffer in buffers)
            total.bindings += len(session.bindings())
            total.attached_connections += len(session.attachments)
        return total
