"""Prepared plans, bound plans and streams."""

import gc

import numpy as np
import pytest
from client_helpers import close, objects, random

import tilewright as tw


def plan_count(client: tw.Client) -> int:
    """How often the server was asked to plan."""
    operations = {item["name"]: item for item in client.kernels.statistics()["operations"]}
    gemm = operations.get("gemm", {"plan_hits": 0, "plan_misses": 0})
    return operations.get("plan", {"success": 0})["success"] + gemm["plan_hits"] + gemm["plan_misses"]


def test_a_plan_plans_once(client: tw.Client) -> None:
    a, b, c = client.asarray(random(8, 4)), client.asarray(random(4, 6)), client.empty((8, 6))
    plan = client.plan_gemm(((8, 4), "fp32"), ((4, 6), "fp32"))
    before = plan_count(client)
    for _ in range(3):
        assert plan(a, b, out=c) is c
        close(c, a @ b)
        close(plan(a=a, b=b), a @ b)
        close(plan(np.array(a), b=b), a @ b)
    assert plan_count(client) == before
    assert list(plan.inputs) == ["a", "b"]
    assert plan.outputs["out"].shape == (8, 6)


def test_a_plan_takes_other_strides_and_refuses_other_shapes(client: tw.Client) -> None:
    a, b = client.asarray(random(8, 8)), client.asarray(random(8, 8))
    plan = client.plan_gemm(a, b)
    close(plan(a.T, b), a.T @ b)
    close(plan(a, b, out=client.empty((8, 8)).T), a @ b)
    for bad in (random(8, 4), random(8, 8).astype(np.float16)):
        with pytest.raises(tw.InvalidArgumentError, match="plan was made for"):
            plan(bad, b)
    for arguments in ((a,), (a, b, a)):
        with pytest.raises(tw.InvalidArgumentError, match="the plan takes a, b"):
            plan(*arguments)
    with pytest.raises(tw.InvalidArgumentError, match="twice"):
        plan(a, b, a=a)
    frozen = client.empty((8, 8))
    plan(a, b, out=frozen)
    frozen.flags.writeable = False
    with pytest.raises(tw.InvalidArgumentError, match="read-only"):
        plan(a, b, out=frozen)


def test_reshaping_an_array_in_place_is_noticed(client: tw.Client) -> None:
    a = client.asarray(random(4, 4))
    plan = client.plan_gemm(a, a)
    plan(a, a)
    other = a.reshape(2, 8)
    with pytest.raises(tw.InvalidArgumentError):
        plan(other, a)


def test_many_executions_in_one_message(client: tw.Client) -> None:
    a, b = client.asarray(random(8, 8)), client.asarray(random(8, 8))
    outs = [client.zeros((8, 8)) for _ in range(64)]
    plan = client.plan_gemm(a, b)
    results = plan.run_many([(a, b, out) for out in outs])
    assert all(result is out for result, out in zip(results, outs, strict=True))
    for out in outs:
        close(out, a @ b)
    bound = plan.bind(a, b, out=outs[0])
    results = plan.run_many([bound, (a, b), {"a": a, "b": b}, (np.array(a), b)])
    for result in results:
        close(result, a @ b)
    assert plan.run_many([]) == []


def test_bound_plans_write_to_the_same_array(client: tw.Client) -> None:
    a, out = client.asarray(random(8, 8)), client.empty((8, 8))
    bound = client.plan_gemm(a, a).bind(a, a, out=out)
    assert bound() is out
    a *= 2
    close(bound(), a @ a, 1e-3)
    assert client.report is not None
    assert client.report.bytes_copied == 0


def test_streams_answer_in_order_and_travel_together(fake_client: tw.Client) -> None:
    a = fake_client.zeros((4, 4))
    a[...] = np.eye(4)
    plan = fake_client.plan_gemm(a, a)
    inputs = [fake_client.zeros((4, 4)) for _ in range(300)]
    order: list[int] = []
    with plan.stream() as stream:
        futures = []
        for number, value in enumerate(inputs):
            value[...] = number
            future = stream.submit(a, value)
            future.add_done_callback(lambda _, number=number: order.append(number))
            futures.append(future)
        for number, future in enumerate(futures):
            assert (future.result(timeout=10) == number).all()
        stream.drain()
        operations = fake_client.kernels.statistics()["operations"]
        messages = {item["name"]: item["success"] for item in operations}["stream_messages"]
    assert order == sorted(order)
    assert messages < 300
    with pytest.raises(tw.UnavailableError):
        stream.submit(a, a)


def test_a_failed_execution_fails_alone(fake_client: tw.Client) -> None:
    good = fake_client.plan_gemm(((2, 2), "fp32"), ((2, 2), "fp32"))
    bad = fake_client.plan("fail", {}, attributes={"code": "invalid_argument"})
    a = fake_client.zeros((2, 2))
    with bad.stream() as stream:
        futures = [stream.submit() for _ in range(3)]
        assert all(isinstance(future.exception(timeout=10), tw.InvalidArgumentError) for future in futures)
        fine = stream.submit(good.bind(a, a, out=fake_client.zeros((2, 2))))
        assert fine.result(timeout=10).sum() == 0
    with pytest.raises(tw.InvalidArgumentError, match="asked to fail"):
        bad()


@pytest.mark.extended
def test_plans_are_released_when_they_go(client: tw.Client) -> None:
    a = client.zeros((2, 2))
    plan = client.plan_gemm(a, a)
    assert objects(client)[2] == 1
    del plan
    gc.collect()
    assert objects(client)[2] == 0
    with client.plan_gemm(a, a) as plan:
        plan(a, a)
    with pytest.raises(tw.InvalidArgumentError, match="closed"):
        plan(a, a)
    assert objects(client)[2] == 0


@pytest.mark.parametrize("repeat", [0, -1, 1_000_001, 2**40, 1.5, "twice"])
def test_impossible_repeats_are_refused(client: tw.Client, repeat: object) -> None:
    a = client.zeros((2, 2))
    plan = client.plan_gemm(a, a)
    with pytest.raises(tw.InvalidArgumentError) as caught:
        plan(a, a, repeat=repeat)  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.rule) == ("repeat", "repeat_limit")
    assert caught.value.fix


def test_more_than_a_message_holds_travels_in_several(client: tw.Client) -> None:
    a = random(120, 120)
    plan = client.plan_gemm(a, a)
    wanted = a @ a
    for result in plan.run_many([(a, a)] * 400):  # 46 MB
        close(result, wanted, 1e-3)
    small = client.asarray(random(2, 2))
    plan = client.plan_gemm(small, small)
    assert len(plan.run_many([(small, small)] * 4100)) == 4100


def test_replies_that_a_message_does_not_hold_come_in_several(tcp_server) -> None:
    with tw.connect(tcp_server.target) as client:
        a = random(400, 1)
        plan = client.plan_gemm(a, a.T)
        with plan.stream() as stream:
            futures = [stream.submit(a, a.T) for _ in range(60)]  # 38 MB of replies
            results = [future.result(30) for future in futures]
        for result in (*results, *plan.run_many([(a, a.T)] * 60)):
            close(result, a @ a.T)
