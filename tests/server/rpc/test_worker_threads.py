"""Threads that serve calls: who runs next, how many of one client run, and when there are fewer again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from rpc_harness import eventually

from tilewright_kit.types.errors import ResourceExhaustedError, UnavailableError
from tilewright_server.clients.client import Client
from tilewright_server.endpoints.rpc.transport import threads
from tilewright_server.endpoints.rpc.transport.threads import Starter, Threads


@pytest.fixture
def starter() -> Iterator[Starter]:
    made = Starter()
    yield made
    made.close()


def client(process: str, session: str = "", principal: str = "uid:1") -> Client:
    return Client(principal, process, session.encode())


class Work:
    """Jobs that run until ``go`` is set, and what began in which order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    def job(self, name: str) -> threads.Job:
        def run() -> None:
            self.begun.append(name)
            self.go.wait(20)

        return run


def test_one_process_has_at_most_half_and_newcomers_always_find_a_thread(starter: Starter) -> None:
    pool, work = Threads("t", starter, least=1, most=16), Work()
    for name, share in {"a": 7, "b": 4, "c": 2, "d": 1}.items():
        for session in range(40):
            pool.submit(work.job(name), client(name, str(session)))
        assert eventually(lambda: work.begun.count(name) == share), work.begun  # noqa: B023 - called at once
    for _ in range(40):
        pool.submit(work.job("other"), client("e", principal="uid:2"))
    assert eventually(lambda: work.begun.count("other") == 1)
    assert len(work.begun) == 7 + 4 + 2 + 1 + 1
    work.go.set()
    assert eventually(lambda: len(work.begun) == 200)
    pool.close()


def test_one_session_leaves_half_of_its_process(starter: Starter) -> None:
    pool, work = Threads("t", starter, least=1, most=16), Work()
    for _ in range(20):
        pool.submit(work.job("first"), client("a", "first"))
    assert eventually(lambda: len(work.begun) == 4)
    pool.submit(work.job("second"), client("a", "second"))
    assert eventually(lambda: "second" in work.begun)
    work.go.set()
    pool.close()


def test_principals_processes_and_sessions_take_turns(starter: Starter) -> None:
    pool, gate, order = Threads("t", starter, least=1, most=1), Work(), Work()
    order.go.set()
    pool.submit(gate.job("gate"), client("gate"))
    assert eventually(lambda: bool(gate.begun))
    for _ in range(3):
        for who in (client("a", "1"), client("a", "2"), client("b"), client("c", principal="uid:2")):
            pool.submit(order.job(f"{who.process}{who.session.decode()}"), who)
    assert pool.waiting == 12
    gate.go.set()
    assert eventually(lambda: len(order.begun) == 12)
    # uid:2 has every second turn while it waits, b every second one of the others.
    assert order.begun[:8] == ["a1", "c", "b", "c", "a2", "c", "b", "a1"]
    pool.close()


def test_the_line_is_bounded_and_half_of_it_is_for_others(starter: Starter) -> None:
    pool, work = Threads("t", starter, least=1, most=1, waiting=8), Work()
    pool.submit(work.job("gate"), client("gate"))
    for _ in range(4):
        pool.submit(work.job("a"), client("a"))
    with pytest.raises(ResourceExhaustedError) as error:
        pool.submit(work.job("a"), client("a"))
    assert (error.value.rule, error.value.field, error.value.value) == ("quota", "t_calls_waiting", "8")
    assert error.value.retry_after_s
    pool.submit(work.job("b"), client("b"))
    work.go.set()
    assert eventually(lambda: work.begun == ["gate", "a", "b", "a", "a", "a"])
    pool.close()


def test_an_eighth_of_the_line_is_for_other_principals(starter: Starter) -> None:
    pool, work = Threads("t", starter, least=1, most=1, waiting=64), Work()
    pool.submit(work.job("gate"), client("gate"))
    for process in "abcdefgh":
        with contextlib.suppress(ResourceExhaustedError):
            while True:
                pool.submit(work.job(process), client(process))
    assert pool.waiting == 56
    pool.submit(work.job("z"), client("z", principal="uid:2"))
    work.go.set()
    assert eventually(lambda: len(work.begun) == 58)
    pool.close()


def test_threads_that_idle_end(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.05)
    pool, work = Threads("t", starter, least=2, most=12), Work()
    for number in range(12):
        pool.submit(work.job("x"), client(str(number)))
    assert eventually(lambda: len(work.begun) >= 10)
    assert len(pool) >= 10
    work.go.set()
    assert eventually(lambda: len(pool) == 2)
    pool.submit(work.job("y"), client("a"))
    assert eventually(lambda: "y" in work.begun)
    pool.close()


def test_a_refused_thread_leaves_what_waits_to_the_others(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "REFUSED_S", 0.05)
    pool, work = Threads("t", starter, least=2, most=12), Work()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as refusing:
        refusing.setattr(threading.Thread, "start", refuse)
        for _ in range(6):
            pool.submit(work.job("a"), client("a"))
        # Of the two threads that there are, one is left to others.
        assert eventually(lambda: pool._capacity == 2)
        assert work.begun == ["a"] * len(work.begun) and len(work.begun) <= 2
        work.go.set()
        assert eventually(lambda: len(work.begun) == 6)
    pool.submit(work.job("b"), client("b"))
    assert eventually(lambda: "b" in work.begun)
    pool.close()


def test_nothing_is_taken_after_the_end(starter: Starter) -> None:
    pool = Threads("t", starter, least=2, most=2)
    pool.close()
    assert len(pool) == 0
    with pytest.raises(UnavailableError):
        pool.submit(lambda: None, client("a"))


def test_a_job_that_fails_concerns_no_other(starter: Starter) -> None:
    pool, work = Threads("t", starter, least=1, most=1), Work()
    work.go.set()
    pool.submit(lambda: 1 / 0, client("a"))  # type: ignore[arg-type, return-value]
    pool.submit(work.job("b"), client("b"))
    assert eventually(lambda: work.begun == ["b"])
    pool.close()
