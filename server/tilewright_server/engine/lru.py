"""A bounded mapping that forgets what was not used for longest."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Lru"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_LARGEST = 4
"""Largest part of the limit that one item may weigh to be kept: it would push out too much else."""


class Lru(Generic[K, V]):
    """Thread-safe. Bounded by the number of items and, if ``max_weight`` is given, by the sum of their weights."""

    def __init__(self, limit: int, max_weight: int | None = None) -> None:
        self._limit = max(1, limit)
        self._max_weight = max_weight
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.weight = 0
        """Weight of all items."""

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: K) -> V | None:
        with self._lock:
            item = self._items.get(key)
            if item is None:
                return None
            self._items.move_to_end(key)
            return item[0]

    def put(self, key: K, value: V, weight: int = 0) -> None:
        """Keep ``value``, unless it is too heavy to be worth it."""
        with self._lock:
            self._put(key, value, weight)

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The value of ``key``, made by ``make`` (which must be quick) if there is none; it weighs nothing yet."""
        with self._lock:
            item = self._items.get(key) or (make(), 0)
            self._put(key, *item)
            return item[0]

    def weigh(self, key: K, value: V, weight: int) -> None:
        """Say what ``value`` weighs now, if it is still what ``key`` stands for."""
        with self._lock:
            item = self._items.get(key)
            if item is not None and item[0] is value:
                self._put(key, value, weight)

    def discard(self, key: K) -> None:
        with self._lock:
            self._take(key)

    def discard_if(self, condition: Callable[[K, V], bool]) -> None:
        """Forget the items for which ``condition`` (which must be quick) holds."""
        with self._lock:
            for key in [key for key, (value, _) in self._items.items() if condition(key, value)]:
                self._take(key)

    def values(self) -> list[V]:
        """All values, those first that were not used for longest."""
        with self._lock:
            return [value for value, _ in self._items.values()]

    def drop_oldest(self) -> bool:
        """Forget one item; False if there is none."""
        with self._lock:
            if not self._items:
                return False
            self._take(next(iter(self._items)))
            return True

    def clear(self) -> None:
        with self._lock:
            self._items.clear()
            self.weight = 0

    def _take(self, key: K) -> None:
        item = self._items.pop(key, None)
        if item is not None:
            self.weight -= item[1]

    def _put(self, key: K, value: V, weight: int) -> None:
        self._take(key)
        most = self._max_weight
        if most is not None and weight > most // _LARGEST:
            return
        self._items[key] = (value, weight)
        self.weight += weight
        while len(self._items) > self._limit or (most is not None and self.weight > most):
            self._take(next(iter(self._items)))
