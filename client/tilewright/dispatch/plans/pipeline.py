"""Launches under way: what one returns, and many of them in few packets. See ``bindings``."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from tilewright.dispatch.bindings.binding import Binding, Launched, launch_stream
from tilewright.errors import InvalidArgumentError, TilewrightError, UnavailableError, is_unbound
from tilewright.gpu.streams import stream_handle
from tilewright.session.state import Core
from tilewright.transport import frames
from tilewright.transport.frames import HEADER, MAX_LAUNCHES
from tilewright.transport.launch_connections import Lane, StreamLane

if TYPE_CHECKING:
    from tilewright.dispatch.plans.bound import BoundState

__all__ = ["LaunchBase", "PipelineState"]

SEND_AFTER_NS = 20_000
"""Launches wait for company for so long at the most; who launches more slowly has each one sent at once."""
PACKETS_UNDER_WAY = 64
"""Then the oldest is waited for."""
_PACK = HEADER.pack
_LAUNCH, _REPLY, _TIME = frames.LAUNCH, frames.REPLY, frames.TIME


class LaunchBase:
    """One launch, which may be under way."""

    __slots__ = ("__weakref__", "_finished", "_launched", "out")

    def __init__(self, launched: Launched, out: Any) -> None:
        self._launched = launched
        self._finished = launched.over
        self.out = out
        """The output (several: a dict). On a GPU it has the result once the stream has come so far."""

    @property
    def device_ns(self) -> int | None:
        """Nanoseconds on the device; ``None`` for a launch that nobody waited for."""
        return self._launched.device_ns or None

    @property
    def done(self) -> bool:
        """True if it is over. (It may be said some launches late.)"""
        launched = self._launched
        lane = launched.lane
        if not self._finished and lane is not None:
            self._finished = lane.tie.finished(launched.mark, launched.stream)
        elif not self._finished and launched.gpu is not None:
            self._finished = launched.gpu.idle(launched.ordinal, launched.stream)
        return self._finished

    def wait(self, stream: Any = None) -> None:
        """Make a stream (the one of the launch) wait for it. Does not wait itself."""
        launched = self._launched
        place = launched.stream if stream is None else stream_handle(stream)
        if launched.lane is not None:
            launched.lane.tie.follow(launched.mark, place)
        elif launched.gpu is not None:
            launched.gpu.order(launched.ordinal, launched.stream, place)

    def _synchronize(self) -> None:
        launched = self._launched
        lane = launched.lane
        if lane is not None and not self._finished:
            lane.tie.finish(launched.mark, launched.stream)
        elif launched.gpu is not None and not self._finished:
            launched.gpu.synchronize(launched.ordinal, launched.stream)
        self._finished = True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'done' if self._finished else 'queued'}>"


class PipelineState:
    """Launches of one device and stream. Not thread-safe."""

    def __init__(self, core: Core, stream: Any) -> None:
        self._core = core
        self._stream = None if stream is None else stream_handle(stream)
        self._lane: Lane | None = None
        self._binding: Binding | None = None
        self._ids: list[int] = []
        self._held: dict[int, BoundState] = {}
        """Launches that were not joined: its arrays must live."""
        self._under_way: deque[tuple[int, int, int, int]] = deque()
        """(first sequence, count, number of the first launch, slot) of packets without an answer."""
        self._failures: list[tuple[int, TilewrightError]] = []
        self._slot = 0
        self._mark: int | None = None
        """The tie's mark of the last packet that was answered."""
        self._first = 0
        """Flags of the next launch: whether it waits for the stream."""
        self._sent_ns = 0
        self._count = 0
        self._behind = False
        """True if this process launched last: what the server launches next is to come after it."""

    @property
    def launches(self) -> int:
        """How many there were."""
        return self._count + len(self._ids)

    def ready(self, bound: BoundState) -> bool:
        """True if ``add`` can take it as it is; otherwise it is to be bound first."""
        binding = bound.binding
        session = self._core.session
        return binding is not None and binding.session is session and not session.lost and binding.valid

    def add(self, bound: BoundState) -> bool:
        """Take a launch, which must be ``ready``. True if it is time to ``flush``."""
        binding: Any = bound.binding
        before = self._binding
        if before is not None and before.session is not binding.session and before.session.lost:
            self._settle()  # what was under way in the session that is over has failed
            self._lane = None
        if self._lane is None or self._lane.broken:
            self.open(bound)
        elif self._behind:
            self.order()
        self._behind = False
        if binding.device != self._binding.device or binding.session is not self._binding.session:  # type: ignore[union-attr]
            raise self._refused(binding)
        self._ids.append(binding.id)
        self._held[id(bound)] = bound
        return len(self._ids) >= MAX_LAUNCHES or time.perf_counter_ns() - self._sent_ns > SEND_AFTER_NS

    def _refused(self, binding: Binding) -> InvalidArgumentError:
        return InvalidArgumentError(
            "a pipeline is for plans of one device and session",
            field="bound",
            value=binding.device,
            rule="one_device",
            fix="make a pipeline for each device, and a new one after reconnect()",
        )

    @property
    def opened(self) -> bool:
        return self._lane is not None

    def open(self, bound: BoundState) -> None:
        """Connect for launches of the device of ``bound``, which must be ``ready``."""
        binding = bound.binding
        if binding is None or binding.session.lanes is None:  # bindings are made with lanes only
            raise UnavailableError("this session has no local socket", field="session", rule="local_socket")
        lanes = binding.session.lanes
        tensors = bound.tensors
        if not binding.attach or not tensors:
            bound.fence()
            self._lane = lanes.of_thread(binding.device if binding.attach else "")
        else:
            if self._stream is None:
                self._stream = launch_stream(tensors)
            self._lane = lanes.of_stream(binding.device, tensors[0].gpu, tensors[0].ordinal, self._stream)
        self._binding, self._mark = binding, None
        self.order()

    def add_here(self, bound: BoundState) -> None:
        """Launch what is launched in this process, behind what the server was sent. Raises only what ends the
        pipeline; what is wrong with the launch is told by ``join``.
        """
        if self._ids or self._under_way:
            self._settle()
        try:
            bound.launch_here(self._stream)
        except TilewrightError as error:
            self._failures.append((self._count, error))
        self._count += 1
        self._held[id(bound)] = bound
        self._behind = True

    def order(self) -> None:
        """Later launches wait for what is on the stream now."""
        self.flush()
        if isinstance(self._lane, StreamLane):
            with self._lane.lock:
                self._slot, self._first = self._lane.begin()

    def flush(self) -> None:
        """Send what was launched."""
        ids, lane = self._ids, self._lane
        if not ids or lane is None:
            return
        if len(self._under_way) >= PACKETS_UNDER_WAY:
            self._answer()
        count, slot = len(ids), self._slot
        flags = [0] * count
        if isinstance(lane, StreamLane):
            flags[-1] = lane.tie.last
            flags[0] |= self._first
        else:
            flags[-1] = _TIME if lane.device else _REPLY
        with lane.lock:
            connection = lane.connection
            first = connection.sequence + 1
            numbers = [(first + index) & 0xFFFFFFFF for index in range(count)]
            data = b"".join(map(_PACK, (_LAUNCH,) * count, flags, (slot,) * count, numbers, ids))
            connection.sequence = numbers[-1]
            ids.clear()
            self._count += count
            try:
                lane.send(data)
            except TilewrightError as error:  # told by ``join``, as what the server says of launches is
                self._failures.append((self._count - count, error))
                self._core.note(error)
                return
        self._first = 0
        self._under_way.append((numbers[0], count, self._count - count, slot))
        self._sent_ns = time.perf_counter_ns()

    def _answer(self) -> None:
        """Wait for the answer to the oldest packet, and keep what failed of it."""
        lane: Any = self._lane
        first, count, number, slot = self._under_way.popleft()
        with lane.lock:
            last = (first + count - 1) & 0xFFFFFFFF
            try:
                lane.connection.wait(last)
                if isinstance(lane, StreamLane):
                    self._mark = lane.tie.mark(slot, last)
            except TilewrightError as error:
                self._failures.append((number + count - 1, error))
                self._core.note(error)
                if lane.broken:
                    self._under_way.clear()
                elif isinstance(lane, StreamLane) and lane.connection.tied == last:
                    self._mark = lane.tie.mark(slot, last)
            for offset, reply in lane.connection.take(first, count).items():
                if isinstance(reply, TilewrightError):
                    self._failures.append((number + offset, reply))

    def join(self) -> list[tuple[int, TilewrightError]]:
        """Send the rest and make the stream wait for everything. Returns what failed: (number of the launch, why)."""
        self._settle()
        if any(is_unbound(error) for _, error in self._failures):
            for bound in self._held.values():  # the next launch binds again
                bound.forget()
        self._held.clear()
        failures, self._failures = sorted(self._failures, key=lambda item: item[0]), []
        return failures

    def _settle(self) -> None:
        self.flush()
        while self._under_way:
            self._answer()
        if isinstance(self._lane, StreamLane) and self._mark is not None and not self._lane.broken:
            self._lane.tie.follow(self._mark, self._stream or 0)
