"""Loaded kernels: each once for a device, kept while something uses it and for a while longer.

A loaded kernel costs memory mappings, of which a process may have some 65,000, and a lock on its entry in the cache,
which cannot be evicted meanwhile. So there is a bound on how many stay loaded that nobody uses.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from tilewright_kit.contract.device import Module
from tilewright_kit.types.errors import ResourceExhaustedError
from tilewright_server.build.cache.artifacts import Artifact
from tilewright_server.devices.lifetime import is_lost

__all__ = ["ModuleUse", "Modules", "Place"]

Place = tuple[str, str]
"""Device id and artifact key."""

_USED = 8
"""So many times the bound may be loaded if all of them are in use; more is refused."""


@dataclass(slots=True, eq=False)
class _Loaded:
    place: Place
    module: Module
    artifact: Artifact
    users: int = 0

    def unload(self) -> None:
        self.module.unload()
        self.artifact.release()


class ModuleUse:
    """A module that stays loaded for as long as this object exists."""

    __slots__ = ("_loaded", "_released")

    def __init__(self, loaded: _Loaded, released: deque[_Loaded]) -> None:
        self._loaded = loaded
        self._released = released

    @property
    def artifact(self) -> Artifact:
        """Its entry in the cache, which cannot be evicted meanwhile."""
        return self._loaded.artifact

    def function(self, symbol: str) -> int:
        return self._loaded.module.function(symbol)

    def __del__(self) -> None:
        # This may run anywhere, with any lock held: it only leaves a note.
        self._released.append(self._loaded)


class Modules:
    """Thread-safe. What is out of use is unloaded when more than ``limit`` are loaded, the longest unused first."""

    def __init__(self, limit: int) -> None:
        self.limit = max(1, limit)
        self._known: dict[Place, _Loaded] = {}
        self._unused: OrderedDict[Place, _Loaded] = OrderedDict()
        self._released: deque[_Loaded] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, place: Place) -> bool:
        return place in self._known

    def use(self, place: Place, load: Callable[[], tuple[Module, Artifact]]) -> ModuleUse:
        """Use a module, loaded by ``load`` if need be. Raises what that raises, and ``ResourceExhaustedError``."""
        with self._lock:
            self._settle()
            known = self._known.get(place)
            if known is not None and not is_lost(known.module):
                return self._use(known)
            if len(self._known) - len(self._unused) >= _USED * self.limit:
                raise self._full()
        fresh = _Loaded(place, *load())
        with self._lock:
            known = self._known.setdefault(place, fresh)
            if is_lost(known.module):
                known.artifact.release()
                known = self._known[place] = fresh
            use = self._use(known)
        if known is not fresh:  # another thread was faster
            fresh.unload()
        self.trim()
        return use

    def trim(self) -> bool:
        """Unload what is too many and out of use; True if more than the bound are loaded still, all of them in use."""
        surplus: list[_Loaded] = []
        with self._lock:
            self._settle()
            while len(self._known) > self.limit and self._unused:
                place, loaded = self._unused.popitem(last=False)
                del self._known[place]
                surplus.append(loaded)
            crowded = len(self._known) > self.limit
        for loaded in surplus:
            loaded.unload()
        return crowded

    def drop(self, device: str) -> None:
        """The device was lost, and what was loaded on it: let go of the cache's entries."""
        with self._lock:
            lost = [loaded for place, loaded in self._known.items() if place[0] == device and is_lost(loaded.module)]
            for loaded in lost:
                del self._known[loaded.place]
                self._unused.pop(loaded.place, None)
        for loaded in lost:
            loaded.unload()

    def close(self) -> None:
        """Let go of the cache's entries. Devices unload their modules when they are closed, which must come first."""
        with self._lock:
            known, self._known = self._known, {}
            self._unused.clear()
        for loaded in known.values():
            loaded.artifact.release()

    def _use(self, loaded: _Loaded) -> ModuleUse:
        loaded.users += 1
        self._unused.pop(loaded.place, None)
        return ModuleUse(loaded, self._released)

    def _settle(self) -> None:
        """Note who has gone. Lock held."""
        while True:
            try:
                loaded = self._released.popleft()
            except IndexError:
                return
            loaded.users -= 1
            if not loaded.users and self._known.get(loaded.place) is loaded:
                self._unused[loaded.place] = loaded

    def _full(self) -> ResourceExhaustedError:
        return ResourceExhaustedError(
            f"{_USED * self.limit} kernels are loaded and in use, which is as many as can be",
            field="kernels",
            value=_USED * self.limit,
            rule="loaded_kernels",
            fix="release plans that are no longer used, or raise the server's max_loaded_kernels",
        )
