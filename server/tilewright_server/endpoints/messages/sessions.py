"""Sessions as messages, for operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tilewright_proto.v1 import memory_pb2 as pb
from tilewright_server.clients.client import Client
from tilewright_server.protocol.errors import clean
from tilewright_server.session.session import Session

__all__ = ["CountsCalls", "session_summary"]

MOST_TEXT = 256


class CountsCalls(Protocol):
    """Knows the calls of each session."""

    def of_session(self, client: Client) -> tuple[int, int]:
        """Calls that wait, and that run."""
        ...


def session_summary(session: Session, now: float, threads: Iterable[CountsCalls]) -> pb.SessionSummary:
    """Holdings of a session at ``now`` (seconds of the monotonic clock), without its token and ids."""
    regions, buffers, plans = session.objects()
    client = session.client
    calls = [item.of_session(client) for item in threads]
    return pb.SessionSummary(
        principal=client.principal,
        process=client.process,
        client_name=clean(session.client_name, MOST_TEXT),
        priority=client.priority.name.lower(),
        age_ns=int((now - session.opened) * 1e9),
        regions=len(regions),
        region_bytes=sum(item.size for item in regions),
        buffers=len(buffers),
        buffer_bytes=sum(item.size for item in buffers),
        plans=len(plans),
        bindings=len(session.bindings()),
        attached_connections=len(session.attachments),
        calls_waiting=sum(waiting for waiting, _ in calls),
        calls_running=sum(running for _, running in calls),
    )
