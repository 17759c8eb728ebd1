"""Kernels of busy problems are timed beside live work within a budget, and the fastest is taken."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import vector_operation
from engine_harness import BEST, Vectors, plan
from vector_operation import VectorConfig, request

from tilewright_server.clients.client import Priority
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.measurements.database import PerfDatabase
from tilewright_server.engine.types import Selection
from tilewright_server.hosting.confirmation.budget import Budget
from tilewright_server.hosting.confirmation.confirmation import LEAST, RIVALS, Confirmation
from tilewright_server.hosting.confirmation.hot_problems import HotProblem, HotProblems
from tilewright_server.hosting.confirmation.trials import LEAST_LAUNCHES

N = 200_000
GENERATE = vector_operation.VectorOperation.generate
LOOP = "for (int64_t i = edge(a, team->rank"
WAIT = "for (volatile int wait = 0; wait < 2000000; wait = wait + 1) {}\n  "


def changed_source(rank: int, change: Callable[[str], str]) -> Any:
    """``generate`` whose kernel of that rank is another."""

    def generate(self: Any, config: VectorConfig, arch: Any) -> Any:
        unit = GENERATE(self, config, arch)
        if config.rank == rank:
            unit = replace(unit, text=change(unit.text))
        return unit

    return generate


@pytest.fixture
def made(make_engine: Any, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Engine, PerfDatabase]:
    """An engine whose favourite kernel is slow, and its database."""
    database = tmp_path / "perf.sqlite"
    return make_engine(cache_dir=tmp_path / "cache", perf_database=database), PerfDatabase(database)


def slow_favourite(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = changed_source(1, lambda text: text.replace(LOOP, WAIT + LOOP, 1))
    monkeypatch.setattr(vector_operation.VectorOperation, "generate", slower)


def hot(engine: Engine) -> HotProblem:
    prepared = plan(engine, N)
    return HotProblem(request(N), Selection(), prepared.device.id, prepared.kernel_counters)


def confirmation(engine: Engine, database: PerfDatabase, budget: Budget | None = None) -> Confirmation:
    return Confirmation(engine, database, budget or Budget(0.5, 60), lambda: None)


def test_the_fastest_kernel_takes_the_place_of_the_favourite(
    made: tuple[Engine, PerfDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_favourite(monkeypatch)
    engine, database = made
    problem = hot(engine)
    assert plan(engine, N).kernels == (BEST,)
    confirming = confirmation(engine, database)
    assert confirming.confirm(problem)
    rows = database.select()
    assert len(rows) == RIVALS >= LEAST
    assert len({row.kernel for row in rows}) == RIVALS
    assert all(row.samples > 1 and row.p10_ns <= row.median_ns <= row.p90_ns for row in rows)
    fastest = min(rows, key=lambda row: row.median_ns).kernel
    assert fastest != BEST
    assert not engine.remeasured()  # whoever measures may go on
    assert engine.remeasured()
    chosen = plan(engine, N)
    assert chosen.kernels == (fastest,)
    vectors = Vectors(N)
    engine.execute(chosen, vectors.addresses, Call())
    assert vectors.right()
    assert not confirming.confirm(problem), "it is measured"


def test_a_kernel_of_another_result_is_not_taken(
    made: tuple[Engine, PerfDatabase], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = changed_source(2, lambda text: text.replace("a->x[i] + ", "1.01f * a->x[i] + "))
    monkeypatch.setattr(vector_operation.VectorOperation, "generate", wrong)
    engine, database = made
    confirming = confirmation(engine, database)
    with caplog.at_level(logging.ERROR):
        assert not confirming.confirm(hot(engine))
    assert VectorConfig(rank=2).name in caplog.text
    assert len(database) == 0


def test_a_choice_that_stands_is_not_recorded_and_not_tried_again(
    made: tuple[Engine, PerfDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(self: Any, config: VectorConfig, arch: Any) -> Any:
        unit = GENERATE(self, config, arch)
        return unit if config.rank == 1 else replace(unit, text=unit.text.replace(LOOP, WAIT + LOOP))

    monkeypatch.setattr(vector_operation.VectorOperation, "generate", generate)
    engine, database = made
    confirming, problem = confirmation(engine, database), hot(engine)
    assert confirming.confirm(problem)
    assert len(database) == 0
    assert not confirming.confirm(problem)
    assert plan(engine, N).kernels == (BEST,)


def test_it_computes_and_compiles_behind_everybody_else(
    made: tuple[Engine, PerfDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, database = made
    problem = hot(engine)
    urgencies, submit = [], engine.pool.submit

    def noted(*args: Any, **kwargs: Any) -> Any:
        urgencies.append(int(kwargs["client"].priority))
        return submit(*args, **kwargs)

    monkeypatch.setattr(engine.pool, "submit", noted)
    classes = engine.statistics.operation("vector").classes
    before = [item.success for item in classes]
    assert confirmation(engine, database).confirm(problem)
    after = [item.success for item in classes]
    assert after[Priority.BACKGROUND] > before[Priority.BACKGROUND]
    assert after[: Priority.BACKGROUND] == before[: Priority.BACKGROUND]
    assert urgencies and set(urgencies) == {Priority.BACKGROUND}


def test_no_more_kernels_are_compiled_than_allowed(made: tuple[Engine, PerfDatabase]) -> None:
    engine, database = made
    problem = hot(engine)
    built = engine.pool.built
    assert not confirmation(engine, database, Budget(0.5, 1)).confirm(problem)
    assert engine.pool.built == built + 1
    assert len(database) == 0


def test_its_launches_stay_within_the_share(made: tuple[Engine, PerfDatabase], monkeypatch: pytest.MonkeyPatch) -> None:
    slow_favourite(monkeypatch)
    engine, database = made
    problem = hot(engine)
    begun = time.monotonic()
    budget = Budget(0.05, 60)
    assert confirmation(engine, database, budget).confirm(problem)
    last = max(row.p90_ns for row in database.select()) / 1e9
    assert 0 < budget.spent_s <= 0.05 * (time.monotonic() - begun) + 10 * last + 0.05


def test_time_is_paid_back_before_more_is_taken() -> None:
    step, share, now = 0.002, 0.5, [0.0]

    def clock() -> float:
        now[0] += step
        return now[0]

    budget = Budget(share, 1, clock)
    assert budget.wait()
    begun = now[0]
    budget.spend(0.01)
    assert budget.wait()
    assert share * (now[0] - begun) >= 0.01 - share * 2 * step
    budget.spend(1000.0)
    budget.end()
    assert not budget.wait()


def test_what_runs_often_is_found_and_what_the_caller_chose_is_not(made: tuple[Engine, PerfDatabase]) -> None:
    engine, _ = made
    problems, vectors = HotProblems(), Vectors(N)
    prepared = plan(engine, N)
    problems.note(request(N), Selection(), prepared)
    problems.note(request(N), Selection(), prepared)
    explicit = engine.plan(request(N + 1), Selection(kernel=BEST), Call())
    problems.note(request(N + 1), Selection(kernel=BEST), explicit)
    empty = plan(engine, 0)
    problems.note(request(0), Selection(), empty)
    assert problems.hottest(1.0, 1e-9) == []  # nothing is known of the time before
    assert problems.hottest(1.0, 1e-9) == []
    for _ in range(3):
        engine.execute(prepared, vectors.addresses, Call())
    (found,) = problems.hottest(1.0, 1e-9)
    assert found.request == request(N)
    assert found.share > 0
    assert problems.hottest(1.0, 1e-9) == []


def test_the_thread_finds_busy_problems_by_itself_and_ends_at_once(
    made: tuple[Engine, PerfDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_favourite(monkeypatch)
    engine, database = made
    changed, over = threading.Event(), threading.Event()
    confirming = Confirmation(engine, database, Budget(0.5, 60), changed.set, interval_s=0.05)
    prepared, vectors = plan(engine, N), Vectors(N)
    confirming.problems.note(request(N), Selection(), prepared)

    def work() -> None:
        while not over.wait(0.001):
            engine.execute(prepared, vectors.addresses, Call())

    worker = threading.Thread(target=work)
    worker.start()
    confirming.start()
    try:
        deadline = time.monotonic() + 60
        while not confirming.confirmed and time.monotonic() < deadline:
            time.sleep(0.01)
        assert confirming.confirmed == 1
        assert changed.wait(10)
    finally:
        over.set()
        worker.join()
        confirming.close()
    assert len(database) == RIVALS
    assert vectors.right()


def traffic(engine: Engine, problems: HotProblems, launches: int) -> None:
    vectors = Vectors(N)
    for _ in range(launches):
        prepared = plan(engine, N)
        problems.note(request(N), Selection(), prepared)
        engine.execute(prepared, vectors.addresses, Call())
    problems.hottest(1.0, 0.0)


def promoted(engine: Engine, database: PerfDatabase) -> tuple[Confirmation, str]:
    """A confirmation after traffic, whose winner has its place."""
    confirming = confirmation(engine, database)
    traffic(engine, confirming.problems, LEAST_LAUNCHES + 1)
    (problem,) = confirming.problems.hottest(1.0, 0.0)
    assert confirming.confirm(problem)
    fastest = min(database.select(), key=lambda row: row.median_ns).kernel
    engine.remeasured()
    assert engine.remeasured()
    assert plan(engine, N).kernels == (fastest,)
    return confirming, fastest


def test_a_kernel_that_is_slower_in_traffic_loses_its_place(
    made: tuple[Engine, PerfDatabase], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is fast until traffic uses it: where a file is, its loop waits."""
    engine, database = made
    flag = database.path.with_name("busy")
    slow_favourite(monkeypatch)
    favourite = vector_operation.VectorOperation.generate
    waits = f'if (access("{flag}", 0) == 0) for (volatile int w = 0; w < 30000000; w = w + 1) {{}}\n  '

    def generate(self: Any, config: VectorConfig, arch: Any) -> Any:
        unit = favourite(self, config, arch)
        if config.rank == 1:
            return unit
        declared = 'extern "C" int access(const char *, int);\n'
        return replace(unit, text=declared + unit.text.replace(LOOP, waits + LOOP, 1))

    monkeypatch.setattr(vector_operation.VectorOperation, "generate", generate)
    confirming, fastest = promoted(engine, database)
    traffic(engine, confirming.problems, 1)
    confirming.judge()
    flag.touch()
    traffic(engine, confirming.problems, LEAST_LAUNCHES)
    with caplog.at_level(logging.WARNING):
        confirming.judge()
    assert confirming.demoted == 1
    assert f"demoted {fastest}" in caplog.text
    assert len(database) == 0
    engine.remeasured()
    assert engine.remeasured()
    assert plan(engine, N).kernels == (BEST,)
    (problem,) = confirming.problems.hottest(1.0, 0.0)
    assert not confirming.confirm(problem), "it is not tried again"


def test_a_kernel_that_is_as_fast_in_traffic_keeps_its_place(
    made: tuple[Engine, PerfDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_favourite(monkeypatch)
    engine, database = made
    confirming, fastest = promoted(engine, database)
    traffic(engine, confirming.problems, 1)
    confirming.judge()  # from here on its traffic counts
    traffic(engine, confirming.problems, LEAST_LAUNCHES)
    confirming.judge()
    confirming.judge()
    assert confirming.demoted == 0
    assert len(database) == RIVALS
    assert plan(engine, N).kernels == (fastest,)


def test_counters_that_several_problems_share_demote_nobody(made: tuple[Engine, PerfDatabase]) -> None:
    engine, _ = made
    problems = HotProblems()
    for n in (N, N + 1):
        problems.note(request(n), Selection(), plan(engine, n))
    assert not any(problems.is_alone(problem) for problem in problems.hottest(1.0, 0.0))
    alone = HotProblems()
    alone.note(request(N), Selection(), plan(engine, N))
    assert all(alone.is_alone(problem) for problem in alone.hottest(1.0, 0.0))
