"""One thread that serves launches of many connections.

A thread of its own answers a client soonest, as long as there are few of them. Of many, each has to wake up and to wait
for the interpreter's lock at every launch, and the server does little else. So connections over which one short plan
after the other is launched are read here; what takes long, or has to wait, goes to the connection's own thread, with
the packet that asked for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol, TypeVar

from tilewright_server.endpoints.local.seqpacket import Wire
from tilewright_server.engine.call import WouldWaitError

__all__ = ["Launches", "SharedThread", "soon"]

log = logging.getLogger("tilewright.transport.local")

T = TypeVar("T")
_TRIES = 8
"""Attempts of a launch that would have to wait for others."""


def soon(launch: Callable[[], T], pause_ns: int) -> T:
    """The result of ``launch``, once what others have begun is done, if that takes a few pauses at most: a connection
    that goes back to its own thread for a short launch of another is in the way of those that are served here, which
    then go back as well. Raises ``WouldWaitError`` and what ``launch`` does.
    """
    for _ in range(_TRIES - 1):
        try:
            return launch()
        except WouldWaitError:  # noqa: PERF203 - no launch, no work
            time.sleep(pause_ns / 1e9)
    return launch()


class Launches(Protocol):
    """A connection whose launches can be served by any thread."""

    wire: Wire

    def launch_at_once(self, data: memoryview) -> bool | bytes:
        """Serve a packet, if it is a launch that neither takes nor waits for long. False: its own thread must do so;
        bytes: a reply that the client has no room for now, and that its own thread must send.
        """
        ...


class _Lent:
    """A connection that is read by the shared thread."""

    def __init__(self, connection: Launches, descriptors: list[int]) -> None:
        self.connection = connection
        self.descriptors = descriptors
        self.returned: SimpleQueue[memoryview | bytes | BaseException] = SimpleQueue()
        """One item, when its own thread is to go on: a packet, a reply to be sent, or what went wrong."""


class SharedThread:
    """Thread-safe. The thread begins with the first connection that is lent to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: dict[int, _Lent] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._poll: select.epoll | None = None
        self._wake = -1

    def receive(self, connection: Launches, descriptors: list[int]) -> memoryview:
        """``Wire.receive`` of a connection, by its own thread; launches that come meanwhile are served here. Raises
        what that does.
        """
        wire = connection.wire
        poll = self._polling()
        if poll is None:
            return wire.receive(descriptors)
        lent = _Lent(connection, descriptors)
        number = wire.socket.fileno()
        self._lent[number] = lent
        poll.register(number, select.EPOLLIN)
        item = lent.returned.get()
        if isinstance(item, memoryview):
            return item
        if isinstance(item, bytes):
            wire.send(item)
            return wire.receive(descriptors)
        raise item

    def close(self) -> None:
        """End the thread. To be called when no connection is lent any more. Idempotent."""
        with self._lock:
            self._closed = True
            thread, poll = self._thread, self._poll
            if thread is None or poll is None:
                return
            self._thread = self._poll = None
        os.eventfd_write(self._wake, 1)
        thread.join()
        poll.close()
        os.close(self._wake)

    def _polling(self) -> select.epoll | None:
        """The set of connections that the thread waits for, with the thread at work; None if that cannot be."""
        if self._poll is not None:
            return self._poll
        with self._lock, contextlib.suppress(OSError, RuntimeError):
            if self._poll is None and not self._closed:
                with contextlib.ExitStack() as undo:
                    poll = undo.enter_context(select.epoll())
                    wake = os.eventfd(0, os.EFD_CLOEXEC)
                    undo.callback(os.close, wake)
                    poll.register(wake, select.EPOLLIN)
                    self._wake = wake
                    thread = threading.Thread(target=self._run, args=(poll,), name="local-launches", daemon=True)
                    thread.start()
                    undo.pop_all()
                self._poll, self._thread = poll, thread
        return self._poll

    def _run(self, poll: select.epoll) -> None:
        while True:
            for number, _ in poll.poll():
                if number == self._wake:
                    return
                lent = self._lent[number]
                item = self._served(lent)
                if item is not None:
                    poll.unregister(number)
                    del self._lent[number]
                    lent.returned.put(item)

    @staticmethod
    def _served(lent: _Lent) -> memoryview | bytes | BaseException | None:
        """Return what the connection's own thread has to do now; None: it can wait on."""
        try:
            data = lent.connection.wire.receive(lent.descriptors, wait=False)
            if lent.descriptors:
                return data
            done = lent.connection.launch_at_once(data)
        except BlockingIOError:
            return None
        except BaseException as error:  # the connection's own thread knows what to do about it
            return error
        if done is True:
            return None
        return data if done is False else done
