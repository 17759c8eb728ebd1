"""Identity of a caller, by which queues are fair and quotas are counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

__all__ = ["ANONYMOUS", "Client", "Priority"]


class Priority(IntEnum):
    """Urgency of a request."""

    INTERACTIVE = 0
    BATCH = 1
    BACKGROUND = 2


@dataclass(frozen=True, slots=True)
class Client:
    """One caller: its principal, the process below it, and the session below that."""

    principal: str
    """``uid:1000`` (with the PID namespace where it is another than the server's) over a Unix socket, the address over
    TCP."""
    process: str
    """``pid:4711@`` and its start time in clock ticks; ``connection:`` and the peer where the process is not known."""
    session: bytes
    """Token; empty without a session."""
    priority: Priority = Priority.INTERACTIVE

    def at_most(self, priority: Priority) -> Client:
        """The same client, for something that is no more urgent than ``priority``."""
        return self if self.priority >= priority else replace(self, priority=priority)


ANONYMOUS = Client("local", "unknown", b"")
"""A caller of whom nothing is known."""
