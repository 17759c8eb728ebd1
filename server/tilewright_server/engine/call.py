"""The caller's side of a request: how long it waits, and whether it is still there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from tilewright_kit.types.errors import CancelledError, DeadlineError
from tilewright_server.clients.client import ANONYMOUS, Client

__all__ = ["Call", "Cancellation", "Owner", "WouldWaitError"]


class Owner(Protocol):
    """Owner of the memory that the work is done on."""

    @property
    def closed(self) -> bool: ...


class WouldWaitError(Exception):
    """A call that is to be made at once, or not at all, would have to wait. Nothing was done."""


class Cancellation:
    """A flag that is raised once, with callbacks for whoever is blocked on the caller's behalf. Thread-safe."""

    __slots__ = ("_callbacks", "_lock", "_raised")

    def __init__(self) -> None:
        self._raised = False
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def cancelled(self) -> bool:
        return self._raised

    def cancel(self) -> None:
        """Raise the flag and run the callbacks in the calling thread. Further calls do nothing."""
        with self._lock:
            if self._raised:
                return
            self._raised = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` run when the flag is raised (at once, if it is already).

        Returns a function that forgets it.
        """
        with self._lock:
            if not self._raised:
                self._callbacks.append(callback)
                return lambda: self._forget(callback)
        callback()
        return lambda: None

    def _forget(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)


class Call:
    """One request on its way through the engine.

    ``deadline`` is in ``time.monotonic()`` seconds; None waits for as long as it takes. The end of ``owner``, if one is
    set, cancels it. The engine writes what it did for this call into ``plan_ns``, ``build_ns`` and ``plan_cached``; a
    call object serves one request at a time.
    """

    __slots__ = ("build_ns", "cancellation", "client", "deadline", "owner", "patient", "plan_cached", "plan_ns")

    def __init__(
        self, deadline: float | None = None, cancellation: Cancellation | None = None, client: Client = ANONYMOUS
    ) -> None:
        self.deadline = deadline
        self.client = client
        self.cancellation = cancellation
        self.owner: Owner | None = None
        self.patient = True
        """False: it raises ``WouldWaitError`` where it would have to wait for others."""
        self.plan_ns = 0
        self.build_ns = 0
        self.plan_cached = False

    @classmethod
    def within(
        cls, seconds: float | None, cancellation: Cancellation | None = None, client: Client = ANONYMOUS
    ) -> Call:
        """A call that is given up ``seconds`` from now."""
        return cls(None if seconds is None else time.monotonic() + seconds, cancellation, client)

    def check(self) -> None:
        """Raise ``CancelledError`` if the caller went away, ``DeadlineError`` if its time is over."""
        if self.cancellation is not None and self.cancellation.cancelled:
            raise CancelledError(
                "the request was cancelled before its work was launched",
                field="request",
                rule="cancelled",
                fix="send it again if it is still wanted",
            )
        if self.owner is not None and self.owner.closed:
            raise CancelledError(
                "the session of the request ended before its work was launched",
                field="session",
                rule="session_ended",
                fix="keep the session's stream open for as long as it is used",
            )
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise DeadlineError(
                "the deadline passed before the work was launched",
                field="timeout",
                rule="deadline",
                fix="allow more time; a first call of a new kind includes a compilation",
            )

    def remaining(self) -> float | None:
        """Seconds left, never negative; None without a deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def cancel(self) -> None:
        """Cancel this call (and every other that shares its cancellation)."""
        if self.cancellation is None:
            self.cancellation = Cancellation()
        self.cancellation.cancel()

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` run on cancellation; returns a function that forgets it."""
        if self.cancellation is None:
            self.cancellation = Cancellation()
        return self.cancellation.on_cancel(callback)
