"""Ways in which a stream of this process and the server's stream for it are tied: by events that both processes know,
by numbers in memory that both see (signals), or by the host, which waits itself.

A tie orders launches of one connection. ``begin`` comes first: launches that are sent afterwards, the first of them
with the slot and flags that it returns, come behind what is on the stream then. A launch whose end somebody will wait
for has the flags ``last``; its ``mark`` stands for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Protocol

from tilewright.errors import InvalidArgumentError, TilewrightError, UnsupportedError
from tilewright.gpu.driver import GpuDriver
from tilewright.gpu.signals import SignalCalls, SignalPage, signal_problem
from tilewright.transport import frames
from tilewright.transport.local import Connection

__all__ = ["EventTie", "HostTie", "SignalTie", "Tie", "open_tie"]

PATIENCE_NS = 20_000
RETRY_AFTER = 63
"""A launch that was not over in this time makes so many after it go without waiting."""
SLOTS = 4
"""Pairs of events of one stream: an event is used again by the launch after the next ones."""
_UNTIED = frozenset({"event_support", "signal_support", "packet_format"})
"""Rules of the server's refusals; the last one is that of servers that know nothing of signals."""
_TURNS = 1 << 16
_UNSEEN = _TURNS // 2
"""Numbers that may be written without a launch that waits for them: the server is told the low bits of them."""
_RECORDED = frames.RECORD | frames.REPLY


_left: list[SignalPage] = []
"""Pages that streams may use still: they stay until this process ends, since to unlock one waits for the device."""


class Tie(Protocol):
    """See above. Used with the lane's lock held, but for what waits."""

    last: int

    def begin(self, stream: int, idle: bool) -> tuple[int, int]:
        """Slot and flags of a launch behind what is on the stream. ``idle``: nothing is."""
        ...

    def mark(self, slot: int, sequence: int) -> int:
        """Mark of a launch with the flags ``last`` that the server has taken."""
        ...

    def follow(self, mark: int, stream: int) -> bool:
        """Make a stream wait for a launch and those before it. True if they are over, and nothing was put on it."""
        ...

    def finished(self, mark: int, stream: int) -> bool:
        """True if they are over, which were queued for ``stream``."""
        ...

    def finish(self, mark: int, stream: int) -> None:
        """Wait, on the host, until they are."""
        ...

    def close(self) -> None: ...

    def abandon(self) -> None:
        """In a forked child: what there is belongs to the parent."""
        ...


class HostTie:
    """The host waits for the stream before it launches, and for launches before it goes on."""

    last = frames.TIME

    def __init__(self, gpu: GpuDriver, ordinal: int) -> None:
        self._gpu, self._ordinal = gpu, ordinal

    def begin(self, stream: int, idle: bool) -> tuple[int, int]:
        if not idle:
            self._gpu.synchronize(self._ordinal, stream)
        return 0, 0

    def mark(self, slot: int, sequence: int) -> int:  # noqa: ARG002
        return 0

    def follow(self, mark: int, stream: int) -> bool:  # noqa: ARG002
        return True

    def finished(self, mark: int, stream: int) -> bool:  # noqa: ARG002
        return True

    def finish(self, mark: int, stream: int) -> None:
        """Launches are over when they are answered."""

    def close(self) -> None:
        """There is nothing."""

    def abandon(self) -> None:
        """There is nothing."""


class EventTie:
    """Pairs of interprocess events (slots), opened when they are first needed; the mark is the slot."""

    last = _RECORDED

    def __init__(self, connection: Connection, gpu: GpuDriver, ordinal: int) -> None:
        """Raises the server's ``UnsupportedError`` where events cannot be used."""
        self._connection, self._gpu, self._ordinal = connection, gpu, ordinal
        self._slots: list[tuple[int, int]] = []
        """(producer event, completion event) by number."""
        self._turn = -1
        self._impatient = 0
        self._slots.append(self._open(0))

    def _open(self, slot: int) -> tuple[int, int]:
        gpu, ordinal = self._gpu, self._ordinal
        producer = gpu.new_event(ordinal)
        try:
            reply = self._connection.request(frames.OPEN_EVENT, 0, gpu.export_event(ordinal, producer), slot=slot)
            return producer, gpu.open_event(ordinal, reply.payload)
        except TilewrightError:
            gpu.destroy_event(ordinal, producer)
            raise

    def begin(self, stream: int, idle: bool) -> tuple[int, int]:
        turn = (self._turn + 1) % SLOTS
        if turn == len(self._slots):
            self._slots.append(self._open(turn))
        self._turn = turn
        if idle:
            return turn, 0
        self._gpu.record(self._ordinal, self._slots[turn][0], stream)
        return turn, frames.WAIT

    def mark(self, slot: int, sequence: int) -> int:  # noqa: ARG002
        return slot

    def follow(self, mark: int, stream: int) -> bool:
        event = self._slots[mark][1]
        if self._gpu.trusts_shared_events and self._is_over_soon(event):
            return True
        self._gpu.wait(self._ordinal, stream, event)
        return False

    def _is_over_soon(self, event: int) -> bool:
        """True if an event passes within a short while. What waits on a stream makes the GPU turn to this process for
        it, which takes longer than a small kernel; so where launches were over in time lately, look on a little.
        """
        gpu, ordinal = self._gpu, self._ordinal
        if gpu.finished(ordinal, event):
            return True
        if self._impatient:
            self._impatient -= 1
            return False
        end = time.perf_counter_ns() + PATIENCE_NS
        while time.perf_counter_ns() < end:
            if gpu.finished(ordinal, event):
                return True
        self._impatient = RETRY_AFTER
        return False

    def finished(self, mark: int, stream: int) -> bool:
        if self._gpu.trusts_shared_events:
            return self._gpu.finished(self._ordinal, self._slots[mark][1])
        self.follow(mark, stream)
        return self._gpu.idle(self._ordinal, stream)

    def finish(self, mark: int, stream: int) -> None:
        if self._gpu.trusts_shared_events:
            self._gpu.finish(self._ordinal, self._slots[mark][1])
        else:
            self.follow(mark, stream)
            self._gpu.synchronize(self._ordinal, stream)

    def close(self) -> None:
        slots, self._slots = self._slots, []
        for event in (event for pair in slots for event in pair):
            with contextlib.suppress(TilewrightError):  # the context may be gone before the events are
                self._gpu.destroy_event(self._ordinal, event)

    def abandon(self) -> None:
        self._slots = []


class SignalTie:
    """Numbers in a page of the server's; a mark is the number that the server's stream writes behind the launch."""

    last = _RECORDED

    def __init__(self, connection: Connection, gpu: GpuDriver, calls: SignalCalls, ordinal: int) -> None:
        """Raises ``UnsupportedError`` (here or the server's) where signals cannot be used, ``OSError``."""
        if problem := signal_problem(calls, ordinal):
            raise UnsupportedError(
                f"streams of this process are not tied by signals: {problem}",
                field="stream",
                rule="signal_support",
                fix="nothing: they are tied in another way",
            )
        self._gpu, self._ordinal = gpu, ordinal
        connection.takes_descriptors = True
        try:
            reply = connection.request(frames.OPEN_SIGNALS, 0)
        finally:
            connection.takes_descriptors = False
        try:
            self._page: SignalPage | None = SignalPage(calls, ordinal, reply.fds[0])
        finally:
            for file in reply.fds:
                os.close(file)
        self._stream = 0
        self._turn = self._unseen = self._count = 0

    @property
    def _open_page(self) -> SignalPage:
        assert self._page is not None, "the tie is closed"
        return self._page

    def begin(self, stream: int, idle: bool) -> tuple[int, int]:
        self._stream = stream
        if idle:
            return 0, 0
        if self._unseen >= _UNSEEN:
            self._gpu.synchronize(self._ordinal, stream)
            return 0, 0
        self._turn, self._unseen = self._turn + 1, self._unseen + 1
        self._open_page.write(stream, self._turn)
        return self._turn % _TURNS, frames.WAIT

    def mark(self, slot: int, sequence: int) -> int:  # noqa: ARG002
        self._unseen = 0
        self._count += (sequence - self._count) & 0xFFFFFFFF
        return self._count

    def follow(self, mark: int, stream: int) -> bool:
        self._open_page.wait(stream, mark)
        return False

    def finished(self, mark: int, stream: int) -> bool:
        page = self._open_page
        if page.completed < mark:
            return False
        page.wait(stream, mark)  # which ends at once, and makes what the launch wrote seen behind it
        return True

    def finish(self, mark: int, stream: int) -> None:
        self.follow(mark, stream)
        self._gpu.synchronize(self._ordinal, stream)

    def close(self) -> None:
        page, self._page = self._page, None
        if page is None:
            return
        idle = False
        with contextlib.suppress(TilewrightError):
            idle = self._gpu.idle(self._ordinal, self._stream)
        if idle:
            page.close()
        else:
            _left.append(page)

    def abandon(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            _left.append(page)


def open_tie(connection: Connection, gpu: GpuDriver, ordinal: int) -> Tie:
    """The best tie that keeps order here: signals where the driver has them, else events, else the host."""
    if gpu.signals is not None:
        with contextlib.suppress(UnsupportedError, InvalidArgumentError, OSError):
            return SignalTie(connection, gpu, gpu.signals, ordinal)
    try:
        return EventTie(connection, gpu, ordinal)
    except UnsupportedError as error:
        if error.rule not in _UNTIED:
            raise
        return HostTie(gpu, ordinal)
