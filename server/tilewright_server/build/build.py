"""One build of a kernel, shared by all who want it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Literal, Protocol

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import TilewrightError
from tilewright_server.build.cache.artifacts import ArtifactMeta
from tilewright_server.protocol.request_ids import current

__all__ = ["Build", "BuildEvent", "BuildState", "SharedState", "SharedStore", "Waiter"]

BuildState = Literal["queued", "building", "built", "cached", "failed"]
log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""How often a caller that waits is looked at: the end of its session wakes nobody."""


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """Progress of one kernel. ``done`` and ``total`` count kernels where several are built in one call."""

    name: str
    key: str
    state: BuildState
    build_ns: int = 0
    error: TilewrightError | None = None
    done: int = 0
    total: int = 0


class Waiter(Protocol):
    """Interface of a caller that waits for a build (``engine.Call`` fits)."""

    def check(self) -> None: ...

    def remaining(self) -> float | None: ...

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]: ...


@dataclass(frozen=True, slots=True)
class SharedState:
    """State of a ``SharedStore``, for metrics."""

    objects: Mapping[tuple[str, str], int]
    """Counts by kind of object and what became of it."""
    waiting: int
    """Objects that are to be written."""
    serves: bool
    """False while it is left alone since it fails."""


class SharedStore(Protocol):
    """Kernels that other machines have built. No method raises."""

    def fetch(self, key: str, unit: SourceUnit, arch: ArchSpec) -> ArtifactMeta | None:
        """Add the kernel to the cache; None if it cannot be had."""
        ...

    def built(self, key: str) -> None:
        """Take a kernel that was built here; returns at once."""
        ...

    def state(self) -> SharedState: ...


class Build:
    """One build, shared by all who want it.

    Nobody's deadline ends it: the others, and the cache, still want the result.
    """

    def __init__(self, key: str, name: str) -> None:
        self.key = key
        self.name = name
        self.state: BuildState = "queued"
        self.request = current()
        """Id of the request that asked for it first."""
        self.build_ns = 0
        self.error: TilewrightError | None = None
        self._listeners: list[Callable[[BuildEvent], None]] = []
        self._waiting: set[threading.Event] = set()
        self._lock = threading.Lock()
        self._delivery = threading.RLock()
        """Held while listeners are called, so that each hears the states in their order."""

    @property
    def done(self) -> bool:
        return self.state in ("built", "cached", "failed")

    def event(self) -> BuildEvent:
        return BuildEvent(self.name, self.key, self.state, self.build_ns, self.error)

    def listen(self, listener: Callable[[BuildEvent], None]) -> None:
        """Call ``listener`` with the present state and every later one."""
        with self._delivery:
            self._listeners.append(listener)
            _tell(listener, self.event())

    def wait(self, call: Waiter) -> None:
        """Wait for the end. Raises the build's error, ``DeadlineError`` or ``CancelledError``."""
        woken = threading.Event()
        forget = call.on_cancel(woken.set)
        with self._lock:
            self._waiting.add(woken)
        try:
            while not self.done:
                call.check()
                left = call.remaining()
                woken.wait(_LOOK_S if left is None else min(left, _LOOK_S))
        finally:
            forget()
            with self._lock:
                self._waiting.discard(woken)
        if self.error is not None:
            raise copy(self.error)

    def enter(self, state: BuildState, *, build_ns: int = 0, error: TilewrightError | None = None) -> None:
        """For the pool: move on, wake those who wait, tell those who listen."""
        with self._delivery:
            with self._lock:
                self.build_ns, self.error = build_ns, error
                self.state = state
                waiting = tuple(self._waiting) if self.done else ()
            for woken in waiting:
                woken.set()
            event = self.event()
            for listener in tuple(self._listeners):
                _tell(listener, event)


def _tell(listener: Callable[[BuildEvent], None], event: BuildEvent) -> None:
    """A listener that fails concerns neither the build nor the others."""
    try:
        listener(event)
    except Exception:
        log.exception("a listener of the build of %s failed", event.name)
