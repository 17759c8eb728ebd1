"""Packets of launches that the process of a GPU serves without the interpreter: what is prepared once and when again,
order, events, times, and what cannot be launched. Runs as ``test_gpu.py`` does.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from gpu_device_harness import ADD, N, get, put, settled, stage

from tilewright_kit.contract.device import Buffer
from tilewright_kit.contract.plan import I64, WORKSPACE, Pointer, Struct, Table
from tilewright_proto.v1 import error_pb2
from tilewright_server.devices.contract import RECORD, REPLY, TIME, WAIT, DeviceLostError
from tilewright_server.devices.gpu.device import GpuDevice
from tilewright_server.devices.gpu.launch.program import GpuProgram
from tilewright_server.devices.gpu.stream import GpuStream
from tilewright_server.devices.tracing import MAX_TRACES, PacketTimes
from tilewright_server.devices.worker.launches import LaunchLoop
from tilewright_server.protocol.frames import ERROR, HEADER, HEADER_BYTES, MAX_FRAMES, REPLY_KIND, TIED, Kind

pytestmark = pytest.mark.gpu
DONE = REPLY_KIND | Kind.LAUNCH


class Served:
    """A loop in a thread, and the client's end."""

    def __init__(self, gpu: GpuDevice, entry: Callable[[str], int]) -> None:
        self.gpu = gpu
        self.stream: GpuStream = gpu.open_stream()
        self.prepared: list[int] = []
        prepare = self.stream.prepare

        def noted(binding: int, *arguments: object) -> None:
            self.prepared.append(binding)
            prepare(binding, *arguments)  # type: ignore[arg-type]

        self.stream.prepare = noted  # type: ignore[method-assign, assignment]
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(20)
        self.note = memoryview(bytearray(16)).cast("Q")
        self.lost: list[DeviceLostError] = []
        self.traced: list[tuple[bytes, PacketTimes]] = []

        def traced(context: bytes, times: PacketTimes) -> None:
            self.traced.append((context, times))

        self.loop = LaunchLoop(theirs, self.stream, note=self.note, lost=self.lost.append, traced=traced)
        self.add = gpu.program([stage(entry("add"), ADD)], ["x", "y", "out"])
        self.thread = threading.Thread(target=self.loop.serve, daemon=True)
        self.thread.start()

    def operands(self, value: float) -> tuple[tuple[int, ...], Buffer]:
        """Addresses of two vectors of ``value``, and of their sum."""
        x, out = put(self.gpu, np.full(N, value, np.float32)), put(self.gpu, np.full(N, np.nan, np.float32))
        return (x.address, x.address, out.address), out

    def bind(self, binding: int, value: float, number: int = 0) -> Buffer:
        addresses, out = self.operands(value)
        self.loop.bind(binding, self.add, addresses, number)
        return out

    def send(self, binding: int, flags: int = REPLY, slot: int = 0, sequence: int = 9) -> None:
        self.socket.send(HEADER.pack(Kind.LAUNCH, flags, slot, sequence, binding))

    def answer(self) -> tuple[int, ...]:
        data = self.socket.recv(1 << 16)
        self.payload = data[HEADER_BYTES:]
        return HEADER.unpack_from(data)

    def launch(self, binding: int, flags: int = REPLY, slot: int = 0) -> tuple[int, ...]:
        self.send(binding, flags, slot)
        return self.answer()

    def has_traced(self, count: int) -> bool:
        self.loop.poll_traces()
        return len(self.traced) >= count

    @property
    def rule(self) -> str:
        """Rule of the error that was answered last."""
        return error_pb2.ErrorDetail.FromString(self.payload).rule

    def end(self) -> None:
        self.socket.close()
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def served(gpu: GpuDevice, entry: Callable[[str], int]) -> Iterator[Served]:
    made = Served(gpu, entry)
    yield made
    made.end()


def test_a_binding_is_prepared_once(served: Served) -> None:
    outs = {binding: served.bind(binding, binding) for binding in (7, 1 << 40)}
    for _ in range(3):
        for binding in outs:
            assert served.launch(binding, TIME)[:4] == (DONE, 0, 0, 9)
    assert served.prepared == list(outs)
    assert all((get(served.gpu, out) == 2 * binding).all() for binding, out in outs.items())


def test_many_bindings_come_and_go(served: Served) -> None:
    outs = {number: served.bind(number * 64, number) for number in range(40)}
    for number in outs:
        served.send(number * 64, 0)
    for number in range(0, 40, 3):
        assert served.launch(number * 64)[1] == 0
        served.loop.unbind(number * 64)
    for number in range(40):
        assert served.launch(number * 64, TIME)[1] == (ERROR if number % 3 == 0 else 0), number
    assert all((get(served.gpu, out) == 2 * number).all() for number, out in outs.items())


def test_a_binding_is_prepared_again_for_other_memory(served: Served, entry: Callable[[str], int]) -> None:
    args = Struct((Pointer("x"), Pointer("x"), Pointer(WORKSPACE), I64(N)))
    program = served.gpu.program([stage(entry("add"), args)], ["x"])
    scratch = [served.gpu.allocate(4 * N) for _ in range(2)]
    for turn, buffer in enumerate(scratch, 1):
        x = put(served.gpu, np.full(N, turn, np.float32))
        with served.loop.lock:
            served.loop.workspace = buffer.address
        served.loop.bind(7, program, (x.address,))
        assert served.launch(7, TIME)[1] == 0
    served.loop.bind(7, program, (x.address,))
    with served.loop.lock:
        served.loop.workspace = scratch[0].address
    assert served.launch(7, TIME)[1] == 0
    assert served.prepared == [7, 7, 7]
    assert (get(served.gpu, scratch[0]) == 4).all() and (get(served.gpu, scratch[1]) == 4).all()


def test_what_was_taken_back_is_not_launched(served: Served) -> None:
    out = served.bind(7, 3)
    assert served.launch(7, TIME)[1] == 0
    served.gpu.write(out, 0, memoryview(np.zeros(N, np.float32)))
    served.loop.unbind(7)
    assert served.launch(7)[1] == ERROR
    assert served.rule == "binding_id"
    assert (get(served.gpu, out) == 0).all()


def test_packets_of_many_launches_are_answered_in_order(served: Served) -> None:
    for binding in range(4):
        served.bind(binding, binding)
    frames = [
        HEADER.pack(Kind.LAUNCH, REPLY if number % 2 else 0, 0, number, 9 if number == 31 else number % 4)
        for number in range(MAX_FRAMES)
    ]
    served.socket.send(b"".join(frames))
    answers = [served.answer() for _ in range(MAX_FRAMES // 2)]
    assert [answer[3] for answer in answers] == list(range(1, MAX_FRAMES, 2))
    assert [answer[3] for answer in answers if answer[1] == ERROR] == [31]


def test_packets_that_mean_nothing_are_answered_so(served: Served) -> None:
    served.bind(7, 1)
    frame = HEADER.pack(Kind.LAUNCH, REPLY, 0, 9, 7)
    for packet in (frame[:-1], frame * (MAX_FRAMES + 1), frame + b"?" * 8, HEADER.pack(Kind.HELLO, 0, 0, 9, 7)):
        served.socket.send(packet)
        assert served.answer()[1] == ERROR
        assert served.rule == "packet_format"
    served.socket.send(frame + HEADER.pack(Kind.HELLO, 0, 0, 10, 7) + frame)
    assert [served.answer()[1:4] for _ in range(3)] == [(0, 0, 9), (ERROR, 0, 10), (0, 0, 9)]
    assert served.launch(7)[1] == 0


def test_no_launch_is_waited_for_that_waits_for_another_process(served: Served) -> None:
    served.bind(7, 1)
    assert served.launch(7, WAIT | TIME)[1] == ERROR
    assert served.rule == "launch_flags"


def test_slots_need_events_and_record_them(served: Served) -> None:
    served.bind(7, 1)
    for flags in (WAIT, RECORD):
        assert served.launch(7, flags | REPLY, 3)[1] == ERROR
        assert served.rule == "event_slot"
    served.socket.send(HEADER.pack(Kind.OPEN_EVENT, 0, 3, 1, 0))
    assert served.answer()[:3] == (REPLY_KIND | Kind.OPEN_EVENT, 0, 3)
    assert len(served.payload) == 64
    assert served.launch(7, RECORD | REPLY, 3)[1] == 0
    assert served.launch(7, WAIT | REPLY, 3)[1] == ERROR
    completion = served.stream._slots[3].completion
    served.stream.synchronize()
    assert not served.gpu._driver.api.query_event(completion)[0]


def test_launches_before_one_that_fails_are_tied_to_the_client(served: Served, entry: Callable[[str], int]) -> None:
    gpu, flag = served.gpu, served.gpu.allocate(8)
    args = Struct((Pointer("flag"),))
    gate = gpu.program([stage(entry("gate"), args, grid=(1, 1, 1), block=(1, 1, 1))], ["flag"])
    served.loop.bind(7, gate, (flag.address,))
    served.socket.send(HEADER.pack(Kind.OPEN_EVENT, 0, 3, 1, 0))
    served.answer()
    served.socket.send(HEADER.pack(Kind.LAUNCH, 0, 0, 1, 7) + HEADER.pack(Kind.LAUNCH, RECORD | REPLY, 3, 2, 8))
    assert served.answer()[:4] == (DONE, ERROR | TIED, 3, 2)
    assert served.rule == "binding_id"
    completion, query = served.stream._slots[3].completion, gpu._driver.api.query_event
    assert query(completion)[0], "it is behind the launch before"
    gpu.write(flag, 0, memoryview(np.ones(1, np.int64)))
    assert settled(lambda: not query(completion)[0])
    assert served.launch(8, REPLY)[1] == ERROR, "nothing to tie"


def test_a_traced_packet_is_measured_and_not_waited_for(served: Served, entry: Callable[[str], int]) -> None:
    gpu, flag = served.gpu, served.gpu.allocate(8)
    args = Struct((Pointer("flag"),))
    gate = gpu.program([stage(entry("gate"), args, grid=(1, 1, 1), block=(1, 1, 1))], ["flag"])
    served.loop.bind(7, gate, (flag.address,))
    served.bind(8, 2)
    before = time.time_ns()
    served.socket.send(HEADER.pack(Kind.TRACE, 0, 0, 0, 0) + b"of the program")
    served.socket.send(HEADER.pack(Kind.LAUNCH, 0, 0, 1, 7) + HEADER.pack(Kind.LAUNCH, REPLY, 0, 2, 8))
    assert served.answer()[:4] == (DONE, 0, 0, 2)
    after, waited = time.time_ns(), served.stream.host_synchronisations
    time.sleep(0.05)
    assert not served.has_traced(1)
    gpu.write(flag, 0, memoryview(np.ones(1, np.int64)))
    assert settled(lambda: served.has_traced(1))
    ((context, times),) = served.traced
    assert context == b"of the program"
    assert before <= times.started_ns <= times.queued_ns <= after
    assert times.launches == 2
    assert times.device_ns > 40_000_000
    assert served.launch(8)[1] == 0
    served.stream.synchronize()
    assert served.stream.host_synchronisations == waited + 1, "the test's own"
    assert not served.has_traced(2), "the next packet is none of the trace"


def test_traces_are_bounded_and_end_with_their_connection(gpu: GpuDevice, entry: Callable[[str], int]) -> None:
    served, flag = Served(gpu, entry), gpu.allocate(8)
    args = Struct((Pointer("flag"),))
    gate = gpu.program([stage(entry("gate"), args, grid=(1, 1, 1), block=(1, 1, 1))], ["flag"])
    served.loop.bind(7, gate, (flag.address,))
    served.bind(8, 1)
    for number in range(5):
        served.socket.send(HEADER.pack(Kind.TRACE, 0, 0, 0, 0) + b"%d" % number)
    assert served.launch(9)[1] == ERROR
    assert served.launch(7)[1] == 0
    assert settled(lambda: served.has_traced(1))
    assert [(context, times.launches) for context, times in served.traced] == [(b"4", 0)], "the last before a packet"
    for _ in range(2 * MAX_TRACES):
        served.socket.send(HEADER.pack(Kind.TRACE, 0, 0, 0, 0) + b"held")
        assert served.launch(8)[1] == 0
    served.end()
    gpu.write(flag, 0, memoryview(np.ones(1, np.int64)))
    assert settled(lambda: len(served.traced) == 1 + MAX_TRACES)
    assert settled(lambda: served.stream.lane not in gpu._all_lanes)


def test_bindings_come_and_go_while_a_launch_is_waited_for(served: Served, entry: Callable[[str], int]) -> None:
    gpu, flag = served.gpu, served.gpu.allocate(8)
    args = Struct((Pointer("flag"),))
    gate = gpu.program([stage(entry("gate"), args, grid=(1, 1, 1), block=(1, 1, 1))], ["flag"])
    served.loop.bind(7, gate, (flag.address,))
    served.send(7, TIME)
    assert settled(lambda: not served.stream.lane.is_idle)
    assert settled(lambda: served.stream.host_synchronisations == 1)
    out = served.bind(8, 2)
    served.loop.unbind(7)
    gpu.write(flag, 0, memoryview(np.ones(1, np.int64)))
    assert served.answer()[:4] == (DONE, 0, 0, 9)
    assert served.launch(7)[1] == ERROR
    assert served.launch(8, TIME)[4] > 0
    assert (get(gpu, out) == 4).all()


def test_launches_note_their_program_and_the_time(served: Served) -> None:
    served.bind(7, 1, number=41)
    served.bind(8, 1, number=42)
    before = time.monotonic_ns()
    for binding, number in ((7, 41), (8, 42), (7, 41)):
        served.launch(binding)
        assert served.note[0] == number
        assert before <= served.note[1] <= time.monotonic_ns()
        before = served.note[1]


def test_launches_follow_what_the_lane_lets_go(served: Served, entry: Callable[[str], int]) -> None:
    """More bindings than are kept, and programs that go, of which lanes hear from other threads."""
    gpu, lane = served.gpu, served.stream.lane
    lane._limit = 16
    rows = Table(tuple(Struct((Pointer("x"), I64(1))) for _ in range(8)))
    table = Struct((rows, I64(8), Pointer("out")))

    def program() -> GpuProgram:
        return gpu.program([stage(entry("table"), table, grid=(1, 1, 1))], ["x", "out"])

    first, x = program(), put(gpu, np.full(1, 3, np.float32))
    outs = [gpu.allocate(32) for _ in range(20)]
    for turn in range(2):
        for binding, out in enumerate(outs):
            if turn == 0:
                served.loop.bind(binding, first, (x.address, out.address))
            assert served.launch(binding, TIME)[1] == 0
    assert all((get(gpu, out) == 3).all() for out in outs)
    for number in range(3):
        other = program()
        served.loop.bind(100 + number, other, (x.address, outs[0].address))
        assert served.launch(100 + number, TIME)[1] == 0
        thread = threading.Thread(target=other.close)
        thread.start()
        thread.join()
        assert lane._dropped
        gpu.write(x, 0, memoryview(np.full(1, number, np.float32)))
        assert served.launch(1, TIME)[1] == 0
        assert not lane._dropped
        assert (get(gpu, outs[1]) == number).all()


def test_connections_launch_side_by_side(gpu: GpuDevice, entry: Callable[[str], int]) -> None:
    all_of_them = [Served(gpu, entry) for _ in range(4)]
    outs = [served.bind(7, number) for number, served in enumerate(all_of_them)]

    def work(served: Served) -> None:
        answered.extend(served.launch(7, TIME)[1] for _ in range(100))

    answered: list[int] = []
    threads = [threading.Thread(target=work, args=(served,)) for served in all_of_them]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answered == [0] * 400
    assert all((get(gpu, out) == 2 * number).all() for number, out in enumerate(outs))
    for served in all_of_them:
        served.end()


def test_an_idle_connection_keeps_no_processor_busy(served: Served) -> None:
    served.bind(7, 1)
    for _ in range(50):
        served.launch(7)
    served.stream.synchronize()
    time.sleep(0.2)
    begun = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - begun < 0.15
    assert served.launch(7)[1] == 0


def test_an_end_from_either_side_is_noticed(gpu: GpuDevice, entry: Callable[[str], int]) -> None:
    for end in (lambda served: served.socket.close(), lambda served: served.loop.hang_up()):
        served = Served(gpu, entry)
        served.bind(7, 1)
        for _ in range(5):
            served.launch(7)
        end(served)
        served.end()
        assert settled(lambda served=served: served.stream.lane not in gpu._all_lanes)
