"""Turns at computing in the server itself: planning, judging configurations, generating kernels.

The interpreter runs one thread at a time. One that computes gives way only when another has waited for its interval, so
a launch, which passes through several threads, would wait at each of them for all that compute. So one does at a time,
and who is next is decided as for executions: by principal, process, session and priority.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tilewright_server.engine.call import Call
from tilewright_server.engine.execution.admission import Admission
from tilewright_server.engine.execution.turn import Turn

__all__ = ["Computing"]

_UNLIMITED = 1 << 30
"""Callers that may wait: each has a thread, and threads are divided already."""


class Computing:
    """Thread-safe. Who has the turn opens no device and waits for no build, no file of others and no other turn."""

    def __init__(self) -> None:
        self._admission = Admission("server", 1, _UNLIMITED)

    @property
    def waiting(self) -> int:
        """Callers that wait for their turn."""
        return self._admission.queue_depth

    @contextmanager
    def turn(self, call: Call) -> Iterator[Callable[[], None]]:
        """Wait for the turn, and have it. Yields a function that lets others go first if this has lasted for long.

        Either raises ``CancelledError`` or ``DeadlineError`` while it waits.
        """
        turn = Turn(self._admission, 1, call)
        try:
            yield turn.yield_to_waiters
        finally:
            turn.end()
