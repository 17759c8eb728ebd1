"""Serving one connection's launches on a stream that does not serve packets by itself; of GPUs ``test_gpu_packets.py``
has them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from typing import cast

import pytest

from tilewright_proto.v1 import error_pb2
from tilewright_server.devices.contract import RECORD, REPLY, TIME, WAIT, Program
from tilewright_server.devices.tracing import PacketTimes
from tilewright_server.devices.worker.launches import LaunchLoop
from tilewright_server.protocol.frames import HEADER, HEADER_BYTES, REPLY_KIND, Kind

PROGRAM = cast(Program, object())


class Stream:
    """Writes down what was launched."""

    gives_back_later = True

    def __init__(self) -> None:
        self.launched: list[tuple[tuple[int, ...], int, int, int]] = []

    def open_event(self, slot: int, handle: bytes) -> bytes:
        return handle

    def launch(self, program: Program, addresses: Sequence[int], flags: int, slot: int, workspace: int = 0) -> int:
        self.launched.append((tuple(addresses), workspace, flags, slot))
        return 5

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
        self.traced: list[tuple[bytes, PacketTimes]] = []
        self.loop = LaunchLoop(theirs, self.stream, traced=lambda *told: self.traced.append(told))
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


def test_launches_have_the_memory_of_now(served: Served) -> None:
    served.loop.bind(7, PROGRAM, (1, 2))
    for slot in range(3):
        assert served.launch(7, RECORD | REPLY, slot) == (REPLY_KIND | Kind.LAUNCH, 0, slot, 9, 5)
    with served.loop.lock:
        served.loop.workspace = 4096
    served.launch(7)
    served.loop.bind(7, PROGRAM, (3, 4))
    served.launch(7)
    assert served.stream.launched[:3] == [((1, 2), 0, RECORD, slot) for slot in range(3)]
    assert served.stream.launched[3:] == [((1, 2), 4096, 0, 0), ((3, 4), 4096, 0, 0)]


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


def test_a_traced_packet_is_told_with_its_time(served: Served) -> None:
    served.loop.bind(7, PROGRAM, (1,))
    served.socket.send(HEADER.pack(Kind.TRACE, 0, 0, 0, 0) + b"of the program")
    served.socket.send(HEADER.pack(Kind.LAUNCH, 0, 0, 1, 8) + HEADER.pack(Kind.LAUNCH, 0, 0, 2, 7) * 2)
    served.socket.recv(1 << 16)  # there is no binding 8
    assert served.launch(7)[1] == 0
    ((context, times),) = served.traced
    assert context == b"of the program"
    assert (times.launches, times.device_ns, times.waits) == (2, 10, True)
    assert times.started_ns <= times.queued_ns


def test_no_launch_is_waited_for_that_waits_for_another_process(served: Served) -> None:
    served.loop.bind(7, PROGRAM, (1,))
    assert served.launch(7, WAIT | TIME)[1] == 1
    detail = error_pb2.ErrorDetail.FromString(served.answer[HEADER_BYTES:])
    assert (detail.field, detail.rule) == ("flags", "launch_flags")
    assert not served.stream.launched
    assert served.launch(7, WAIT | REPLY)[1] == 0
