"""The engine: plans, executions, and what it tells of kernels."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_harness import BEST, TEAM, TWO_STAGES, Vectors, call, plan
from vector_operation import VectorConfig, VectorOperation, request

from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.types.errors import (
    CancelledError,
    DeadlineError,
    InvalidArgumentError,
    NotFoundError,
    TilewrightError,
    UnavailableError,
)
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import BuildEvent, Engine, Prepared
from tilewright_server.engine.types import EngineOptions, Outcome, Selection

# Planning


def test_plan_runs_the_best_ranked_kernel(engine: Engine) -> None:
    prepared = plan(engine, 1000, scale=2.5)
    assert prepared.kernels == (BEST,)
    assert [item.name for item in prepared.operands] == ["x", "y", "out"]
    vectors = Vectors(1000)
    outcome = engine.execute(prepared, vectors.addresses, call())
    assert vectors.right(2.5)
    assert outcome.device_ns > 0
    assert sum(outcome.stages_ns) == outcome.device_ns


def test_stages_share_their_workspace(engine: Engine) -> None:
    prepared = plan(engine, 1000, Selection(kernel=TWO_STAGES), scale=3.0)
    assert prepared.workspace_bytes == 4000
    vectors = Vectors(1000)
    outcome = engine.execute(prepared, vectors.addresses, call())
    assert vectors.right(3.0)
    assert len(outcome.stages_ns) == 2


def test_second_plan_does_no_planning(engine: Engine, operation: VectorOperation) -> None:
    first, again = call(), call()
    prepared = engine.plan(request(100), Selection(), first)
    before = dict(operation.calls)
    assert engine.plan(request(100), Selection(), again) is prepared
    assert dict(operation.calls) == before
    assert (first.plan_cached, again.plan_cached) == (False, True)
    assert again.build_ns == 0


def test_concurrent_misses_plan_once(engine: Engine, operation: VectorOperation) -> None:
    with ThreadPoolExecutor(16) as threads:
        plans = set(threads.map(lambda _: plan(engine, 77), range(64)))
    assert len(plans) == 1
    assert operation.calls["plan"] == 1
    assert engine.statistics.snapshot().plans == 1


def test_attributes_that_are_equal_to_python_may_differ_to_an_operation(engine: Engine) -> None:
    base = plan(engine, 5, scale=1.0)
    assert plan(engine, 5, scale=1) is base  # the same problem, found under its own signature
    assert plan(engine, 5, scale=2.0) is not base
    with pytest.raises(InvalidArgumentError):
        plan(engine, 5, scale=True)


def test_plan_cache_is_bounded(make_engine: Any) -> None:
    engine = make_engine(plan_cache=4)
    for n in range(1, 20):
        plan(engine, n)
    assert engine.statistics.snapshot().plans == 4


def test_empty_problem_returns_at_once(engine: Engine, operation: VectorOperation) -> None:
    prepared = plan(engine, 0)
    assert prepared.kernels == ()
    assert engine.execute(prepared, [0, 0, 0], call()) == Outcome()
    assert operation.calls["generate"] == 0
    assert not engine.devices.opened()


@pytest.mark.parametrize(
    ("changes", "selection", "kind", "hint"),
    [
        ({"operation": "vectr"}, Selection(), NotFoundError, "vector"),
        ({}, Selection(strategy="heuristics"), NotFoundError, "heuristic"),
        ({}, Selection(device="cpu:9"), NotFoundError, "cpu:0"),
        ({}, Selection(kernel="vector_1_1"), NotFoundError, BEST),
        ({}, Selection(strategy="explicit"), InvalidArgumentError, "name a kernel"),
    ],
)
def test_unknown_names_are_answered_with_close_ones(
    changes: dict[str, Any], selection: Selection, kind: type[TilewrightError], hint: str, engine: Engine
) -> None:
    wrong = OperationRequest(**{"operation": "vector", "inputs": request(3).inputs, **changes})
    for _ in range(2):  # the second time from memory
        with pytest.raises(kind) as caught:
            engine.plan(wrong, selection, call())
        assert hint in caught.value.fix


def test_refusals_are_remembered_for_a_moment(make_engine: Any) -> None:
    engine = make_engine(negative_ttl_s=3600)
    operation = engine.operations["vector"]
    wrong = OperationRequest("vector", {"x": TensorDesc.of("fp32", (3,))})
    for _ in range(5):
        with pytest.raises(InvalidArgumentError):
            engine.plan(wrong, Selection(), call())
    assert operation.calls["parse"] == 1
    forgetful = make_engine(negative_ttl_s=0.01)
    for parses in (1, 2):
        with pytest.raises(InvalidArgumentError):
            forgetful.plan(wrong, Selection(), call())
        assert forgetful.operations["vector"].calls["parse"] == parses
        time.sleep(0.02)


def test_build_reports_every_kernel(engine: Engine) -> None:
    configs = [VectorConfig(rank=5), VectorConfig(rank=9, broken=True), VectorConfig(rank=6)]
    events: list[BuildEvent] = []
    arch = engine.devices.info().arch
    results = engine.build(configs, arch, events.append, call())
    assert [result.error is None for result in results] == [True, False, True]
    ended = [event for event in events if event.state in ("built", "cached", "failed")]
    assert [event.done for event in ended] == [1, 2, 3]
    assert {event.total for event in events} == {3}
    again = engine.build(configs[:1], arch, events.append, call())
    assert again[0].cached
    assert engine.kernels.describe(configs[0], arch).built


# Running


def test_repeat_adds_up(engine: Engine) -> None:
    prepared = plan(engine)
    vectors = Vectors(100)
    engine.execute(prepared, vectors.addresses, call(), repeat=5)
    (kernel,) = engine.statistics.snapshot().kernels
    assert (kernel.name, kernel.launches) == (BEST, 5)


def test_batch_runs_all_but_the_bad_ones(engine: Engine) -> None:
    prepared, two, empty = plan(engine), plan(engine, 100, Selection(kernel=TWO_STAGES)), plan(engine, 0)
    good = [Vectors(100, seed) for seed in range(3)]
    executions: list[tuple[Prepared, list[int], int]] = [
        (prepared, good[0].addresses, 1),
        (prepared, [0, 0, 0], 1),
        (empty, [0, 0, 0], 1),
        (two, good[1].addresses, 2),
        (prepared, [1], 1),
        (prepared, good[2].addresses, 1),
    ]
    results = engine.execute_many(executions, call())
    assert [isinstance(item, Outcome) for item in results] == [True, False, True, True, False, True]
    assert all(vectors.right() for vectors in good)
    (counters,) = engine.statistics.snapshot().operations
    assert (counters.success, counters.failure) == (4, 2)


def test_batch_of_nothing_is_legal(engine: Engine) -> None:
    assert engine.execute_many([], call()) == []


@pytest.mark.parametrize("when", ["deadline", "cancelled"])
def test_late_execution_writes_nothing(when: str, engine: Engine) -> None:
    prepared, vectors = plan(engine), Vectors(100)
    late = Call.within(-1.0) if when == "deadline" else call()
    if when == "cancelled":
        late.cancel()
    with pytest.raises((DeadlineError, CancelledError)):
        engine.execute(prepared, vectors.addresses, late)
    with pytest.raises((DeadlineError, CancelledError)):
        engine.execute_many([(prepared, vectors.addresses, 1)], late)
    assert np.isnan(vectors.out).all()


def test_many_threads_get_right_results(engine: Engine) -> None:
    team = TEAM if engine.devices.info().units >= 2 else BEST
    plans = [plan(engine, 500, Selection(kernel=name)) for name in (BEST, TWO_STAGES, team)]

    def work(seed: int) -> bool:
        good = True
        for turn in range(30):
            vectors = Vectors(500, seed + turn)
            engine.execute(plans[turn % 3], vectors.addresses, call())
            good = good and vectors.right()
        return good

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))


def test_kernel_from_the_disk_is_not_built_again(make_engine: Any) -> None:
    plan(make_engine())
    waiting = call()
    make_engine().plan(request(100), Selection(), waiting)
    assert not waiting.plan_cached
    assert waiting.build_ns == 0


# Talking about kernels


def test_explanation_names_the_decision_and_is_json(engine: Engine) -> None:
    record = engine.explain(request(100), Selection(), call())
    json.dumps(record)
    assert record["chosen"].startswith(BEST)
    assert record["candidates"][0]["kernel"] == BEST
    assert not engine.devices.opened()


def test_catalog_lists_finds_and_shows(engine: Engine) -> None:
    plan(engine)
    rows, total = engine.kernels.list("vector", "default", pattern="vector_?_1_*")
    assert (total, len(rows)) == (3, 3)
    assert {row.name: row.built for row in rows}[BEST]
    page, total = engine.kernels.list("vector", limit=2, offset=3)
    assert (len(page), total) == (2, 6)
    detail = engine.kernels.detail("vector", BEST)
    assert "vector_1_1_main" in detail.source
    with pytest.raises(NotFoundError) as caught:
        engine.kernels.find("vector", "vector_1_1")
    assert BEST in caught.value.fix
    with pytest.raises(NotFoundError):
        engine.kernels.list(kernel_set="defalt")
    json.dumps(engine.kernels.export("vector"))
    assert engine.kernels.kernel_sets() == ["broken", "default", "registered", "teams"]


def test_a_kernel_is_found_by_its_name_without_the_sets_of_other_operations(tmp_path: Path) -> None:
    plugins = PluginManager(["cpu", "gemm", "fmha"])
    plugins.load_entry_points()
    engine, made = Engine(EngineOptions(cache_dir=tmp_path), plugins), []
    try:
        arch, products = engine.devices.info().arch, engine.operations["gemm"]
        first = next(iter(products.kernel_sets.values()))
        wanted = next(iter(first.iterate(arch, products.rules)))
        assert engine.kernels.find("", wanted.name, pause=lambda: made.append(1)) == wanted
    finally:
        engine.close()
    assert 0 < len(made) == len(list(first.iterate(arch, products.rules)))


def test_configuration_is_validated_and_corrected(engine: Engine) -> None:
    arch = engine.devices.info().arch.id
    config, violations = engine.validate("vector", {"team": 0}, arch)
    assert isinstance(config, VectorConfig)
    assert [item.rule for item in violations] == ["team_is_positive"]
    assert engine.correct("vector", {"team": 0}, arch).config == VectorConfig(team=1)
    with pytest.raises(InvalidArgumentError):
        engine.validate("vector", {"teem": 0}, arch)
    with pytest.raises(NotFoundError):
        engine.validate("vector", {}, "x86-64-v9")


# The end


def test_opening_an_engine_starts_nothing(make_engine: Any) -> None:
    before = set(threading.enumerate())
    engine = make_engine()
    assert set(threading.enumerate()) <= before
    assert not engine.devices.opened()


def test_draining_refuses_the_new_and_finishes_the_old(engine: Engine) -> None:
    prepared, vectors = plan(engine), Vectors(100)
    assert engine.drain(5.0)
    with pytest.raises(UnavailableError):
        engine.execute(prepared, vectors.addresses, call())
    with pytest.raises(UnavailableError):
        plan(engine, 3)
    with pytest.raises(UnavailableError):
        engine.execute_many([(prepared, vectors.addresses, 1)], call())


def test_closed_engine_has_let_go_of_everything(make_engine: Any) -> None:
    plan(make_engine())  # the cache is warm from here on

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before, threads = descriptors(), len(list(Path("/proc/self/task").iterdir()))
    for _ in range(5):
        engine = make_engine()
        vectors = Vectors(100)
        engine.execute(plan(engine, 100, Selection(kernel=TWO_STAGES)), vectors.addresses, call())
        engine.close()
        engine.close()
    assert descriptors() <= before
    assert len(list(Path("/proc/self/task").iterdir())) <= threads + 1
