"""Owners of regions and plans: one for each client that the server can tell from others, with names of its own.

Everything that an owner has lies in a session, under its quotas, and ends with the connections over which it came.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import AccessError, CancelledError, NotFoundError
from tilewright_server.clients.client import Client
from tilewright_server.endpoints.kserve.connections import (
    Connection,
    maps_object,
    open_connections,
    peer_port,
    uid_of_port,
)
from tilewright_server.endpoints.kserve.counters import ModelCounters
from tilewright_server.engine.types import Selection
from tilewright_server.session.processes import UNKNOWN, is_known, pid_of
from tilewright_server.session.session import Session
from tilewright_server.session.sessions import Sessions

if TYPE_CHECKING:
    from tilewright_server.endpoints.kserve.charges import Debts

__all__ = ["LoadedPlan", "Owner", "Owners", "SharedRegion", "no_region"]

log = logging.getLogger("tilewright.kserve")

LOOK_S = 1.0
"""Time between looks for connections that have ended, while anything is registered."""


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """A region under the name that its owner gave it."""

    name: str
    key: str
    """POSIX object; empty for memory of a device."""
    offset: int
    byte_size: int
    device_id: int
    region: int
    """Id in the owner's session."""
    lease: frozenset[int]
    """Sockets of which one must be open."""


@dataclass(frozen=True, slots=True)
class LoadedPlan:
    """A prepared plan under the name that its owner gave it."""

    name: str
    request: OperationRequest
    selection: Selection
    outputs: tuple[Any, ...]
    """Operands that it writes."""
    plan: int
    """Id in the owner's session."""
    lease: frozenset[int]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    """Name, datatype and shape of its inputs, in the order in which they were given; none, if that does not say all."""
    counters: ModelCounters = field(default_factory=ModelCounters)


N = TypeVar("N", SharedRegion, LoadedPlan)


class Owner:
    """Names of one client. Thread-safe."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lock = threading.Lock()
        self.regions: dict[str, SharedRegion] = {}
        self.plans: dict[str, LoadedPlan] = {}
        self.lease: frozenset[int] = frozenset()
        """Sockets of which one must be open for the session, which requests under way use, to stay."""

    def items(self) -> tuple[list[SharedRegion], list[LoadedPlan]]:
        """All that has a name now."""
        with self.lock:
            return list(self.regions.values()), list(self.plans.values())

    def forget(self, table: dict[str, N], item: N) -> bool:
        """Take the name of ``item`` away; False if it has none any more."""
        with self.lock:
            if table.get(item.name) is not item:
                return False
            del table[item.name]
            return True

    def region(self, name: str) -> SharedRegion:
        """Raises ``NotFoundError``, in the same words for names of others and names that nobody has."""
        found = self.regions.get(name)
        if found is None:
            raise no_region(name)
        return found


class Owners:
    """All owners, and a thread that ends what outlives its connections. Thread-safe."""

    def __init__(self, sessions: Sessions, *, open_socket: bool) -> None:
        """``open_socket``: other users reach the Unix sockets, where callers that no relay knows are not told apart."""
        self._sessions = sessions
        self._open_socket = open_socket
        self._paths: set[str] = set()
        self._ports: set[int] = set()
        self._lock = threading.Lock()
        self._owners: dict[tuple[str, str], Owner] = {}
        self._making = threading.Lock()
        self._debts: Debts | None = None
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def listen(self, paths: Collection[str], ports: Collection[int]) -> None:
        """Take connections to these sockets as leases from now on."""
        self._paths, self._ports = set(paths), set(ports)

    @property
    def debts(self) -> Debts:
        """Debts for pages of objects that are not registered any more."""
        from tilewright_server.endpoints.kserve.charges import Debts  # not before the first region

        with self._making:
            if self._debts is None:
                self._debts = Debts()
            return self._debts

    def find(self, client: Client) -> Owner | None:
        """The owner that a client is; None if it has registered nothing."""
        return self._owners.get((client.principal, client.process))

    def uid(self, client: Client) -> int:
        """The user whose memory a client may name. Raises ``AccessError`` if the kernel does not say who calls."""
        if is_known(client):
            return int(client.principal.removeprefix("uid:").partition("@")[0])
        peer = client.process.removeprefix(UNKNOWN)
        if peer.startswith("unix:"):
            if self._open_socket:
                raise AccessError(
                    "several users reach this server's Unix socket, where they cannot be told apart",
                    field="name",
                    rule="region_transport",
                    fix="connect over TCP within the machine, where the kernel names the user of each connection",
                )
            return os.geteuid()
        port = peer_port(peer)
        uid = uid_of_port(port, self._ports) if port else None
        if uid is None:
            raise AccessError(
                "memory can be shared within one machine only, with a caller whom the kernel names",
                field="name",
                rule="region_transport",
                fix="connect over the server's Unix socket or a loopback address, or send tensors in messages",
            )
        return uid

    def lease(self, client: Client, name: str = "") -> frozenset[int]:
        """Sockets that a client may have called over: its own, or, of several over a Unix socket, those of processes
        that have the object ``name`` mapped. Raises ``CancelledError`` if there is none any more."""
        port = peer_port(client.process.removeprefix(UNKNOWN))
        own = [item for item in self._connections() if item.port == port and pid_of(client) in (None, item.pid)]
        mapping = [item for item in own if name and maps_object(item.pid, name)]
        found = frozenset(item.inode for item in mapping or own)
        if not found:
            raise CancelledError("the caller has gone away", rule="cancelled", fix="send it again over a connection")
        return found

    def owner(self, client: Client, lease: frozenset[int]) -> Owner:
        """The owner that a client is, made if there is none, for as long as ``lease`` lasts. Raises
        ``ResourceExhaustedError``."""
        key = (client.principal, client.process)
        with self._lock:
            found = self._owners.get(key)
            if found is None or found.session.closed:
                found = self._owners[key] = Owner(self._sessions.open("kserve", local=True, client=client))
            found.lease |= lease
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="kserve-leases", daemon=True)
                self._thread.start()
        self._wake.set()
        return found

    def close(self) -> None:
        """End all owners."""
        with self._lock:
            self._closed = True
            owners = list(self._owners.values())
            self._owners.clear()
        self._wake.set()
        for owner in owners:
            self._sessions.close(owner.session)
        if self._debts is not None:
            self._debts.close()

    def _connections(self) -> list[Connection]:
        return open_connections(self._paths, self._ports)

    def _watch(self) -> None:
        while not self._closed:
            self._wake.wait()
            time.sleep(LOOK_S)
            try:
                self.look()
            except Exception:
                log.exception("looking for ended connections failed")

    def look(self) -> None:
        """End what no connection holds any more."""
        with self._lock:
            owners = list(self._owners.items())
        seen = [(key, owner, owner.lease, *owner.items()) for key, owner in owners]
        # Afterwards: what came meanwhile has connections that are not among these.
        is_open = {item.inode for item in self._connections()}
        for key, owner, lease, regions, plans in seen:
            for region in regions:
                if region.lease.isdisjoint(is_open) and owner.forget(owner.regions, region):
                    _quietly(partial(owner.session.unregister, region.region, time.monotonic()))
            for plan in plans:
                if plan.lease.isdisjoint(is_open) and owner.forget(owner.plans, plan):
                    _quietly(partial(owner.session.release_plan, plan.plan))
            if lease.isdisjoint(is_open):
                self._end(key, owner, lease)
        self.debts.look()
        with self._lock:
            if not self._owners and not self.debts and not self._closed:
                self._wake.clear()

    def _end(self, key: tuple[str, str], owner: Owner, lease: frozenset[int]) -> None:
        """End an owner, unless he has come again since ``lease`` was looked at."""
        with self._lock:
            if owner.lease != lease or self._owners.get(key) is not owner:
                return
            del self._owners[key]
        self._sessions.close(owner.session)


def no_region(name: str) -> NotFoundError:
    """For names that nobody has, and for those of others: nobody can tell which."""
    return NotFoundError(
        "this client has no shared-memory region of that name",
        field="shared_memory_region",
        value=name,
        rule="region_name",
        fix="register it over this connection first",
    )


def _quietly(end: Callable[[], None]) -> None:
    try:
        end()
    except Exception as error:  # it goes when the work is done that uses it
        log.debug("ending with its connection: %s", error)
