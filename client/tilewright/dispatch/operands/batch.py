"""Batching of a stream of executions. No I/O.

Executions that are submitted while messages are under way wait and then travel together: the busier the stream, the
larger its messages (Nagle's idea, clocked by replies), and an idle stream sends at once.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

from tilewright.dispatch.operands.operands import take_inline
from tilewright.dispatch.operands.slots import Loaded, single
from tilewright.errors import (
    InternalError,
    TilewrightError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
    from_detail,
)
from tilewright.transport import messages
from tilewright_proto.v1 import dispatch_pb2

__all__ = ["MAX_BATCH", "MESSAGES_IN_FLIGHT", "Batcher", "complete", "not_sent"]

F = TypeVar("F")

MESSAGES_IN_FLIGHT = 2
"""One is being worked on while the other is on its way."""
MAX_BATCH = 256
MAX_MESSAGE_BYTES = 1 << 20


class Batcher(Generic[F]):
    """Not thread-safe; ``F`` is the kind of future."""

    def __init__(self, timeout_ms: int = 0) -> None:
        self.timeout_ms = timeout_ms
        self.pending: deque[tuple[Loaded, F]] = deque()
        self.in_flight: deque[list[tuple[Loaded, F]]] = deque()

    @property
    def ready(self) -> bool:
        """True if a message should go now."""
        return bool(self.pending) and len(self.in_flight) < MESSAGES_IN_FLIGHT

    def take(self) -> bytes:
        """The next message, of everything that waits (up to the limits)."""
        batch: list[tuple[Loaded, F]] = []
        size = 0
        session = self.pending[0][0].session
        room = min(MAX_MESSAGE_BYTES, session.message_room)
        while self.pending and len(batch) < MAX_BATCH:
            size += self.pending[0][0].weight
            if batch and size > room:
                break
            batch.append(self.pending.popleft())
        self.in_flight.append(batch)
        chunks = [load.chunk for load, _ in batch]
        return messages.execute_request(messages.session_field(session.token), chunks, self.timeout_ms)

    def answered(self, reply: dispatch_pb2.ExecuteReply) -> list[tuple[F, Any]]:
        """Outcomes of the oldest message's executions: (future, result or exception), in order."""
        batch = self.in_flight.popleft()
        if len(reply.results) != len(batch):
            error = InternalError(f"the server sent {len(reply.results)} results for {len(batch)} executions")
            return [(future, error) for _, future in batch]
        return [(future, complete(load, message)) for (load, future), message in zip(batch, reply.results, strict=True)]

    def abandon(self, error: TilewrightError) -> list[tuple[Loaded, F, TilewrightError]]:
        """Everything that has no answer, oldest first, with its error, after the stream ended with ``error``."""
        unsent = not_sent(error)
        rest = [(load, future, error) for batch in self.in_flight for load, future in batch]
        rest += [(load, future, unsent) for load, future in self.pending]
        self.in_flight.clear()
        self.pending.clear()
        return rest


def not_sent(error: TilewrightError) -> TilewrightError:
    """The error of an execution that a stream did not send before it ended with ``error``."""
    if not isinstance(error, UnknownOutcomeError):
        return error
    return UnavailableError(
        f"the stream is over: {error.message}",
        field="stream",
        rule="stream_open",
        fix="open another stream; what was submitted later may have needed the results that are missing",
    )


def complete(load: Loaded, message: dispatch_pb2.ExecutionResult) -> Any:
    """The result of an execution, or its exception (returned, not raised)."""
    if message.HasField("error"):
        return from_detail(message.error)
    cargo = load.cargo
    try:
        cargo.copy_back()
        for output in message.outputs:
            if output.name in cargo.replies:
                if output.buffer:
                    raise UnsupportedError(
                        f"{output.name} is too large to come back on a stream",
                        field=output.name,
                        rule="stream_output",
                        fix="call the plan itself, or connect over a Unix socket, where memory is shared",
                    )
                load.result[output.name] = take_inline(output, *cargo.replies[output.name])
    except TilewrightError as error:
        return error
    return single(load.result)
