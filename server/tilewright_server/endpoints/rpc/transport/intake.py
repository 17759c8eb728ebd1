"""Requests on their way in: how many are received at a time, so that gRPC holds a bounded number of bytes of them.

gRPC takes the bytes of a message as they come once its call is ready to receive it, up to the largest size of messages,
and tells nobody how many there are. Before that it takes 64 KiB of a call at most. So as many calls are made ready as
messages of the largest size fit the memory that is meant for them. Those of one sender are half of them at most, and
senders take turns: who sends many large requests waits for himself. Whoever is slow gives way while others wait.

A call that is likely to have a large message waits before that until the ``Pace`` of its sender lets it begin.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import partial

from tilewright_kit.types.errors import ResourceExhaustedError
from tilewright_server.endpoints.rpc.transport.calls import WireCall
from tilewright_server.endpoints.rpc.transport.pace import Pace

__all__ = ["Intake"]

SLOW_S = 0.25
"""Time after which a request that has not come gives way to others."""
CROWD = 128
"""With more calls than this waiting, requests give way sooner: nobody legal is that many."""
CROWDED_S = 0.05
MOST_WAITING, MOST_OF_ONE = 2048, 1024
"""Calls that wait, of all senders and of one."""
Received = Callable[["bytes | None"], None]


class Intake:
    """Calls whose request is yet to come. Used in gRPC's event thread only."""

    def __init__(
        self, limit: int, sender: Callable[[WireCall], str], pace: Pace | None = None, *, patient: bool = True
    ) -> None:
        """Receive ``limit`` requests at a time. Others wait, or, if the intake is not ``patient``, take the place of
        the oldest. ``sender`` names who a call is from, before anything of it is read. ``pace`` is common to all
        intakes of calls that may be large."""
        self.limit = limit
        self._pace = pace or Pace()
        self._held: dict[str, dict[WireCall, Callable[[], object]]] = {}
        """Calls that wait for the pace of their sender, in the order in which they came, and how each goes on."""
        self._share = max(limit // 2, 1)
        """Requests of one sender at a time."""
        self._sender = sender
        self._patient = patient
        self._under_way: dict[WireCall, tuple[float, str]] = {}
        """Calls that are received, since when and from whom, in the order of their beginning."""
        self._senders: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[tuple[WireCall, Received]]] = OrderedDict()
        """By sender; the first is next."""
        self._count = 0

    def receive(self, call: WireCall, received: Received) -> None:
        """As ``WireCall.receive``, in turn. Raises ``ResourceExhaustedError`` if too many wait."""
        sender = call.sender = self._sender(call)
        if not self._patient:
            if len(self._under_way) >= self.limit:
                self._end(next(iter(self._under_way)))
            self._begin(call, received, sender)
            return
        self._pace.heard(sender)
        self._hold(call, partial(self._enter, call, received, sender))

    def next_of(self, call: WireCall, received: Received) -> None:
        """As ``WireCall.receive``, for a stream's next message, which has no place among others, but their pace."""
        if not call.sender:
            call.sender = self._sender(call)
        self._hold(call, partial(self._begin_next, call, received))

    def _begin_next(self, call: WireCall, received: Received) -> None:
        self._begun(call)
        call.receive(received)

    def took(self, call: WireCall, data: bytes) -> None:
        """Note a message of a stream."""
        self._pace.heard(call.sender)
        self._pace.received(call.sender, call.method, len(data))

    def _hold(self, call: WireCall, go_on: Callable[[], object]) -> None:
        """Have it go on at the sender's pace: now, or when those before it have."""
        if call.sender in self._held:
            self._let_go()
        if self._pace.holds(call.sender, call.method):
            self._put_aside(call, go_on)
        else:
            go_on()

    def _put_aside(self, call: WireCall, go_on: Callable[[], object]) -> None:
        line = self._held.setdefault(call.sender, {})
        if len(line) >= MOST_OF_ONE:
            raise _too_slow(f"{len(line)} calls of this client's process wait, whose messages are large")
        line[call] = go_on

        def gone() -> None:
            line.pop(call, None)

        if not call.on_end(gone):
            gone()

    def _let_go(self) -> None:
        """Have those go on whose senders waited long enough."""
        for sender, line in list(self._held.items()):
            while line and not self._pace.holds(sender, (call := next(iter(line))).method):
                self._tried(call, line.pop(call))
            if not line and self._held.get(sender) is line:
                del self._held[sender]

    @staticmethod
    def _tried(call: WireCall, step: Callable[[], object]) -> None:
        try:
            step()
        except ResourceExhaustedError as error:
            call.fail(error)

    def _begun(self, call: WireCall) -> None:
        if self._pace.begin(call.sender, call.method):
            call.on_end(partial(self._pace.settle, call.sender, call.method))

    def _enter(self, call: WireCall, received: Received, sender: str) -> None:
        if len(self._under_way) < self.limit and self._senders[sender] < self._share and sender not in self._waiting:
            self._begin(call, received, sender)
        elif self._count >= MOST_WAITING or len(self._waiting.get(sender, ())) >= MOST_OF_ONE:
            raise _too_slow(f"{self._count} calls wait for their requests to come")
        else:
            self._waiting.setdefault(sender, deque()).append((call, received))
            self._count += 1
            self._refuse_slow()

    def tick(self) -> bool:
        """Refuse whoever is slow while others wait. Called after each event, and a few times a second; True: in a few
        milliseconds again, for calls that wait for their pace."""
        if self._held:
            self._let_go()
        if self._waiting:
            self._refuse_slow()
        return bool(self._held)

    def _refuse_slow(self) -> None:
        allowed = SLOW_S if self._count <= CROWD else CROWDED_S
        latest = time.monotonic() - allowed
        full = len(self._under_way) >= self.limit  # or else whoever waits does so for requests of his own
        slow = [
            call
            for call, (since, sender) in self._under_way.items()
            if since < latest and (full or sender in self._waiting)
        ]
        for call in slow[: self._count]:
            self._end(call)
        self._next()

    def _end(self, call: WireCall) -> None:
        self._gone(call)
        call.fail(_too_slow("the request did not come in time, and others wait"))

    def _gone(self, call: WireCall) -> None:
        found = self._under_way.pop(call, None)
        if found is not None:
            self._senders[found[1]] -= 1
            if not self._senders[found[1]]:
                del self._senders[found[1]]

    def _begin(self, call: WireCall, received: Received, sender: str) -> None:
        def came(data: bytes | None) -> None:
            self._gone(call)
            if data is not None:
                self._pace.received(sender, call.method, len(data))
            try:
                received(data)
            finally:
                self._next()

        self._begun(call)
        self._under_way[call] = time.monotonic(), sender
        self._senders[sender] += 1
        if not call.receive(came):
            self._gone(call)

    def _next(self) -> None:
        """Begin what there is room for, one call of each sender in turn."""
        while self._waiting and len(self._under_way) < self.limit:
            sender = next((name for name in self._waiting if self._senders[name] < self._share), None)
            if sender is None:
                return
            line = self._waiting[sender]
            call, received = line.popleft()
            self._count -= 1
            if line:
                self._waiting.move_to_end(sender)
            else:
                del self._waiting[sender]
            if self._pace.holds(sender, call.method):  # since it came, others have
                self._tried(call, partial(self._put_aside, call, partial(self._enter, call, received, sender)))
            else:
                self._begin(call, received, sender)


def _too_slow(reason: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        reason,
        field="request",
        rule="request_time",
        fix="send the request with the call; put large operands into shared memory",
        retry_after_s=1.0,
    )
