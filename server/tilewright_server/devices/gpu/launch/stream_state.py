"""A stream of the device with what its launches need: counters, events, and programs bound to addresses.

Launches of one lane run one after the other, so they share one set of counters. A lane is used by one thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from tilewright_kit.types.errors import TilewrightError
from tilewright_server.devices.gpu.driver import GpuDriver
from tilewright_server.devices.gpu.launch.stages import BoundLaunch
from tilewright_server.devices.gpu.memory.pool import Memory

if TYPE_CHECKING:
    from tilewright_server.devices.gpu.launch.packets import PacketLane

__all__ = ["BindableProgram", "Lane"]

_LEAST_COUNTERS = 64 << 10


class BindableProgram(Protocol):
    """A program as a lane sees it: stages that it binds to addresses."""

    @property
    def counter_bytes(self) -> int:
        """Bytes of zeroed counters that its launches need."""
        ...

    def bind(self, lane: Lane, addresses: tuple[int, ...], workspace: int, counters: int) -> BoundLaunch:
        """Everything for launches on ``lane`` with these addresses, each of an operand."""
        ...


class Lane:
    """See above. ``limit`` bounds how many bindings of one program are remembered; ``closed`` is told of the end."""

    def __init__(self, driver: GpuDriver, memory: Memory, limit: int, closed: Callable[[Lane], None]) -> None:
        self.driver = driver
        self.stream = driver.check(driver.api.new_stream(), "a stream")
        self._dropped: deque[BindableProgram] = deque()
        self.packets: PacketLane | None = None
        """Launches of a client, which may use what ``bound`` answered until they are told to forget it."""
        self._synchronisations = 0
        self.is_clients = False
        """True if it is for launches that nobody waits for, unless the client asks for it."""
        self._memory = memory
        self._limit = limit
        self._on_close = closed
        self._prepared: dict[BindableProgram, dict[tuple[tuple[int, ...], int], BoundLaunch]] = {}
        self._counters: list[tuple[int, int]] = []
        self._events: list[Any] = []
        self._closed = False

    # Programs

    def bound(self, program: BindableProgram, addresses: tuple[int, ...], workspace: int) -> BoundLaunch:
        """The program's launches with these addresses: found, or made. Raises what ``BindableProgram.bind`` does."""
        if self._dropped:
            self._forget()
        bounds = self._prepared.setdefault(program, {})
        bound = bounds.get((addresses, workspace))
        if bound is None:
            bound = program.bind(self, addresses, workspace, self.counters(program.counter_bytes))
            while len(bounds) >= self._limit:
                self._close([bounds.pop(next(iter(bounds)))])
            bounds[(addresses, workspace)] = bound
        return bound

    def drop(self, program: BindableProgram) -> None:
        """From any thread: nobody will launch it any more. What it holds here goes with the lane's next launch."""
        if program in self._prepared:
            self._dropped.append(program)
            if self.packets is not None:
                self.packets.disturb()

    def _forget(self) -> None:
        while self._dropped:
            self._close(list(self._prepared.pop(self._dropped.popleft(), {}).values()))

    def _close(self, bounds: list[BoundLaunch]) -> None:
        if bounds and self.packets is not None:
            self.packets.forget_all()
        for bound in bounds:
            bound.close()

    # Memory of its own

    def counters(self, nbytes: int) -> int:
        """Address of that many zeroed bytes; 0 for none. A larger piece joins the smaller ones, which stay where they
        are bound."""
        if not nbytes:
            return 0
        if not self._counters or self._counters[-1][1] < nbytes:
            size = max(_LEAST_COUNTERS, 1 << (nbytes - 1).bit_length())
            self._counters.append((self.zeroed(size), size))
        return self._counters[-1][0]

    def zeroed(self, nbytes: int) -> int:
        """Address of zeroed memory of the pool, for work on this stream."""
        driver, api = self.driver, self.driver.api
        address = self._memory.take(nbytes, self.stream)
        try:
            driver.check(api.fill(address, nbytes, self.stream))
        except TilewrightError:
            self.give_back(address)
            raise
        return address

    def take(self, nbytes: int) -> int:
        """Address of memory of the pool, for work on this stream."""
        return self._memory.take(nbytes, self.stream)

    def give_back(self, address: int) -> None:
        """Free memory of ``take`` or ``zeroed`` behind everything that was launched on this stream."""
        self._memory.give_back(address, self.stream)

    # Waiting

    @property
    def is_idle(self) -> bool:
        """True if everything that was launched has ended, or nothing can end any more."""
        return not self.driver.is_busy(self.driver.api.query_stream(self.stream))

    @property
    def host_synchronisations(self) -> int:
        """How often a host thread has waited for this stream."""
        return self._synchronisations + (self.packets.waits if self.packets is not None else 0)

    def synchronize(self) -> None:
        """Wait for everything. Raises ``DeviceError``, ``DeviceLostError``."""
        self._synchronisations += 1
        self.driver.check(self.driver.api.wait_stream(self.stream))

    def event(self, place: int) -> Any:
        """One of the lane's own events, with timing."""
        while len(self._events) <= place:
            self._events.append(self.driver.check(self.driver.api.new_event(timing=True)))
        return self._events[place]

    def record(self, place: int) -> None:
        self.driver.check(self.driver.api.record_event(self.event(place), self.stream))

    def wait(self, place: int) -> None:
        """Wait until an event of this lane has been passed."""
        self._synchronisations += 1
        self.driver.check(self.driver.api.wait_event(self._events[place]))

    def elapsed_ns(self, begin: int, end: int) -> int:
        """Device time between two events that were passed, in nanoseconds."""
        answer = self.driver.api.elapsed_ms(self._events[begin], self._events[end])
        return round(float(self.driver.check(answer)) * 1e6)

    def timed(self, bound: BoundLaunch, repeat: int) -> tuple[int, ...]:
        """Launch ``repeat`` times, wait, and return the time of each stage in nanoseconds, summed over the repeats.

        Events between stages keep them apart, which costs small kernels more than they take. So of many repeats one is
        measured stage by stage, and the others, which follow each other as closely as they can, say how long it all
        takes.
        """
        if bound.count == 1:
            return (self._together(bound, repeat),)
        stages = self._apart(bound)
        if repeat == 1:
            return stages
        scale = self._together(bound, repeat - 1) * repeat / ((repeat - 1) * max(1, sum(stages)))
        return tuple(round(stage * scale) for stage in stages)

    def _together(self, bound: BoundLaunch, repeat: int) -> int:
        self.record(0)
        for _ in range(repeat):
            bound.launch()
        self.record(1)
        self.wait(1)
        return self.elapsed_ns(0, 1)

    def _apart(self, bound: BoundLaunch) -> tuple[int, ...]:
        self.record(0)
        for stage in range(bound.count):
            bound.launch_stage(stage)
            self.record(stage + 1)
        self.wait(bound.count)
        return tuple(self.elapsed_ns(stage, stage + 1) for stage in range(bound.count))

    def close(self) -> None:
        """Give everything back behind what is under way, which is not waited for. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._on_close(self)
        driver, api = self.driver, self.driver.api
        for bounds in self._prepared.values():
            self._close(list(bounds.values()))
        for address, _ in self._counters:
            self.give_back(address)
        for event in self._events:
            driver.quietly(api.end_event(event))
        driver.quietly(api.end_stream(self.stream))
        self._prepared.clear()
        self._counters.clear()
        self._events.clear()
