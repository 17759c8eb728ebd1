"""One thread that serves short launches of many connections; what is not short, or has to wait, goes to their own."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import BEGUN, FakeEngine
from local_harness import HEADER, LAUNCH, REPLY, TIME, Wire, expect, launches
from rpc_harness import MemoryFile, eventually, in_region

from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.endpoints.local import connection, server, shared_thread
from tilewright_server.endpoints.local import seqpacket as packets
from tilewright_server.endpoints.local.server import LocalServer
from tilewright_server.engine.call import Call, WouldWaitError
from tilewright_server.engine.types import Selection
from tilewright_server.service import Service
from tilewright_server.session.sessions import Sessions

THREAD = "local-launches"


class House:
    """A local socket of this process whose connections are many from the second on."""

    def __init__(self, folder: Path) -> None:
        engine: Any = FakeEngine()
        self.sessions = Sessions()
        self.service = Service(engine, self.sessions, 4096, 8192)
        self.session = self.sessions.open("", local=True)
        self.server = LocalServer(self.service, folder / "s.sock.local", 8)
        self.server.start()
        self.served: Counter[tuple[str, Any]] = Counter()
        """What the shared thread had to do, by the thread that did it, and how that ended."""

    def plan(self, held: bool = False) -> int:
        desc = TensorDesc.of("fp32", (16,))
        request = OperationRequest("copy", {"x": desc}, {"y": desc}, {"held": 1.0} if held else {})
        return self.service.plan(self.session.token, request, Selection(), Call())[0]

    def connect(self) -> Wire:
        return Wire(str(self.server.path), self.session.token)

    def launched(self, wire: Wire, file: MemoryFile, count: int = 8) -> int:
        """A short binding that was launched so often that its connection has been lent by now."""
        region = wire.register(file)
        binding = wire.bind(self.plan(), in_region(region), in_region(region, 64))
        for _ in range(count):
            assert wire.launch(binding).error is None
        return binding


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(server, "FEW", 1)
    monkeypatch.setattr(connection, "ROW", 3)
    monkeypatch.setattr(packets.Wire.__init__, "__defaults__", (0.5,))
    made = House(tmp_path)
    launch = connection.Connection.launch_at_once

    def recorded(own: connection.Connection, data: memoryview) -> bool | bytes:
        done = launch(own, data)
        made.served[threading.current_thread().name, done if isinstance(done, bool) else "reply"] += 1
        return done

    monkeypatch.setattr(connection.Connection, "launch_at_once", recorded)
    yield made
    assert made.server.close(timeout=5)
    made.service.close()
    assert made.sessions.close_all(timeout=30)
    assert THREAD not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def files() -> Iterator[list[MemoryFile]]:
    made = [MemoryFile(4096) for _ in range(4)]
    yield made
    for file in made:
        file.close()


def test_short_launches_of_many_connections_are_served_by_one_thread(house: House, files: list[MemoryFile]) -> None:
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(house.connect()) for _ in files]
        bindings = [house.launched(wire, file) for wire, file in zip(wires, files, strict=True)]
        assert eventually(lambda: house.served[THREAD, True] >= 8)  # counted behind their replies
        before = sum(house.served.values())
        for turn in range(5):
            for number, (wire, binding, file) in enumerate(zip(wires, bindings, files, strict=True)):
                file.bytes[:64] = bytes([turn * 8 + number]) * 64
                assert wire.launch(binding).error is None
                assert file.bytes[64:128] == file.bytes[:64]
        assert eventually(lambda: sum(house.served.values()) >= before + 20)
        assert {name for name, _ in house.served} == {THREAD}


def test_a_plan_with_a_better_kernel_since_its_binding_is_still_served_there(
    house: House, files: list[MemoryFile]
) -> None:
    with house.connect() as wire, house.connect():
        binding = house.launched(wire, files[0])
        prepared: Any = house.session.binding(binding).binding.target.prepared
        object.__setattr__(prepared, "successor", replace(prepared))
        assert eventually(lambda: house.served[THREAD, True] > 0)
        before = house.served.copy()
        for _ in range(20):
            assert wire.launch(binding).error is None
        assert eventually(lambda: house.served[THREAD, True] >= before[THREAD, True] + 20)
        assert house.served[THREAD, False] == before[THREAD, False]


def test_a_plan_whose_device_was_lost_goes_to_the_connections_own_thread(house: House, files: list[MemoryFile]) -> None:
    with house.connect() as wire, house.connect():
        binding = house.launched(wire, files[0])
        prepared: Any = house.session.binding(binding).binding.target.prepared
        object.__setattr__(prepared, "successor", replace(prepared, lost=True))
        assert wire.launch(binding).error is None
        assert eventually(lambda: house.served[THREAD, False] == 1)


def test_a_launch_waits_for_short_ones_of_others_and_not_for_long_ones() -> None:
    left = [WouldWaitError()] * 3

    def launch() -> int:
        if left:
            raise left.pop()
        return 7

    assert shared_thread.soon(launch, 1) == 7 and not left
    left += [WouldWaitError()] * 100
    with pytest.raises(WouldWaitError):
        shared_thread.soon(launch, 1)
    assert len(left) > 50


def test_a_single_connection_keeps_its_own_thread(house: House, files: list[MemoryFile]) -> None:
    with house.connect() as wire:
        house.launched(wire, files[0], 20)
    assert not house.served


def test_other_packets_and_unknown_bindings_are_answered_in_between(house: House, files: list[MemoryFile]) -> None:
    with house.connect() as wire, house.connect():
        binding = house.launched(wire, files[0])
        for _ in range(3):
            expect(wire.launch(4711), "not_found", "binding_id")
            other = house.launched(wire, files[1])
            wire.send(launches(binding, other, flags=REPLY))
            assert [reply.sequence for reply in (wire.receive(), wire.receive()) if reply] == [100, 101]
            expect(wire.ask(77), "invalid_argument", "packet_format")
        assert house.served[THREAD, True] and house.served[THREAD, False]


def test_long_launches_and_those_that_wait_hold_up_nobody(house: House, files: list[MemoryFile]) -> None:
    with house.connect() as one, house.connect() as two, house.connect() as three:
        short = [house.launched(wire, file) for wire, file in zip((one, two, three), files, strict=False)]
        region = one.register(files[3])
        slow = one.bind(house.plan(held=True), in_region(region), in_region(region, 64))
        house.launched(one, files[0])
        one.send(HEADER.pack(LAUNCH, TIME, 0, 7, slow))
        assert eventually(lambda: files[3].bytes[64] == BEGUN)
        two.send(HEADER.pack(LAUNCH, TIME, 0, 8, short[1]))  # which has to wait: only one runs at a time
        for _ in range(3):
            expect(three.launch(4711), "not_found", "binding_id")
        files[3].bytes[64] = 0  # now the long one ends
        for wire, sequence in ((one, 7), (two, 8)):
            reply = wire.receive()
            assert reply is not None and reply.error is None and reply.sequence == sequence
        assert house.served[THREAD, False]
        before = house.served[THREAD, True]
        assert two.launch(short[1]).error is None
        assert eventually(lambda: house.served[THREAD, True] == before + 1), "it is lent again"


def test_who_reads_no_replies_is_given_up_alone(house: House, files: list[MemoryFile]) -> None:
    with house.connect() as stuck, house.connect() as healthy:
        bindings = [house.launched(wire, file) for wire, file in zip((stuck, healthy), files, strict=False)]
        stuck.socket.settimeout(0.05)
        with contextlib.suppress(TimeoutError, BrokenPipeError):
            for _ in range(20_000):
                stuck.send(HEADER.pack(LAUNCH, TIME, 0, 1, bindings[0]))
        assert eventually(lambda: house.served[THREAD, "reply"] == 1)
        for _ in range(20):
            assert healthy.launch(bindings[1]).error is None
        assert eventually(lambda: len(house.server) == 1)


def test_connections_that_were_lent_end_with_their_client_session_and_server(
    house: House, files: list[MemoryFile]
) -> None:
    one, two = house.connect(), house.connect()
    with house.connect() as three:
        for wire, file in zip((one, two, three), files, strict=False):
            house.launched(wire, file)
        one.close()
        assert eventually(lambda: len(house.server) == 2)
        house.sessions.close(house.session)
        assert two.is_closed() and three.is_closed()
    two.close()
    assert eventually(lambda: len(house.server) == 0)


def test_a_server_without_a_thread_to_spare_serves_them_as_before(
    house: House, files: list[MemoryFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with house.connect() as wire, house.connect():
        monkeypatch.setattr(shared_thread.threading, "Thread", refused)
        house.launched(wire, files[0], 20)
        assert not house.served
