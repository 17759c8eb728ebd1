"""Requests on their way in: how many are received at a time, so that gRPC holds a bounded number of bytes of them.

gRPC takes the bytes of a message as they come once its call is ready to receive it, up to the largest size of messages,
and tells nobody how many there are. Before that it takes 64 KiB of a call at most. So as many calls are made ready as
messages of the largest size fit the memory that is meant for them. Whoever is slow gives way while others wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from tilewright_kit.types.errors import ResourceExhaustedError
from tilewright_server.endpoints.rpc.transport.calls import WireCall

__all__ = ["Intake"]

SLOW_S = 0.25
"""Time after which a request that has not come gives way to others."""
CROWD = 128
"""With more calls than this waiting, requests give way sooner: nobody legal is that many."""
CROWDED_S = 0.05
MOST_WAITING = 2048
Received = Callable[["bytes | None"], None]


class Intake:
    """Calls whose request is yet to come. Used in gRPC's event thread only."""

    def __init__(self, limit: int, *, patient: bool = True) -> None:
        """Receive ``limit`` requests at a time. Others wait, or, if the intake is not ``patient``, take the place of
        the oldest."""
        self.limit = limit
        self._patient = patient
        self._under_way: dict[WireCall, float] = {}
        """Calls that are received, and since when, in the order of their beginning."""
        self._waiting: deque[tuple[WireCall, Received]] = deque()

    def receive(self, call: WireCall, received: Received) -> None:
        """As ``WireCall.receive``, in turn. Raises ``ResourceExhaustedError`` if too many wait."""
        if len(self._under_way) < self.limit and not self._waiting:
            self._begin(call, received)
        elif not self._patient:
            self._end(next(iter(self._under_way)))
            self._begin(call, received)
        elif len(self._waiting) >= MOST_WAITING:
            raise _too_slow(f"{MOST_WAITING} calls wait for their requests to come")
        else:
            self._waiting.append((call, received))
            self.tick()

    def tick(self) -> None:
        """Refuse whoever is slow while others wait. Called after each event, and a few times a second."""
        if not self._waiting:
            return
        allowed = SLOW_S if len(self._waiting) <= CROWD else CROWDED_S
        latest = time.monotonic() - allowed
        slow = [call for call, since in self._under_way.items() if since < latest][: len(self._waiting)]
        for call in slow:
            self._end(call)
        self._next()

    def _end(self, call: WireCall) -> None:
        del self._under_way[call]
        call.fail(_too_slow("the request did not come in time, and others wait"))

    def _begin(self, call: WireCall, received: Received) -> None:
        def came(data: bytes | None) -> None:
            self._under_way.pop(call, None)
            try:
                received(data)
            finally:
                self._next()

        self._under_way[call] = time.monotonic()
        if not call.receive(came):
            del self._under_way[call]

    def _next(self) -> None:
        while self._waiting and len(self._under_way) < self.limit:
            self._begin(*self._waiting.popleft())


def _too_slow(reason: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        reason,
        field="request",
        rule="request_time",
        fix="send the request with the call; put large operands into shared memory",
        retry_after_s=1.0,
    )
