"""A session: what one client owns in the server, for exactly as long as its lease.

An object of a session is *pinned* by the requests that use it. Its end (unregistering, freeing, the end of the
session) takes it out of sight at once and releases it when the last pin goes, in the thread that held it: no thread
waits for a client's work but the one that asked for the end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar

from tilewright_kit.types.errors import TilewrightError
from tilewright_server.clients.client import Client
from tilewright_server.clients.refusals import over_session_quota
from tilewright_server.memory.buffers import ResidentBuffer
from tilewright_server.memory.device_regions import DeviceRegion
from tilewright_server.memory.errors import empty_buffer, not_over_tcp, still_used, unknown, unknown_session
from tilewright_server.memory.guard import watch
from tilewright_server.memory.headroom import check_address_space
from tilewright_server.memory.pinned import Pinned
from tilewright_server.memory.populated import taken_away
from tilewright_server.memory.regions import InodeOwners, Region
from tilewright_server.memory.shm import OpenedFile
from tilewright_server.session.launch_page import CallerLaunches
from tilewright_server.session.objects import AnyRegion, new_id
from tilewright_server.session.operands.bindings import AttachedConnection, BoundExecution, spoilt_regions
from tilewright_server.session.processes import is_known
from tilewright_server.session.quotas import REMEDIES, Account, Limits, Resource, buffer_charges
from tilewright_server.session.request_cache import Memo

__all__ = ["Session"]

log = logging.getLogger("tilewright.session.regions")

P = TypeVar("P", bound=Pinned)
R = TypeVar("R", Region, DeviceRegion)


class Session:
    """One client's regions, buffers, bindings and plans. Thread-safe.

    After ``close`` every method answers ``NotFoundError``.
    """

    def __init__(
        self,
        token: bytes,
        client_name: str,
        local: bool,
        limits: Limits,
        inodes: InodeOwners,
        account: Account,
    ) -> None:
        self.token = token
        self.account = account
        self.client = replace(account.client, session=token)
        self.client_name, self.opened = client_name, time.monotonic()
        self.local = local
        """True if the client came over a Unix socket: only then memory can be shared."""
        self.epoch = 0
        """Counts ends of objects and plans: what was resolved under another epoch may be gone."""
        self.memo = Memo()
        """Requests of this session that were resolved before, by their bytes; empties with every new epoch."""
        self._limits = limits
        self._inodes = inodes
        self._changed = threading.Condition(threading.Lock())
        self._closed = False
        self._regions: dict[int, AnyRegion] = {}
        self._buffers: dict[int, ResidentBuffer] = {}
        self._bindings: dict[int, BoundExecution] = {}
        self.attaching = threading.Lock()
        self.attachments: set[AttachedConnection] = set()
        """Connections that devices serve by themselves. Who makes bindings known to them, or ends them, holds
        ``attaching``."""
        self._watchers: set[Callable[[], None]] = set()
        self._ending: set[Pinned] = set()
        self._buffer_bytes = 0
        self._plans: dict[int, tuple[Any, int]] = {}
        self._plan_bytes = 0
        self.caller_launches = CallerLaunches(self._plans)

    def identify(self, client: Client) -> None:
        """Charge what the session holds to the process that it has turned out to be of, unless that was known."""
        if is_known(self.client):
            return
        self.account.move(client)
        self.client = replace(client, session=self.token, priority=self.client.priority)

    # Plans

    def add_plan(self, plan: Any, nbytes: int = 0) -> int:
        """Keep a prepared plan that takes about ``nbytes`` of memory; ``ResourceExhaustedError`` at the quota."""
        with self._changed:
            self._check_room("plans", len(self._plans))
            self._check_room("plan_bytes", self._plan_bytes, nbytes)
            self.account.take_all({Resource.PLANS: 1, Resource.PLAN_BYTES: nbytes})
            plan_id = new_id()
            self._plans[plan_id] = (plan, nbytes)
            self._plan_bytes += nbytes
            return plan_id

    def plan(self, plan_id: int) -> Any:
        found = self._plans.get(plan_id)
        if found is None:
            raise unknown("plan", plan_id)
        return found[0]

    def release_plan(self, plan_id: int) -> None:
        self.caller_launches.collect()
        with self._changed:
            released = self._plans.pop(plan_id, None)
            if released is None:
                raise unknown("plan", plan_id)
            self._plan_bytes -= released[1]
            self.account.give_all({Resource.PLANS: 1, Resource.PLAN_BYTES: released[1]})
            self._next_epoch()

    # Regions

    def register(self, open_file: Callable[[], OpenedFile], owner: object = None) -> Region:
        """Register the memory file that ``open_file`` opens. Nothing stays open or mapped on any error."""
        self._check_new_region()
        opened = open_file()
        try:
            check_address_space(opened.bytes)
            self.account.take_all({Resource.REGIONS: 1, Resource.REGION_BYTES: opened.bytes})
        except TilewrightError:
            os.close(opened.fd)
            raise
        region = None
        try:
            region = Region(opened)
            self._inodes.claim(region.inode, self)
        except BaseException:
            self._discharge_region(opened.bytes)
            if region is not None:
                region.release()
            raise
        return self._adopted(region, owner)

    def _discharge_region(self, nbytes: int) -> None:
        self.account.give_all({Resource.REGIONS: 1, Resource.REGION_BYTES: nbytes})

    def import_region(self, map_memory: Callable[[], DeviceRegion], owner: object = None) -> DeviceRegion:
        """Register memory that ``map_memory`` maps of a device. Nothing stays mapped on any error."""
        self._check_new_region()
        return self._adopted(map_memory(), owner)

    def _check_new_region(self) -> None:
        if not self.local:
            raise not_over_tcp()
        with self._changed:
            self._check_room("regions", len(self._regions))

    def _adopted(self, region: R, owner: object) -> R:
        region.owner = owner
        try:
            self._adopt(region, "regions", self._regions)
        except TilewrightError:
            self._release(region)
            raise
        return region

    def unregister(self, region_id: int, deadline: float | None = None) -> None:
        """Forget a region and wait until nothing uses it; ``DeadlineError`` if that takes longer (it then goes away
        later).
        """
        self._end(self._regions, "region", region_id, deadline)

    def region(self, region_id: int) -> AnyRegion:
        found = self._regions.get(region_id)
        if found is None:
            raise unknown("region", region_id)
        return found

    # Buffers

    def create_buffer(
        self,
        nbytes: int,
        allocate: Callable[[int], ResidentBuffer],
        takes: Callable[[int], int] = int,
        *,
        on_host: bool,
    ) -> ResidentBuffer:
        """Allocate a resident buffer within the quota, to which all counts that it ``takes`` of the device, or, if that
        shares the host's memory, of that."""
        if nbytes <= 0:
            raise empty_buffer(nbytes)
        check_address_space(nbytes)
        taken = takes(nbytes)
        with self._changed:
            self._check_room("buffers", len(self._buffers))
            self._check_room("buffer_bytes", self._buffer_bytes, taken)
            self.account.take_all(buffer_charges(taken, on_host=on_host))
            self._buffer_bytes += taken
        try:
            buffer = allocate(nbytes)
        except BaseException:
            with self._changed:
                self._discharge_buffer(taken, on_host=on_host)
            raise
        buffer.taken_bytes = taken
        try:
            self._adopt(buffer, "buffers", self._buffers)
        except TilewrightError:
            self._release(buffer)
            raise
        return buffer

    def _discharge_buffer(self, taken: int, *, on_host: bool) -> None:
        self._buffer_bytes -= taken
        self.account.give_all(buffer_charges(taken, on_host=on_host))

    def free_buffer(self, buffer_id: int, deadline: float | None = None) -> None:
        """As ``unregister``."""
        self._end(self._buffers, "buffer", buffer_id, deadline)

    def buffer(self, buffer_id: int) -> ResidentBuffer:
        found = self._buffers.get(buffer_id)
        if found is None:
            raise unknown("buffer", buffer_id)
        return found

    # Bindings

    def bind(self, bound: BoundExecution, publish: Callable[[BoundExecution], None] | None = None) -> BoundExecution:
        """Keep a binding, with all that it uses. ``publish`` makes it known elsewhere, under its id, before anybody can
        name it; ``attaching`` is held meanwhile. ``NotFoundError`` if something that it uses has ended."""
        with self._changed:
            self._check_room("bindings", len(self._bindings))
        self.pin(bound.objects)
        try:
            bound.id = new_id()
            if publish is None:
                self._keep(bound)
            else:
                with self.attaching:
                    publish(bound)
                    self._keep(bound)
        except BaseException:
            self._release(bound)
            raise
        return bound

    def _keep(self, bound: BoundExecution) -> None:
        with self._changed:
            self._check_room("bindings", len(self._bindings))
            for item in bound.objects:  # what ends from now on ends the binding; what has ended would wait for it
                if item.closing:
                    raise unknown(item.kind, item.id)
            self._bindings[bound.id] = bound

    def unbind(self, binding_id: int, deadline: float | None = None) -> None:
        """As ``unregister``."""
        self._end(self._bindings, "binding", binding_id, deadline)

    def binding(self, binding_id: int) -> BoundExecution:
        found = self._bindings.get(binding_id)
        if found is None:
            raise unknown("binding", binding_id)
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

    def unpin(self, objects: Collection[Pinned], *, quietly: bool = False) -> None:
        """Let go; the last to let go of an ended object releases it. Unless ``quietly``, ``InvalidArgumentError`` if
        pages of a region were taken away while they were used: it ends, and what was computed with it is void."""
        spoilt = watch.counts.spoilt and not quietly and self._end_spoilt(objects)
        ended: list[Pinned] = []
        with self._changed:
            for item in objects:
                item.pins -= 1
                if item.closing and item.pins == 0:
                    ended.append(item)
        for item in ended:
            self._release(item)
        if spoilt:
            raise taken_away()

    def _end_spoilt(self, objects: Collection[Pinned]) -> bool:
        spoilt = spoilt_regions(objects)
        with self._changed:
            self._close_items([item for item in spoilt if not item.closing])
        return bool(spoilt)

    def remember(self, request: bytes, resolved: Any, nbytes: int, epoch: int) -> None:
        """Note what a request resolved to, which takes about ``nbytes`` besides the request, unless something ended
        since ``epoch``.
        """
        with self._changed:
            if self.epoch == epoch and not self._closed:
                self.memo.put(request, resolved, nbytes)

    # The whole

    @property
    def closed(self) -> bool:
        return self._closed

    def objects(self) -> tuple[list[AnyRegion], list[ResidentBuffer], list[int]]:
        """Regions, buffers and ids of plans, in the order of their making."""
        with self._changed:
            return list(self._regions.values()), list(self._buffers.values()), list(self._plans)

    def bindings(self) -> list[BoundExecution]:
        """In the order of their making."""
        with self._changed:
            return list(self._bindings.values())

    def on_close(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Have ``watcher`` run at the end of the session, in any thread. Returns a function that forgets it.
        ``NotFoundError`` if the session has ended."""
        with self._changed:
            self._check_open()
            self._watchers.add(watcher)
        return lambda: self._watchers.discard(watcher)

    def end_of(self, owner: object) -> None:
        """End what was made under ``owner``, and the bindings that use it, without waiting for work in flight."""
        with self._changed:
            items = [item for table in self._tables() for item in table.values() if item.owner is owner]
            free = self._close_items(items)
        for item in free:
            self._release(item)

    def close(self) -> None:
        """End everything; what work in flight uses goes when that work is done. Idempotent."""
        self.caller_launches.close()
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self.account.give_all({Resource.PLANS: len(self._plans), Resource.PLAN_BYTES: self._plan_bytes})
            self._plans.clear()
            free = self._close_items([item for table in self._tables() for item in table.values()])
            watchers = list(self._watchers)
        for watcher in watchers:
            _tell(watcher)
        for item in free:
            self._release(item)

    def wait_released(self, timeout: float) -> bool:
        """Wait until all that has ended is given back."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._ending, timeout)

    def _adopt(self, item: P, what: str, table: dict[int, P]) -> None:
        with self._changed:
            self._check_room(what, len(table))  # others may have come first while it was made
            item.id = new_id()
            table[item.id] = item

    def _tables(self) -> tuple[dict[int, Any], ...]:
        return self._bindings, self._regions, self._buffers

    def _close_items(self, items: Collection[Pinned]) -> list[Pinned]:
        """Take ``items`` and the bindings that use one out of sight. Lock held.

        Returns what the caller releases, outside the lock. What is pinned is released by whom it is pinned: a region
        that only bindings use, by the release of the last of them.
        """
        users: list[BoundExecution] = []
        pinned = {item for item in items if item.pins}
        if pinned:
            users = [bound for bound in self._bindings.values() if not pinned.isdisjoint(bound.objects)]
        ended = list(dict.fromkeys((*users, *items)))
        tables = self._tables()
        for item in ended:
            item.closing = True
            for table in tables:
                table.pop(item.id, None)
        self._ending.update(ended)
        self._next_epoch()
        return [item for item in ended if item.pins == 0]

    def _end(self, table: dict[int, Any], kind: str, item_id: int, deadline: float | None) -> None:
        with self._changed:
            item = table.get(item_id)
            if item is None:
                raise unknown(kind, item_id)
            free = self._close_items((item,))
        for ended in free:
            self._release(ended)
        with self._changed:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: item not in self._ending, timeout):
                raise still_used(kind, item_id)

    def _release(self, item: Pinned) -> None:
        """Give memory back, outside the lock: unmapping much memory takes a while."""
        try:
            item.release()
        # What is left to do, here and with other items, must be done all the same.
        except TilewrightError as error:  # of a device that is lost, say
            log.warning("a %s could not be given back: %s", item.kind, error)
        except Exception:
            log.exception("a %s could not be given back", item.kind)
        finally:
            if isinstance(item, Region):
                self._inodes.drop(item.inode)
                self._discharge_region(item.size)
            elif isinstance(item, BoundExecution):
                self.unpin(item.objects, quietly=True)
            with self._changed:
                if isinstance(item, ResidentBuffer):
                    self._discharge_buffer(item.taken_bytes, on_host=item.on_host)
                self._ending.discard(item)
                self._changed.notify_all()

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.memo.empty()

    def _check_room(self, what: str, held: int, more: int = 1) -> None:
        """Raise an error unless the session is open, and has room for so many more. Lock held."""
        self._check_open()
        if held + more > (limit := getattr(self._limits, what)):
            reason = f"no more than {limit} {what.replace('_', ' ')} are allowed in a session: this one holds {held}"
            raise over_session_quota(what, limit, reason, REMEDIES[what])

    def _check_open(self) -> None:
        if self._closed:
            raise unknown_session()


def _tell(watcher: Callable[[], None]) -> None:
    """The others are to hear of the end as well, and everything is to be given back."""
    try:
        watcher()
    except Exception:
        log.exception("telling of the end of a session failed")
