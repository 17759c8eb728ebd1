"""Quotas: how much of everything a session, a client's process and its principal may own.

A quota holds for all clients together. One principal has seven eighths of it at most, and one process at most as much
as it leaves to the other processes of its principal: half, if there is no other, whether it takes that at once or bit
by bit. So however much a process takes, something is left for the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from tilewright_kit.types.errors import ResourceExhaustedError
from tilewright_server.clients.client import Client

__all__ = ["REMEDIES", "Account", "Limits", "Quotas", "Resource", "buffer_charges"]

RETRY_S = 1.0
"""Time after which to try again what was refused, if others may make room for it."""
MOST_RATES = 4096
"""Processes, and principals, whose rate of calls is remembered."""

K = TypeVar("K", bound=Hashable)


class Resource(Enum):
    """Things that clients take, by the names that refusals say."""

    SESSIONS = "sessions"
    CONNECTIONS = "connections"
    STREAMS = "streams"
    REGIONS = "regions"
    REGION_BYTES = "region_bytes"
    KSERVE_REGION_BYTES = "kserve_region_bytes"
    BUFFERS = "buffers"
    BUFFER_BYTES = "buffer_bytes"
    HOST_BUFFER_BYTES = "host_buffer_bytes"
    PLANS = "plans"
    PLAN_BYTES = "plan_bytes"
    REQUEST_BYTES = "request_bytes"
    UNREAD_BYTES = "unread_bytes"


_FIXES = {
    Resource.SESSIONS: "close clients that are no longer used",
    Resource.CONNECTIONS: "close connections that are not needed, or launch several things over one",
    Resource.STREAMS: "close streams, or share one: many requests may be in flight on it",
    Resource.REGIONS: "unregister regions, or put several tensors into one",
    Resource.REGION_BYTES: "unregister regions, or make them no larger than what lies in them",
    Resource.KSERVE_REGION_BYTES: "unregister regions, or register less: no more than tensors lie in",
    Resource.BUFFERS: "free buffers that are no longer used",
    Resource.BUFFER_BYTES: "free buffers, or ask for smaller ones",
    Resource.HOST_BUFFER_BYTES: "free buffers of the CPU, ask for smaller ones, or share memory of the client's",
    Resource.PLANS: "release plans that are no longer used",
    Resource.PLAN_BYTES: "release plans, or prepare smaller ones",
    Resource.REQUEST_BYTES: "send fewer large requests at a time, or put operands into shared memory",
    Resource.UNREAD_BYTES: "read the replies that were asked for, or have results put into shared memory",
}


class Quotas:
    """Books of all that clients hold. Thread-safe."""

    def __init__(self, limits: Mapping[Resource, int] | None = None, call_rate: float = 0) -> None:
        """Resources without a limit are not refused. ``call_rate`` is in calls per second and process, and half of that
        of a principal; 0: any."""
        self._limits = dict(limits or {})
        self._rate = call_rate
        self._lock = threading.Lock()
        self._held: dict[tuple[Resource, str, str], int] = {}
        """By resource, principal and process; both empty for the sum."""
        self._refused: dict[str, int] = {}
        self._processes: _Rates[tuple[str, str]] = _Rates()
        self._principals: _Rates[str] = _Rates()

    def held(self, what: Resource) -> int:
        """Held by all clients together."""
        return self._held.get((what, "", ""), 0)

    def totals(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Held by all clients together, limits, and requests refused, each by resource."""
        with self._lock:
            held = {what.value: self._held.get((what, "", ""), 0) for what in Resource}
            return held, {what.value: limit for what, limit in self._limits.items()}, dict(self._refused)

    def set_limits(self, limits: Mapping[Resource, int], call_rate: float) -> None:
        """Other limits from now on; what is held beyond them stays."""
        with self._lock:
            self._limits = dict(limits)
            self._rate = call_rate

    def take(self, what: Resource, client: Client, amount: int = 1) -> None:
        """Count ``amount`` as held by ``client``. Raises ``ResourceExhaustedError``, and counts nothing, beyond the
        quota."""
        with self._lock:
            limit = self._limits.get(what)
            if limit is not None:
                self._check(what, client, amount, limit)
            self._add(what, client, amount)

    def give(self, what: Resource, client: Client, amount: int = 1) -> None:
        """Undo a ``take``."""
        with self._lock:
            self._add(what, client, -amount)

    def called(self, client: Client) -> None:
        """Count a call. Raises ``ResourceExhaustedError`` if its process makes too many of them, or its principal more
        than twice as many."""
        rate = self._rate
        if not rate:
            return
        process = (client.principal, client.process)
        with self._lock:
            now = time.monotonic()
            own = self._processes.left(process, now, rate)
            all_own = self._principals.left(client.principal, now, 2 * rate)
            if own >= 1 and all_own >= 1:
                self._processes.spend(process, own, now)
                self._principals.spend(client.principal, all_own, now)
                return
            self._refused["call_rate"] = self._refused.get("call_rate", 0) + 1
        if own >= 1:
            who, rate, own = "the processes of this client's user make", 2 * rate, all_own
        else:
            who = "this client's process makes"
        raise ResourceExhaustedError(
            f"{who} more than {rate:g} calls per second",
            field="call_rate",
            value=rate,
            rule="quota",
            fix="send several executions in one request, or use a stream or the local socket",
            retry_after_s=(1 - own) / rate,
        )

    def move(self, held: Mapping[Resource, int], old: Client, new: Client) -> None:
        """Count what ``old`` held as held by ``new``, whether its quota allows that or not."""
        with self._lock:
            for what, amount in held.items():
                self._add(what, old, -amount)
                self._add(what, new, amount)

    def _check(self, what: Resource, client: Client, amount: int, limit: int) -> None:
        total = self._held.get((what, "", ""), 0)
        principal = self._held.get((what, client.principal, ""), 0)
        process = self._held.get((what, client.principal, client.process), 0)
        share = limit - limit // 8
        if total + amount > limit:
            holder = f"all clients together hold {total}"
        elif principal + amount > share:
            holder = f"the processes of this client's user hold {principal}, and may hold {share}"
        elif 2 * (process + amount) + principal - process > share + 1:  # more than it leaves to others
            most = (share + 1 - (principal - process)) // 2
            holder = f"this client's process holds {process}, and may hold {most}, half of what its user's others leave"
        else:
            return
        self._refused[what.value] = self._refused.get(what.value, 0) + 1
        name = what.value.replace("_", " ")
        raise ResourceExhaustedError(
            f"no {amount} more {name}: the quota is {limit}, {holder}",
            field=what.value,
            value=limit,
            rule="quota",
            fix=_FIXES[what],
            retry_after_s=None if 2 * amount > share + 1 else RETRY_S,  # more than any process is ever given
        )

    def _add(self, what: Resource, client: Client, amount: int) -> None:
        held = self._held
        for key in ((what, "", ""), (what, client.principal, ""), (what, client.principal, client.process)):
            left = held.get(key, 0) + amount
            if left:
                held[key] = left
            else:
                held.pop(key, None)


class _Rates(Generic[K]):
    """Calls that somebody may make at once, and since when it is so, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[K, tuple[float, float]] = {}

    def __iter__(self) -> Iterator[K]:
        return iter(self._known)

    def left(self, key: K, now: float, rate: float) -> float:
        """Calls that may be made now."""
        left, since = self._known.get(key, (rate, now))
        return min(rate, left + (now - since) * rate)

    def spend(self, key: K, left: float, now: float) -> None:
        """Count one of ``left`` calls."""
        self._known.pop(key, None)
        while len(self._known) >= MOST_RATES:
            del self._known[next(iter(self._known))]
        self._known[key] = (left - 1, now)  # the last now: who called longest ago comes first


@dataclass(slots=True)
class Account:
    """Holdings of one session, which end together, and may turn out to be another process's. Thread-safe."""

    quotas: Quotas
    client: Client
    launches: int = 0
    """Launches of the session's bindings that the server made, about: several threads count."""
    _held: dict[Resource, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, what: Resource, amount: int = 1) -> None:
        """As ``Quotas.take``."""
        with self._lock:
            self.quotas.take(what, self.client, amount)
            self._held[what] = self._held.get(what, 0) + amount

    def take_all(self, charges: Mapping[Resource, int]) -> None:
        """Take several, or none of them. Raises as ``Quotas.take``."""
        taken: list[Resource] = []
        try:
            for what, amount in charges.items():
                self.take(what, amount)
                taken.append(what)
        except BaseException:
            for what in taken:
                self.give(what, charges[what])
            raise

    def give(self, what: Resource, amount: int = 1) -> None:
        with self._lock:
            self._held[what] = self._held.get(what, 0) - amount
            self.quotas.give(what, self.client, amount)

    def give_all(self, charges: Mapping[Resource, int]) -> None:
        for what, amount in charges.items():
            self.give(what, amount)

    def move(self, client: Client) -> None:
        """Charge another process."""
        with self._lock:
            self.quotas.move(self._held, self.client, client)
            self.client = client


def buffer_charges(taken: int, *, on_host: bool) -> Mapping[Resource, int]:
    """Charges of a buffer that takes ``taken`` bytes of its device, or of the host."""
    charges = {Resource.BUFFERS: 1, Resource.BUFFER_BYTES: taken}
    return charges | {Resource.HOST_BUFFER_BYTES: taken} if on_host else charges


REMEDIES = {
    "regions": "unregister regions, or put several tensors into one",
    "buffers": "free buffers that are no longer used",
    "buffer_bytes": "free buffers, or ask for a smaller one",
    "bindings": "unbind what is no longer launched",
    "plans": "release plans that are no longer used",
    "plan_bytes": "release plans, or prepare smaller ones",
}
"""For each quota of ``Limits``."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Quotas of each session."""

    regions: int = 4096
    buffers: int = 4096
    buffer_bytes: int = 4 << 30
    plans: int = 4096
    plan_bytes: int = 256 << 20
    bindings: int = 16384
