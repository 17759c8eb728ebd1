"""Prepared plans, bindings and pipelines that this process launches."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import tilewright as tw


@pytest.fixture
def pair(rng: np.random.Generator) -> tuple[Any, Any]:
    return rng.standard_normal((23, 37)).astype(np.float32), rng.standard_normal((37, 19)).astype(np.float32)


def close(result: Any, wanted: Any) -> None:
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


def test_a_plan_takes_operands_in_order_and_by_name(caller: tw.Client, pair: Any) -> None:
    a, b = pair
    bias = a[0, :19].copy()
    plan = caller.plan_gemm(a, b, bias=bias)
    out = np.empty((23, 19), np.float32)
    for result in (plan(a, b, bias), plan(a, b, bias=bias), plan(b=b, a=a, bias=bias), plan(a, b, bias, out=out)):
        close(result, a @ b + bias)
    assert plan(a, b, bias, out={"out": out}) is out
    assert caller.report is not None
    assert caller.report.placement == "caller"


def test_a_plan_runs_as_often_as_it_is_told(caller: tw.Client, pair: Any) -> None:
    a, b = pair
    plan = caller.plan_gemm(a, b)
    close(plan(a, b, repeat=5), a @ b)
    assert caller.report is not None
    assert caller.report.placement == "caller"
    with pytest.raises(tw.InvalidArgumentError, match="repeated"):
        plan(a, b, repeat=0)


def test_a_bound_plan_reads_its_arrays_at_every_launch(caller: tw.Client, pair: Any) -> None:
    a, b = (item.copy() for item in pair)
    bound = caller.plan_gemm(a, b).bind(a, b)
    for factor in (1, 2, 3):
        a[...] = factor * pair[0]
        bound.out[...] = np.nan
        assert bound() is bound.out
        close(bound.out, factor * pair[0] @ b)
        bound.out[...] = np.nan
        launch = bound.launch()
        assert launch.done
        close(launch.synchronize(), factor * pair[0] @ b)


def test_a_binding_outlives_its_plan_object_and_its_arrays_names(caller: tw.Client, pair: Any) -> None:
    a, b = pair
    bound = caller.plan_gemm(a, b).bind(a.copy(), b.copy())
    junk = [np.full((23, 37), 7, np.float32) for _ in range(50)]
    bound.out[...] = np.nan
    close(bound(), a @ b)
    assert len(junk) == 50


def test_many_calls_of_all_kinds_keep_their_order(auto: tw.Client, pair: Any) -> None:
    a, b = pair
    plan = auto.plan_gemm(a, b)
    bound = plan.bind(a, b)
    shared = auto.asarray(a)
    results = plan.run_many([(a, b), {"a": shared, "b": b}, bound, (np.ascontiguousarray(a.T).T, b)])
    assert results[2] is bound.out
    for result in results:
        close(result, a @ b)
    with pytest.raises(tw.InvalidArgumentError):
        plan.run_many([(a, b), (a, b[:3]), bound])


def test_a_pipeline_mixes_launches_of_both_processes_in_order(auto: tw.Client, rng: np.random.Generator) -> None:
    matrices = [auto.asarray(rng.standard_normal((16, 16)).astype(np.float32)) for _ in range(9)]
    here, there = auto.plan_gemm(*matrices[:2]), auto.plan_gemm(*matrices[:2], launch="server")
    value, wanted, chain = matrices[0], matrices[0].astype(np.float64), []
    for index, matrix in enumerate(matrices[1:]):
        target = auto.empty((16, 16))
        chain.append((here if index % 3 else there).bind(value, matrix, out=target))
        wanted, value = wanted @ matrix, target
    for _ in range(3):
        value[...] = np.nan
        with auto.pipeline() as pipeline:
            for bound in chain:
                pipeline.launch(bound)
        assert pipeline.launches == len(chain)
        np.testing.assert_allclose(value, wanted, rtol=1e-3, atol=1e-2)


def test_a_stream_takes_a_plan_that_is_bound_here(auto: tw.Client, pair: Any) -> None:
    a, b = pair
    plan = auto.plan_gemm(a, b)
    bound = plan.bind(a, b)
    bound.out[...] = np.nan
    with plan.stream() as stream:
        close(stream.submit(bound).result(30), a @ b)
        close(stream.submit(a, b).result(30), a @ b)
    close(bound.out, a @ b)


def test_threads_launch_at_the_same_time(caller: tw.Client, rng: np.random.Generator) -> None:
    plan_of: dict[int, Any] = {}
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            own = np.random.default_rng(index)
            a, b = own.standard_normal((31, 45)).astype(np.float32), own.standard_normal((45, 27)).astype(np.float32)
            wanted = a.astype(float) @ b
            plan = plan_of.setdefault(index % 3, caller.plan_gemm(a, b))
            bound = plan.bind(a, b)
            for _ in range(60):
                close(caller.gemm(a, b), wanted)
                close(plan(a, b), wanted)
                bound.out[...] = np.nan
                close(bound(), wanted)
                assert caller.report is not None
                assert caller.report.placement == "caller"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures[0]
    assert not any(thread.is_alive() for thread in threads)


def test_closed_plans_and_clients_launch_nothing(real_server, pair: Any) -> None:
    a, b = pair
    client = tw.connect(real_server.target, launch="caller")
    plan, closed = client.plan_gemm(a, b), client.plan_gemm(a, b)
    bound, other = plan.bind(a, b), closed.bind(a, b)
    client.gemm(a, b)
    closed.close()
    for call in (lambda: closed(a, b), other, lambda: closed.bind(a, b)):
        with pytest.raises(tw.InvalidArgumentError) as caught:
            call()
        assert caught.value.rule == "plan_open"
    client.close()
    for call in (lambda: client.gemm(a, b), lambda: plan(a, b), bound, lambda: plan.bind(a, b)):
        with pytest.raises(tw.UnavailableError, match="closed"):
            call()
