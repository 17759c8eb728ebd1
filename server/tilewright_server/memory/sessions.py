"""Sessions: what a client owns in the server, for exactly as long as its lease.

An object of a session is *pinned* by the requests that use it. Its end (unregistering, freeing, the end of the
session) takes it out of sight at once and releases it when the last pin goes, in the thread that held it: no thread
waits for a client's work but the one that asked for the end.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from tilewright_kit.errors import (
    AccessError,
    DeadlineError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    TilewrightError,
)
from tilewright_server.memory.buffers import ResidentBuffer
from tilewright_server.memory.pins import Pinned
from tilewright_server.memory.regions import InodeOwners, Region
from tilewright_server.memory.shm import OpenedFile

__all__ = ["Limits", "Session", "Sessions", "Usage"]

TOKEN_BYTES = 16
MAX_CLIENT_NAME = 256
MEMO_EXECUTIONS = 4096
"""Executions of remembered requests, all of one session together: a few MiB."""

_counter = itertools.count(1)
P = TypeVar("P", bound=Pinned)


def new_id() -> int:
    """An id that is never zero, cannot be guessed from another and does not come again (until 2**32 more have been
    given out).
    """
    return secrets.randbits(32) << 32 | (next(_counter) & 0xFFFFFFFF) or new_id()


@dataclass(frozen=True, slots=True)
class Limits:
    """Quotas; those of objects hold for each session."""

    sessions: int = 1024
    regions: int = 4096
    buffers: int = 4096
    buffer_bytes: int = 4 << 30
    plans: int = 4096


@dataclass(slots=True)
class Usage:
    """What sessions hold, all together."""

    sessions: int = 0
    regions: int = 0
    region_bytes: int = 0
    buffers: int = 0
    buffer_bytes: int = 0


class Session:
    """One client's regions, buffers and plans. Thread-safe. After ``close`` every method answers ``NotFoundError``."""

    def __init__(self, token: bytes, client_name: str, local: bool, limits: Limits, inodes: InodeOwners) -> None:
        self.token = token
        self.client_name = client_name
        self.local = local
        """True if the client came over a Unix socket: only then memory can be shared."""
        self.epoch = 0
        """Counts ends of objects and plans: what was resolved under another epoch may be gone."""
        self.memo: dict[bytes, Any] = {}
        """Requests of this session that were resolved before, by their bytes; empties with every new epoch."""
        self._remembered = 0
        self._limits = limits
        self._inodes = inodes
        self._changed = threading.Condition(threading.Lock())
        self._closed = False
        self._regions: dict[int, Region] = {}
        self._buffers: dict[int, ResidentBuffer] = {}
        self._ending: set[Pinned] = set()
        self._buffer_bytes = 0
        self._plans: dict[int, Any] = {}

    # Plans

    def add_plan(self, plan: Any) -> int:
        """Keep a prepared plan; ``ResourceExhaustedError`` at the quota."""
        with self._changed:
            self._check_open()
            if len(self._plans) >= self._limits.plans:
                raise _quota("plans", self._limits.plans, "release plans that are no longer used")
            plan_id = new_id()
            self._plans[plan_id] = plan
            return plan_id

    def plan(self, plan_id: int) -> Any:
        found = self._plans.get(plan_id)
        if found is None:
            raise unknown("plan", plan_id)
        return found

    def release_plan(self, plan_id: int) -> None:
        with self._changed:
            if self._plans.pop(plan_id, None) is None:
                raise unknown("plan", plan_id)
            self._next_epoch()

    # Regions

    def register(self, open_file: Callable[[], OpenedFile]) -> Region:
        """Register the memory file that ``open_file`` opens. Nothing stays open or mapped on any error."""
        if not self.local:
            raise AccessError(
                "shared memory cannot be registered over TCP: the caller cannot be told from any other process",
                field="source",
                rule="region_transport",
                fix="connect over the server's Unix socket, or send operands inline or in resident buffers",
            )
        with self._changed:
            self._check_open()
            if len(self._regions) >= self._limits.regions:
                raise _quota("regions", self._limits.regions, "unregister regions, or put several tensors into one")
        region = Region(open_file())
        try:
            self._inodes.claim(region.inode, self)
        except TilewrightError:
            region.release()
            raise
        try:
            self._adopt(region, self._regions)
        except TilewrightError:
            self._release(region)
            raise
        return region

    def unregister(self, region_id: int, deadline: float | None = None) -> None:
        """Forget a region and wait until nothing uses it; ``DeadlineError`` if that takes longer (it then goes away
        later).
        """
        self._end(self._regions, "region", region_id, deadline)

    def region(self, region_id: int) -> Region:
        found = self._regions.get(region_id)
        if found is None:
            raise unknown("region", region_id)
        return found

    # Buffers

    def create_buffer(self, nbytes: int, allocate: Callable[[int], ResidentBuffer]) -> ResidentBuffer:
        """Allocate a resident buffer within the quota."""
        if nbytes <= 0:
            raise InvalidArgumentError(
                "a buffer has at least one byte",
                field="bytes",
                value=nbytes,
                rule="buffer_size",
                fix="ask for one or more",
            )
        with self._changed:
            self._check_open()
            if len(self._buffers) >= self._limits.buffers:
                raise _quota("buffers", self._limits.buffers, "free buffers that are no longer used")
            if self._buffer_bytes + nbytes > self._limits.buffer_bytes:
                raise _quota("bytes", self._limits.buffer_bytes, "free buffers, or ask for a smaller one")
            self._buffer_bytes += nbytes
        try:
            buffer = allocate(nbytes)
        except BaseException:
            with self._changed:
                self._buffer_bytes -= nbytes
            raise
        try:
            self._adopt(buffer, self._buffers)
        except TilewrightError:
            self._release(buffer)
            raise
        return buffer

    def free_buffer(self, buffer_id: int, deadline: float | None = None) -> None:
        """As ``unregister``."""
        self._end(self._buffers, "buffer", buffer_id, deadline)

    def buffer(self, buffer_id: int) -> ResidentBuffer:
        found = self._buffers.get(buffer_id)
        if found is None:
            raise unknown("buffer", buffer_id)
        return found

    # Pins

    def pin(self, objects: Collection[Pinned]) -> None:
        """Keep all of ``objects`` (each once) alive until ``unpin``; ``NotFoundError``, and none is pinned, if one has
        ended.
        """
        with self._changed:
            for item in objects:
                if item.closing:
                    raise unknown(item.kind, item.id)
            for item in objects:
                item.pins += 1

    def unpin(self, objects: Collection[Pinned]) -> None:
        """Let go; the last to let go of an ended object releases it."""
        ended: list[Pinned] = []
        with self._changed:
            for item in objects:
                item.pins -= 1
                if item.closing and item.pins == 0:
                    ended.append(item)
        for item in ended:
            self._release(item)

    def remember(self, request: bytes, resolved: Any, executions: int, epoch: int) -> None:
        """Note what a request of so many executions resolved to, unless something ended since ``epoch``."""
        with self._changed:
            if self.epoch != epoch or self._closed:
                return
            self._remembered += executions + 1
            if self._remembered > MEMO_EXECUTIONS:
                self.memo.clear()
                self._remembered = executions + 1
            self.memo[request] = resolved

    # The whole

    @property
    def closed(self) -> bool:
        return self._closed

    def objects(self) -> tuple[list[Region], list[ResidentBuffer], list[int]]:
        """Regions, buffers and ids of plans, in the order of their making."""
        with self._changed:
            return list(self._regions.values()), list(self._buffers.values()), list(self._plans)

    def close(self) -> None:
        """End everything; what work in flight uses goes when that work is done. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._plans.clear()
            self._next_epoch()
            ended = [*self._regions.values(), *self._buffers.values()]
            self._regions.clear()
            self._buffers.clear()
            for item in ended:
                item.closing = True
            self._ending.update(ended)
            free = [item for item in ended if item.pins == 0]
        for item in free:
            self._release(item)

    def wait_released(self, timeout: float) -> bool:
        """Wait until all that has ended is given back."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._ending, timeout)

    def _adopt(self, item: P, table: dict[int, P]) -> None:
        with self._changed:
            self._check_open()
            item.id = new_id()
            table[item.id] = item

    def _end(self, table: dict[int, Any], kind: str, item_id: int, deadline: float | None) -> None:
        with self._changed:
            item = table.pop(item_id, None)
            if item is None:
                raise unknown(kind, item_id)
            item.closing = True
            self._ending.add(item)
            self._next_epoch()
            free = item.pins == 0
        if free:
            self._release(item)
            return
        with self._changed:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: item not in self._ending, timeout):
                raise DeadlineError(
                    f"work in flight still uses the {kind}; it goes when that work is done", field=kind, rule="deadline"
                )

    def _release(self, item: Pinned) -> None:
        """Give memory back, outside the lock: unmapping much memory takes a while."""
        try:
            item.release()
        finally:
            if isinstance(item, Region):
                self._inodes.drop(item.inode)
            with self._changed:
                if isinstance(item, ResidentBuffer):
                    self._buffer_bytes -= item.size
                self._ending.discard(item)
                self._changed.notify_all()

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.memo.clear()
        self._remembered = 0

    def _check_open(self) -> None:
        if self._closed:
            raise unknown_session()


class Sessions:
    """All sessions of the server."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Session] = {}
        self._inodes = InodeOwners()

    def open(self, client_name: str, *, local: bool) -> Session:
        """A new session under a random token; ``ResourceExhaustedError`` if there are too many."""
        with self._lock:
            if len(self._sessions) >= self._limits.sessions:
                raise _quota(
                    "sessions", self._limits.sessions, "close clients that are no longer used", retry_after_s=1.0
                )
            token = secrets.token_bytes(TOKEN_BYTES)
            session = Session(token, client_name[:MAX_CLIENT_NAME], local, self._limits, self._inodes)
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
            self._sessions.pop(session.token, None)
        session.close()

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
        return total


def unknown(kind: str, item_id: int) -> NotFoundError:
    """For ids that never were, that have ended, and that are another session's: nobody can tell which."""
    return NotFoundError(
        f"the session has no such {kind}",
        field=kind,
        value=item_id,
        rule=f"{kind}_id",
        fix=f"use the id of a {kind} of this session that has not been given back",
    )


def unknown_session() -> NotFoundError:
    return NotFoundError(
        "there is no such session",
        field="session",
        rule="session_token",
        fix="open a session and keep its stream open for as long as it is used",
    )


def _quota(what: str, limit: int, fix: str, retry_after_s: float | None = None) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"no more than {limit} {what} are allowed",
        field=what,
        value=limit,
        rule="quota",
        fix=fix,
        retry_after_s=retry_after_s,
    )
