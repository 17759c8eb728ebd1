"""Length of a turn on a device, by a clock that the test moves."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from tilewright_server.clients.client import Client
from tilewright_server.engine.call import Call
from tilewright_server.engine.execution import turn as module
from tilewright_server.engine.execution.admission import Admission
from tilewright_server.engine.execution.turn import SLICE_NS, Slices, Turn


def of_process(name: str) -> Call:
    call = Call.within(60)
    call.client = Client("uid:1", name, b"")
    return call


@pytest.mark.parametrize("each_ns", [10_000, 400_000, 1_050_000, 2_400_000])
def test_who_waits_for_repeats_waits_for_no_more_than_a_slice(each_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    admission = Admission("cpu:0", 1, 16)
    waits: list[int] = []

    def others() -> None:
        call = of_process("pid:2")
        for _ in range(10):  # each comes when the one before it has been served, as the turn of the repeats begins
            came = now[0]
            waiter = admission.enter(1, call)
            waits.append(now[0] - came)
            admission.leave(1, call, 1000, waiter)

    turn, slices = Turn(admission, 1, of_process("pid:1")), Slices(10**9)
    thread = threading.Thread(target=others)
    thread.start()
    while thread.is_alive():
        while not admission.queue_depth and thread.is_alive():
            thread.join(0.0005)
        now[0] += slices.begin() * each_ns
        slices.end()
        turn.yield_to_waiters()
    turn.end()
    assert len(waits) == 10
    assert max(waits) <= SLICE_NS
