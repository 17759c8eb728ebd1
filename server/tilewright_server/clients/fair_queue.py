"""A queue that serves its clients by what they have used: principals alike, below them processes, below those sessions.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) on each level: whoever is served is charged, and whoever was
charged least is next. A newcomer is level with the one that was served last, so it neither waits for what others did
before it came nor may catch up. Priorities are the level above principals: each has a share, so none starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar

__all__ = ["COSTS", "FairQueue", "Party", "Place", "is_full"]

T = TypeVar("T")
COSTS = (1, 4, 16)
"""Charge of a nanosecond by priority: interactive, batch, background. With work of all three waiting they have 16, 4
and 1 of 21 parts of the time."""
_REMEMBERED = 512
"""Clients below one node, idle ones among them, beyond which those that are idle are forgotten."""


class Party(Protocol):
    """A client of the queue (``client.Client`` fits)."""

    @property
    def principal(self) -> str: ...

    @property
    def process(self) -> str: ...

    @property
    def session(self) -> bytes: ...

    @property
    def priority(self) -> int: ...


class _Node:
    """A priority, a principal, a process or a session."""

    __slots__ = ("below", "cost", "key", "line", "now", "parent", "queued", "running", "used", "waiting")

    def __init__(self, parent: _Node | None, key: Hashable, cost: int = 1) -> None:
        self.parent = parent
        self.key = key
        self.cost = cost
        self.below: dict[Hashable, _Node] = {}
        self.line: list[tuple[int, int, _Node]] = []
        """Heap of those below with waiting items, by what they used. Entries that are no longer true stay in it until
        they come up."""
        self.waiting: deque[Place[object]] = deque()
        self.used = 0
        self.now = 0
        """Use of the child that was served last, before it was."""
        self.queued = self.running = 0


def is_full(limit: int, waiting: int, of_principal: int, of_process: int) -> bool:
    """Tell if a line of ``limit`` places, of which so many are taken, has none for somebody: one process has half of
    what others leave at most, and one principal seven eighths of all."""
    return of_process >= limit - waiting or of_principal >= limit - limit // 8


class Place(Generic[T]):
    """An item in the queue, and from ``take`` to ``give_back`` one that is served."""

    __slots__ = ("_leaf", "expected", "item")

    def __init__(self, item: T, leaf: _Node) -> None:
        self.item = item
        self._leaf = leaf
        self.expected = 0


class FairQueue(Generic[T]):
    """Not thread-safe: the owner's lock is held for each call."""

    def __init__(self) -> None:
        self._root = _Node(None, "")
        self._order = count()

    def __len__(self) -> int:
        """Items that wait."""
        return self._root.queued

    def waiting_of(self, party: Party) -> tuple[int, int]:
        """Items that wait of the party's principal, and those of its process among them."""
        principals = [item for each in self._root.below.values() if (item := each.below.get(party.principal))]
        processes = [item for each in principals if (item := each.below.get(party.process))]
        return sum(item.queued for item in principals), sum(item.queued for item in processes)

    def push(self, item: T, party: Party) -> Place[T]:
        """Line up behind those of the same session."""
        leaf = self._leaf(party)
        place = Place(item, leaf)
        leaf.waiting.append(place)  # type: ignore[arg-type]
        node = leaf
        while node.parent is not None:
            if not node.queued:
                node.used = max(node.used, node.parent.now)
            node.queued += 1
            if node.queued == 1:
                self._line_up(node)
            node = node.parent
        node.queued += 1
        return place

    def first(self) -> Place[T] | None:
        """The item that is next, if there is one."""
        node = self._root
        if not node.queued:
            return None
        while not node.waiting:
            line = node.line
            while not line[0][2].queued or line[0][0] != line[0][2].used:
                heappop(line)
            node = line[0][2]
        return node.waiting[0]  # type: ignore[return-value]

    def take(self, place: Place[T], expected: int) -> None:
        """Serve it, and charge what it is ``expected`` to cost until ``give_back`` says what it did."""
        node: _Node = place._leaf
        while node.parent is not None:
            node.parent.now = max(node.parent.now, node.used)
            node.running += 1
            node = node.parent
        place.expected = expected
        self.remove(place)
        self._charge(place._leaf, expected)

    def remove(self, place: Place[T]) -> None:
        """Take it out, unserved."""
        place._leaf.waiting.remove(place)  # type: ignore[arg-type]
        node: _Node | None = place._leaf
        while node is not None:
            node.queued -= 1
            node = node.parent

    def give_back(self, place: Place[T], spent: int) -> None:
        """The end of an item that was taken, which cost ``spent``."""
        self._charge(place._leaf, spent - place.expected)
        node: _Node = place._leaf
        while node.parent is not None:
            node.running -= 1
            node = node.parent

    def charge(self, party: Party, spent: int) -> None:
        """Charge what was served without a place."""
        leaf = self._leaf(party)
        node = leaf
        while node.parent is not None:
            if not node.queued:
                node.used = max(node.used, node.parent.now)
            node = node.parent
        self._charge(leaf, spent)

    def forget(self) -> None:
        """Forget who used how much: to be called when nothing waits or is served."""
        self._root = _Node(None, "")

    def _charge(self, leaf: _Node, spent: int) -> None:
        node = leaf
        while node.parent is not None:
            node.used += spent * node.cost
            if node.queued:
                self._line_up(node)
            node = node.parent

    def _line_up(self, node: _Node) -> None:
        assert node.parent is not None
        heappush(node.parent.line, (node.used, next(self._order), node))

    def _leaf(self, party: Party) -> _Node:
        priority = int(party.priority)
        found = _child(self._root, priority, COSTS[priority])
        for key in (party.principal, party.process, party.session):
            found = _child(found, key)
        return found


def _child(parent: _Node, key: Hashable, cost: int = 1) -> _Node:
    found = parent.below.get(key)
    if found is None:
        if len(parent.below) >= _REMEMBERED:
            idle = [node for node in parent.below.values() if not node.queued and not node.running]
            past = [node for node in idle if node.used <= parent.now]
            for node in past or idle:
                del parent.below[node.key]
        found = parent.below[key] = _Node(parent, key, cost)
        found.used = parent.now
    return found
