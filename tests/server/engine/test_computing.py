"""Turns at computing in the server: one caller plans, judges or generates at a time, and clients take turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from engine_harness import call, plan
from vector_operation import SETS, VectorOperation, request

from tilewright_kit.types.errors import DeadlineError, InvalidArgumentError
from tilewright_proto.v1.kernels_pb2 import BuildRequest
from tilewright_server.clients.client import Client
from tilewright_server.endpoints.rpc.services.kernels import MAX_BUILDS, KernelsServicer
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.types import Selection

FLOOD = Client("uid:1", "pid:1@1", b"a")
OTHER = Client("uid:1", "pid:2@1", b"b")
WAIT_S = 60.0


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.002)
    return condition()


def planned(engine: Engine, n: int, client: Client) -> None:
    engine.plan(request(n), Selection(), Call.within(WAIT_S, client=client))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


@contextmanager
def held_turn(engine: Engine, threads: ThreadPoolExecutor) -> Iterator[None]:
    """Somebody of the flood computes inside."""
    has, over = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.computing.turn(Call(client=FLOOD)):
            has.set()
            assert over.wait(WAIT_S)

    holder = threads.submit(hold)
    assert has.wait(WAIT_S)
    try:
        yield
    finally:
        over.set()
        holder.result()


def test_of_many_callers_with_new_problems_one_computes_at_a_time(
    engine: Engine, operation: VectorOperation, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(engine, 10)
    at_work, most = [0], [0]
    lock, candidates, make = threading.Lock(), operation.candidates, operation.plan

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            with lock:
                at_work[0] += 1
                most[0] = max(most[0], at_work[0])
            time.sleep(0.002)  # the lock of the interpreter is free meanwhile
            with lock:
                at_work[0] -= 1
            return work(*arguments)

        return counting

    monkeypatch.setattr(operation, "candidates", counted(candidates))
    monkeypatch.setattr(operation, "plan", counted(make))
    for done in [threads.submit(planned, engine, 100 + n, FLOOD) for n in range(16)]:
        done.result()
    assert most == [1]


def test_a_client_that_plans_is_next_beside_another_that_plans_much(
    engine: Engine, operation: VectorOperation, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(engine, 10)
    order: list[int] = []
    candidates = operation.candidates

    def noted(problem: Any, device: Any) -> Any:
        order.append(problem.out.size)
        return candidates(problem, device)

    monkeypatch.setattr(operation, "candidates", noted)
    with held_turn(engine, threads):
        done = [threads.submit(planned, engine, 200 + n, FLOOD) for n in range(8)]
        assert eventually(lambda: engine.computing.waiting == 8)
        done.append(threads.submit(planned, engine, 300, OTHER))
        assert eventually(lambda: engine.computing.waiting == 9)
    for each in done:
        each.result()
    assert order.index(300) <= 1, order


def test_between_two_kernels_of_a_set_another_clients_plan_has_its_turn(
    engine: Engine, operation: VectorOperation, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(engine, 10)
    arch = engine.kernels.arch()
    configs = engine.kernels.select("vector", "default")
    order: list[str] = []
    key, candidates = engine.pool.key, operation.candidates
    others: list[Any] = []

    def made(*arguments: Any) -> str:
        if threading.current_thread() is builder:
            order.append("kernel")
            if not others:
                others.append(threads.submit(planned, engine, 400, OTHER))
                assert eventually(lambda: engine.computing.waiting == 1)
        return key(*arguments)

    def noted(*arguments: Any) -> Any:
        order.append("other")
        return candidates(*arguments)

    monkeypatch.setattr(engine.pool, "key", made)
    monkeypatch.setattr(operation, "candidates", noted)
    work = Call.within(WAIT_S, client=FLOOD)
    builder = threading.Thread(target=lambda: engine.build(configs, arch, lambda _: None, work))
    builder.start()
    builder.join()
    others[0].result()
    assert len(configs) == 4
    assert order[:2] == ["kernel", "other"], order


def test_a_set_that_is_looked_through_for_the_first_time_leaves_pauses(engine: Engine) -> None:
    pauses: list[None] = []
    chosen = engine.kernels.select("vector", pause=lambda: pauses.append(None))
    assert len(pauses) >= len(chosen) > len(SETS)
    del pauses[:]
    assert engine.kernels.select("vector", pause=lambda: pauses.append(None)) == chosen
    assert not pauses, "it is remembered"


def test_kernels_that_are_asked_for_by_name_are_looked_up_with_pauses_and_are_counted_first(engine: Engine) -> None:
    wanted = KernelsServicer(SimpleNamespace(engine=engine))._wanted  # type: ignore[arg-type]
    names = [config.name for config in engine.kernels.select("vector")]
    pauses: list[None] = []
    found = wanted(BuildRequest(operation="vector", names=names), lambda: pauses.append(None))
    assert [config.name for config in found] == names
    assert len(pauses) >= len(names)
    with pytest.raises(InvalidArgumentError, match="too many"):
        wanted(BuildRequest(operation="vector", names=["unknown"] * (MAX_BUILDS + 1)), lambda: None)


def test_whoever_waits_for_too_long_is_told_so_and_nothing_is_remembered_against_the_request(
    engine: Engine, threads: ThreadPoolExecutor
) -> None:
    plan(engine, 10)
    with held_turn(engine, threads), pytest.raises(DeadlineError):
        engine.plan(request(500), Selection(), Call.within(0.05, client=OTHER))
    assert engine.plan(request(500), Selection(), call()).plan.stages
