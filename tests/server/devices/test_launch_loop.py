"""Serving one connection's launches: what is prepared once and when it is prepared again, and who looks for packets
without sleeping.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from tilewright_proto.v1 import error_pb2
from tilewright_server.devices.contract import RECORD, REPLY, TIME, WAIT, Program, ReadyStream
from tilewright_server.devices.worker import launches
from tilewright_server.devices.worker.launches import LaunchLoop
from tilewright_server.protocol.frames import HEADER, HEADER_BYTES, REPLY_KIND, Kind

PROGRAM = cast(Program, object())


class Stream:
    """Writes down what was prepared and what was launched."""

    gives_back_later = True

    def __init__(self) -> None:
        self.prepared: list[tuple[tuple[int, ...], int]] = []
        self.launched: list[tuple[tuple[int, ...], int, int, int]] = []
        self.ends = threading.Event()
        """Nothing that is waited for ends before."""

    def open_event(self, slot: int, handle: bytes) -> bytes:
        return handle

    def launch(self, program: Program, addresses: Sequence[int], flags: int, slot: int, workspace: int = 0) -> int:
        self.launched.append((tuple(addresses), workspace, flags, slot))
        return 5

    def ready(self, program: Program, addresses: Sequence[int], workspace: int) -> Callable[[int, int], int]:
        self.prepared.append((tuple(addresses), workspace))
        return lambda flags, slot: self.launch(program, addresses, flags, slot, workspace)

    def finish(self) -> int:
        assert self.ends.wait(10)
        return 11

    def synchronize(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing to give back."""


class Served:
    """A loop in a thread, and the client's end."""

    def __init__(self) -> None:
        self.stream = Stream()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(10)
        self.loop = LaunchLoop(theirs, self.stream)
        self.thread = threading.Thread(target=self.loop.serve, daemon=True)
        self.thread.start()

    def launch(self, binding: int, flags: int = REPLY, slot: int = 0) -> tuple[int, ...]:
        """The header of the answer."""
        self.socket.send(HEADER.pack(Kind.LAUNCH, flags, slot, 9, binding))
        self.answer = self.socket.recv(1 << 16)
        return HEADER.unpack_from(self.answer)

    def end(self) -> None:
        self.socket.close()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.end()


def test_a_binding_is_prepared_once(served: Served) -> None:
    assert isinstance(served.stream, ReadyStream)
    served.loop.bind(7, PROGRAM, (1, 2))
    for slot in range(3):
        assert served.launch(7, RECORD | REPLY, slot) == (REPLY_KIND | Kind.LAUNCH, 0, slot, 9, 5)
    assert served.stream.prepared == [((1, 2), 0)]
    assert served.stream.launched == [((1, 2), 0, RECORD, slot) for slot in range(3)]


def test_a_binding_is_prepared_again_for_other_memory(served: Served) -> None:
    served.loop.bind(7, PROGRAM, (1, 2))
    served.launch(7)
    with served.loop.lock:
        served.loop.workspace = 4096
    served.launch(7)
    served.loop.bind(7, PROGRAM, (3, 4))
    served.launch(7)
    assert served.stream.prepared == [((1, 2), 0), ((1, 2), 4096), ((3, 4), 4096)]


def test_what_was_taken_back_is_not_launched(served: Served) -> None:
    served.loop.bind(7, PROGRAM, (1,))
    served.launch(7)
    served.loop.unbind(7)
    assert served.launch(7)[1] == 1
    assert error_pb2.ErrorDetail.FromString(served.answer[HEADER_BYTES:]).rule == "binding_id"
    assert len(served.stream.launched) == 1


def test_launches_that_want_no_answer_get_none(served: Served) -> None:
    served.loop.bind(7, PROGRAM, (1,))
    served.socket.send(HEADER.pack(Kind.LAUNCH, 0, 0, 1, 7))
    served.socket.send(HEADER.pack(Kind.LAUNCH, 0, 0, 2, 7) * 2)
    assert served.launch(7)[3] == 9
    assert len(served.stream.launched) == 4


def test_bindings_come_and_go_while_a_launch_is_waited_for(served: Served) -> None:
    served.loop.bind(7, PROGRAM, (1,))
    served.socket.send(HEADER.pack(Kind.LAUNCH, TIME, 0, 9, 7))
    assert comes(lambda: served.stream.launched)
    served.loop.bind(8, PROGRAM, (2,))
    served.loop.unbind(8)
    served.loop.unbind(7)
    served.stream.ends.set()
    assert HEADER.unpack_from(served.socket.recv(1 << 16)) == (REPLY_KIND | Kind.LAUNCH, 0, 0, 9, 11)
    assert served.launch(7)[1] == 1


def test_no_launch_is_waited_for_that_waits_for_another_process(served: Served) -> None:
    served.loop.bind(7, PROGRAM, (1,))
    assert served.launch(7, WAIT | TIME)[1] == 1
    detail = error_pb2.ErrorDetail.FromString(served.answer[HEADER_BYTES:])
    assert (detail.field, detail.rule) == ("flags", "launch_flags")
    assert not served.stream.launched
    assert served.launch(7, WAIT | REPLY)[1] == 0


# Looking for packets


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[LaunchLoop]:
    """Which loops have looked for a packet without sleeping. They would for 0.2 s."""
    monkeypatch.setattr(launches, "_SPIN_NS", 200_000_000)
    monkeypatch.setattr(LaunchLoop, "_latest", None)
    found: list[LaunchLoop] = []
    receive = LaunchLoop._receive

    def noted(self: Any, buffer: bytearray) -> int:
        if self._follows and LaunchLoop._latest is self:
            found.append(self)
        return receive(self, buffer)

    monkeypatch.setattr(LaunchLoop, "_receive", noted)
    return found


def comes(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(condition())


def test_a_connection_looks_only_while_packets_follow_each_other(looks: list[LaunchLoop]) -> None:
    served = Served()
    served.loop.bind(7, PROGRAM, (1,))
    for _ in range(20):
        served.launch(7)
    assert len(looks) > 10
    time.sleep(0.3)
    begun = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - begun < 0.1, "a connection that is idle keeps a processor busy"
    assert served.launch(7)[3] == 9
    assert comes(lambda: not served.loop._follows)
    served.end()


def test_one_connection_of_a_process_looks(looks: list[LaunchLoop]) -> None:
    first, second = Served(), Served()
    for served in (first, second):
        served.loop.bind(7, PROGRAM, (1,))
        for _ in range(5):
            served.launch(7)
    assert LaunchLoop._latest is second.loop
    begun = time.thread_time()
    assert first.launch(7)[3] == 9
    assert LaunchLoop._latest is first.loop
    assert second.launch(7)[3] == 9
    assert time.thread_time() - begun < 0.1
    assert set(looks) == {first.loop, second.loop}
    first.end(), second.end()


def test_an_end_is_noticed_while_looking(looks: list[LaunchLoop]) -> None:
    for end in (lambda served: served.socket.close(), lambda served: served.loop.hang_up()):
        served = Served()
        served.loop.bind(7, PROGRAM, (1,))
        for _ in range(5):
            served.launch(7)
        end(served)
        served.end()
    assert looks
