"""Admission, with programs that take as long as the test wants."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from executor_bench import ADDRESSES, LANES, Bench, FakeProgram, slow

from tilewright_kit.types.errors import (
    CancelledError,
    DeadlineError,
    DeviceError,
    ResourceExhaustedError,
    TilewrightError,
    UnavailableError,
)
from tilewright_server.clients.client import Client, Priority
from tilewright_server.engine.call import Call
from tilewright_server.engine.types import Outcome


def test_callers_own_thread_runs_the_launch(bench: Bench) -> None:
    threads: list[int] = []
    prepared = bench.prepare("here")
    run = prepared.program.run  # type: ignore[union-attr]
    prepared.program.run = lambda *args, **options: threads.append(threading.get_ident()) or run(*args, **options)  # type: ignore
    outcome = bench.executor.run(prepared, ADDRESSES, Call())
    assert threads == [threading.get_ident()]
    assert (outcome.device_ns, outcome.queue_ns) == (1000, 0)


def test_teams_never_need_more_lanes_than_there_are(bench: Bench) -> None:
    plans = [bench.prepare(f"{weight}", weight) for weight in (1, 2, 3, 4)]

    def work(seed: int) -> None:
        for turn in range(40):
            bench.executor.run(plans[(seed + turn) % 4], ADDRESSES, Call())

    list(bench.threads.map(work, range(12)))
    assert FakeProgram.most <= LANES
    assert bench.statistics.snapshot().operations[0].success == 12 * 40


def test_large_team_is_served_in_its_turn(bench: Bench) -> None:
    gate = threading.Event()
    first = bench.start(bench.prepare("first", 1, gate))
    large = bench.start(bench.prepare("large", 4))
    small = [bench.start(bench.prepare(f"small {number}", 1)) for number in range(3)]
    assert bench.executor.queue_depth == 4
    gate.set()
    for future in (first, large, *small):
        future.result(20)
    assert FakeProgram.order[:2] == ["first", "large"]


def test_calls_of_one_client_are_served_in_their_order(bench: Bench) -> None:
    gate = threading.Event()
    running = bench.start(bench.prepare("running", 4, gate))
    names = [f"{number}" for number in range(10)]
    waiting = [bench.start(bench.prepare(name, 4)) for name in names]
    gate.set()
    for future in (running, *waiting):
        future.result(20)
    assert FakeProgram.order == ["running", *names]
    assert waiting[-1].result().queue_ns > 0


def test_team_larger_than_the_device_takes_all_of_it(bench: Bench) -> None:
    assert bench.executor.run(bench.prepare("huge", 100), ADDRESSES, Call()).device_ns == 1000
    assert bench.executor.drain(time.monotonic() + 5)


def test_full_queue_refuses_and_says_when_to_come_back() -> None:
    bench = Bench(queue_limit=4)
    gate = threading.Event()
    futures = [bench.start(bench.prepare("x", 4, gate)) for _ in range(3)]
    other = Call.within(20, client=Client("uid:1", "other", b""))
    futures.append(bench.start(bench.prepare("other", 4, gate), other))  # half is left to others
    with pytest.raises(ResourceExhaustedError) as caught:
        bench.executor.run(bench.prepare("late", 1), ADDRESSES, Call())
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 0
    assert (caught.value.field, caught.value.value, caught.value.rule) == ("queue_limit", "4", "queue_full")
    assert f"the device {bench.device.info.id} already, 2 of them of this client's process" in caught.value.reason
    gate.set()
    for future in futures:
        future.result(20)
    bench.executor.run(bench.prepare("later", 1), ADDRESSES, Call())
    bench.threads.shutdown()


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_caller_that_gives_up_launches_nothing_and_holds_up_nobody(how: str, bench: Bench) -> None:
    gate = threading.Event()
    running = bench.start(bench.prepare("running", 3, gate))
    call = Call.within(0.2 if how == "deadline" else 20)
    leaving = bench.start(bench.prepare("leaving", 4), call)
    behind = bench.start(bench.prepare("behind", 1))  # held up by the one before it only
    if how == "cancel":
        call.cancel()
    with pytest.raises((DeadlineError, CancelledError)):
        leaving.result(20)
    behind.result(20)
    gate.set()
    running.result(20)
    assert FakeProgram.order == ["running", "behind"]
    assert bench.executor.drain(time.monotonic() + 5)


def test_passed_deadline_launches_nothing(bench: Bench) -> None:
    with pytest.raises(DeadlineError):
        bench.executor.run(bench.prepare("late"), ADDRESSES, Call.within(-1))
    assert FakeProgram.order == []


def test_failed_launch_gives_its_lanes_and_workspace_back(bench: Bench) -> None:
    prepared = bench.prepare("bad", 4, workspace=100)
    prepared.program.fail = DeviceError("planted")  # type: ignore[union-attr]
    for _ in range(5):
        with pytest.raises(DeviceError):
            bench.executor.run(prepared, ADDRESSES, Call())
    assert bench.device.allocations == 1
    assert bench.executor.drain(time.monotonic() + 5)


def test_batch_is_admitted_once_and_in_order(bench: Bench) -> None:
    plans = [bench.prepare(f"{number}", 1 + number % 3) for number in range(64)]
    plans[5].program.fail = DeviceError("planted")  # type: ignore[union-attr]
    results = bench.executor.run_many([(prepared, ADDRESSES, 1) for prepared in plans], Call())
    assert [place for place, item in enumerate(results) if isinstance(item, TilewrightError)] == [5]
    assert FakeProgram.order == [f"{number}" for number in range(64)]


def test_batch_stops_launching_when_its_time_is_over(bench: Bench) -> None:
    gate, call = threading.Event(), Call.within(20)
    long = bench.prepare("long", 1, gate)

    def let_time_pass() -> None:
        assert isinstance(long.program, FakeProgram) and long.program.started.wait(20)
        call.deadline = time.monotonic()
        gate.set()

    bench.threads.submit(let_time_pass)
    results = bench.executor.run_many([(long, ADDRESSES, 1), (bench.prepare("late"), ADDRESSES, 1)], call)
    assert isinstance(results[0], Outcome)
    assert isinstance(results[1], DeadlineError)
    assert FakeProgram.order == ["long"]


def test_draining_finishes_what_runs_and_waits(bench: Bench) -> None:
    gate = threading.Event()
    futures = [bench.start(bench.prepare(f"{number}", 4, gate)) for number in range(3)]
    assert not bench.executor.drain(time.monotonic() + 0.05)
    with pytest.raises(UnavailableError):
        bench.executor.run(bench.prepare("new"), ADDRESSES, Call())
    gate.set()
    assert bench.executor.drain(time.monotonic() + 20)
    assert [future.result(0).device_ns for future in futures] == [1000] * 3
    assert FakeProgram.order == ["0", "1", "2"]


def test_every_repeat_is_done_once(bench: Bench) -> None:
    prepared, program = slow(bench)
    program.seconds = 1e-5
    outcome = bench.executor.run(prepared, ADDRESSES, Call(), 3000)
    assert (program.done, outcome.device_ns) == (3000, 3_000_000)
    snapshot = bench.statistics.snapshot()
    assert (snapshot.operations[0].success, snapshot.kernels[0].launches) == (1, 3000)


@pytest.mark.parametrize("way", ["deadline", "cancel", "session"])
@pytest.mark.parametrize("many", [False, True])
def test_repeats_end_with_the_callers_interest(way: str, many: bool, bench: Bench) -> None:
    prepared, program = slow(bench)
    call = Call.within(20)
    owner = SimpleNamespace(closed=False)
    call.owner = owner

    def lose_interest() -> None:
        assert program.started.wait(20)
        time.sleep(0.1)
        if way == "deadline":
            call.deadline = time.monotonic()
        elif way == "cancel":
            call.cancel()
        else:
            owner.closed = True

    bench.threads.submit(lose_interest)
    error: Any
    if many:
        (error,) = bench.executor.run_many([(prepared, ADDRESSES, 1_000_000)], call)
    else:
        with pytest.raises((DeadlineError, CancelledError)) as caught:
            bench.executor.run(prepared, ADDRESSES, call, 1_000_000)
        error = caught.value
    assert isinstance(error, DeadlineError if way == "deadline" else CancelledError)
    assert 0 < program.done < 1_000_000
    assert error.value == str(program.done)
    assert f"{program.done} of 1000000 repeats were done" in error.reason
    assert error.fix
    snapshot = bench.statistics.snapshot()
    assert (snapshot.operations[0].success, snapshot.kernels[0].launches) == (0, program.done)
    assert bench.executor.drain(time.monotonic() + 5)


@pytest.mark.parametrize("kind", ["repeats", "batch"])
def test_long_work_makes_way_for_others(kind: str, bench: Bench) -> None:
    prepared, program = slow(bench)
    call = Call.within(60)
    if kind == "repeats":
        long: Future[Any] = bench.threads.submit(bench.executor.run, prepared, ADDRESSES, call, 100_000)
    else:
        long = bench.threads.submit(bench.executor.run_many, [(prepared, ADDRESSES, 1)] * 4096, call)
    assert program.started.wait(10)
    for turn in range(10):
        bench.executor.run(bench.prepare(f"short {turn}", 1), ADDRESSES, Call.within(10))
    assert not long.done()
    assert program.done < 4096 / 2, "each of ten waits for a small part of the long work only"
    assert FakeProgram.most <= LANES
    call.cancel()
    with suppress(CancelledError):
        long.result(20)


def test_work_that_made_way_is_neither_turned_away_nor_forgotten_by_draining() -> None:
    bench = Bench(queue_limit=1)
    prepared, program = slow(bench)
    long = bench.threads.submit(bench.executor.run, prepared, ADDRESSES, Call.within(60), 300)
    assert program.started.wait(10)
    gate = threading.Event()
    waiting = bench.start(bench.prepare("waiting", LANES, gate))
    for _ in range(2000):
        if "waiting" in FakeProgram.order:
            break
        time.sleep(0.001)
    assert bench.executor.queue_depth == 1  # the long one, behind a full queue
    assert not bench.executor.drain(time.monotonic() + 0.05)
    gate.set()
    assert waiting.result(20).device_ns == 1000
    assert bench.executor.drain(time.monotonic() + 20)
    assert long.done() or long.result(1)
    assert program.done == 300
    bench.threads.shutdown()


# Turns of clients


def caller(process: str, priority: Priority = Priority.INTERACTIVE) -> Call:
    return Call.within(60, client=Client("uid:1", process, b"", priority))


@pytest.mark.parametrize("sessions", [1, 21])
def test_one_launch_beside_a_flood_of_another_client_waits_for_one(bench: Bench, sessions: int) -> None:
    gate = threading.Event()
    flood = []
    for number in range(21):
        call = Call.within(60, client=Client("uid:1", "flood", b"%d" % (number % sessions)))
        flood.append(bench.start(bench.prepare(f"flood {number}", LANES, gate), call))
    victim = bench.start(bench.prepare("victim", LANES), caller("victim"))
    assert bench.executor.queue_depth == 21
    gate.set()
    for future in (*flood, victim):
        future.result(20)
    assert FakeProgram.order[:2] == ["flood 0", "victim"]


def test_large_teams_and_small_ones_share_the_lanes_by_their_time(bench: Bench) -> None:
    gate = threading.Event()
    futures = [bench.start(bench.prepare("gate", LANES, gate), caller("gate"))]
    bench.executor.mean_ns = 1000.0
    futures += [bench.start(bench.prepare("large", LANES), caller("large")) for _ in range(6)]
    futures += [bench.start(bench.prepare("small", 1), caller("small")) for _ in range(12)]
    gate.set()
    for future in futures:
        future.result(20)
    order = FakeProgram.order[1:]
    # A large one is charged for four lanes: at most four small ones go before each, and none waits for all the others.
    assert order.index("small") <= 1
    assert order.index("large") <= 4
    assert order[:10].count("large") >= 2
    assert order[:10].count("small") >= 4


def test_background_work_makes_way_and_is_not_starved(bench: Bench) -> None:
    gate = threading.Event()
    futures = [bench.start(bench.prepare("gate", LANES, gate), caller("gate"))]
    tuning = caller("tuning", Priority.BACKGROUND)
    futures += [bench.start(bench.prepare("tuning", LANES), tuning) for _ in range(3)]
    futures += [bench.start(bench.prepare("live", LANES), caller("live")) for _ in range(24)]
    gate.set()
    for future in futures:
        future.result(20)
    order = FakeProgram.order[1:]
    assert order[0] == "tuning" or order[1] == "tuning", "whoever came first is level with the others"
    second = [place for place, name in enumerate(order) if name == "tuning"][1]
    assert 15 <= second <= 18, "then one part of seventeen"


def test_client_that_repeats_for_long_waits_for_those_that_used_less(bench: Bench) -> None:
    prepared, program = slow(bench)
    call = caller("long")
    long: Future[Any] = bench.threads.submit(bench.executor.run, prepared, ADDRESSES, call, 100_000)
    assert program.started.wait(10)
    gate = threading.Event()
    first = bench.start(bench.prepare("first", LANES, gate), caller("a"))
    for _ in range(2000):
        if "first" in FakeProgram.order:
            break
        time.sleep(0.001)
    short = [bench.start(bench.prepare("short", LANES), caller(name)) for name in "abcd"]
    seen = len(FakeProgram.order)
    gate.set()
    for future in (first, *short):
        future.result(20)
    assert FakeProgram.order[seen : seen + 4] == ["short"] * 4
    call.cancel()
    with suppress(CancelledError):
        long.result(20)


# Calls


def test_cancellation_tells_everybody_once() -> None:
    call, heard = Call(), []
    forget = call.on_cancel(lambda: heard.append("forgotten"))
    call.on_cancel(lambda: heard.append("early"))
    forget()
    call.cancel()
    call.cancel()
    call.on_cancel(lambda: heard.append("late"))
    assert heard == ["early", "late"]
    with pytest.raises(CancelledError):
        call.check()
