"""Where calls are launched, and what is said where they cannot be."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

import tilewright as tw

A = np.arange(30, dtype=np.float32).reshape(5, 6)
B = np.arange(42, dtype=np.float32).reshape(6, 7)


def placement(client: tw.Client) -> str:
    assert client.report is not None
    return client.report.placement


def test_arrays_of_this_process_are_launched_on_here_and_not_copied(auto: tw.Client) -> None:
    for _ in range(3):
        result = auto.gemm(A, B)
        assert (result == A @ B).all()
        report = auto.report
        assert report is not None
        assert report.placement == "caller"
        assert report.device == "cpu:0"
        assert report.kernels
        assert report.timing.device_ns > 0
        assert report.bytes_copied == report.staged_bytes == 0
        assert auto._subject.pool.find(result.__array_interface__["data"][0], 1) is None


def test_the_first_report_says_how_planning_went(auto: tw.Client) -> None:
    auto.gemm(A, B)
    assert auto.report is not None
    assert auto.report.timing.plan_ns > 0
    auto.gemm(A, B)
    assert auto.report.timing.plan_ns == 0


def test_calls_and_plans_say_who_launches(auto: tw.Client, apart: tw.Client) -> None:
    auto.gemm(A, B, launch="server")
    assert placement(auto) == "server"
    auto.gemm(A, B)
    assert placement(auto) == "caller"
    apart.gemm(A, B)
    assert placement(apart) == "server"
    apart.gemm(A, B, launch="caller")
    assert placement(apart) == "caller"
    apart.plan_gemm(A, B, launch="auto")(A, B)
    assert placement(apart) == "caller"
    auto.plan_gemm(A, B, launch="server")(A, B)
    assert placement(auto) == "server"
    apart.run("gemm", {"a": A, "b": B}, launch="caller")
    assert placement(apart) == "caller"


@pytest.mark.parametrize("word", ["here", "", None, 3, True])
def test_other_words_are_refused(auto: tw.Client, real_server, word: Any) -> None:
    if word is not None:
        with pytest.raises(tw.InvalidArgumentError) as caught:
            auto.gemm(A, B, launch=word)
        assert (caught.value.field, caught.value.rule) == ("launch", "launch_placement")
    with pytest.raises(tw.InvalidArgumentError) as caught:
        tw.connect(real_server.target, launch=word)
    assert caught.value.rule == "launch_placement"


@pytest.mark.extended
def test_an_operator_can_forbid_it(forbidding: str) -> None:
    with tw.connect(forbidding) as client:
        for _ in range(2):
            assert (client.gemm(A, B) == A @ B).all()
            assert placement(client) == "server"
        plan = client.plan_gemm(A, B)
        assert (plan(A, B) == A @ B).all()
        assert placement(client) == "server"
        for call in (lambda: client.gemm(A, B, launch="caller"), lambda: client.plan_gemm(A, B, launch="caller")):
            with pytest.raises(tw.AccessError) as caught:
                call()
            assert caught.value.rule == "caller_launch_forbidden"
            assert caught.value.fix


@pytest.mark.extended
def test_kernels_that_are_kept_apart_stay_there(isolating_server) -> None:
    with tw.connect(isolating_server.target) as client:
        assert (client.gemm(A, B) == A @ B).all()
        assert placement(client) == "server"
        with pytest.raises(tw.AccessError) as caught:
            client.gemm(A, B, launch="caller")
        assert caught.value.rule == "caller_launch_forbidden"


def test_operands_whose_values_count_are_launched_on_by_the_server(auto: tw.Client) -> None:
    q = np.ones((1, 2, 4, 16), np.float32)
    lengths = np.array([3], np.int32)
    for _ in range(2):
        auto.attention(q, q, q, seqlens_k=lengths)
        assert placement(auto) == "server"
    with pytest.raises(tw.UnsupportedError) as caught:
        auto.attention(q, q, q, seqlens_k=lengths, launch="caller")
    assert caught.value.rule == "caller_launch_values"
    lengths[0] = 40
    with pytest.raises(tw.InvalidArgumentError):
        auto.attention(q, q, q, seqlens_k=lengths)


def test_operands_that_the_server_keeps_are_launched_on_there(auto: tw.Client) -> None:
    packed = auto.pack_b(B)
    assert (auto.gemm(A, packed) == A @ B).all()
    assert placement(auto) == "server"
    with pytest.raises(tw.UnsupportedError) as caught:
        auto.gemm(A, packed, launch="caller")
    assert caught.value.rule == "caller_launch_operands"


def test_what_only_the_server_can_make_is_refused_here_and_made_there(auto: tw.Client) -> None:
    with pytest.raises(tw.UnsupportedError) as caught:
        auto.run("gemm_pack_b", {"b": B}, launch="caller")
    assert caught.value.rule == "launch_plan_limits"
    assert "packed format" in caught.value.message
    assert (auto.gemm(A, auto.pack_b(B)) == A @ B).all()


@pytest.mark.extended
def test_a_server_that_is_not_known_to_be_ours_is_not_given_this_process(remote_target: str) -> None:
    with tw.connect(remote_target) as client:
        assert not client.session.trusted
        assert (client.gemm(A, B) == A @ B).all()
        assert placement(client) == "server"
    with tw.connect(remote_target, launch="caller") as client:
        assert (client.gemm(A, B) == A @ B).all()
        assert placement(client) == "caller"


def test_an_overlap_is_for_the_server_to_look_at(auto: tw.Client) -> None:
    square = np.arange(64, dtype=np.float32).reshape(8, 8)
    for _ in range(2):
        left, right = square[:, :4].copy(), square[:4].copy()
        target = square.copy()
        wanted = target[:, :4] @ target[:4]
        auto.gemm(target[:, :4], target[:4], out=target)
        assert (target == wanted).all()
        assert (left @ right == wanted).all()
    with pytest.raises(tw.InvalidArgumentError) as caught:
        auto.gemm(square[:, :4], square[:4], out=square, launch="caller")
    assert (caught.value.rule, caught.value.field) == ("operand_overlap", "out")


def test_the_asyncio_client_launches_here_too(real_server) -> None:
    big = np.ones((300, 300), np.float32)

    async def main() -> None:
        async with tw.aio.connect(real_server.target, launch="caller") as client:
            for a, b in ((A, B), (A, B), (big, big), (big, big)):
                assert (await client.gemm(a, b) == a @ b).all()
                assert client.report is not None
                assert client.report.placement == "caller"
            plan = await client.plan_gemm(A, B)
            assert (await plan(A, B) == A @ B).all()
            bound = await plan.bind(A, B)
            bound.out[...] = 0
            assert (await bound() == A @ B).all()
            bound.out[...] = 0
            assert (await (await bound.launch()).synchronize() == A @ B).all()
            async with client.pipeline() as pipeline:
                await pipeline.launch(bound)
            assert (await plan.run_many([(A, B), bound]))[0].shape == (5, 7)

    asyncio.run(main())


@pytest.mark.extended
def test_a_refusal_holds_on_to_no_operand(forbidding: str) -> None:
    with tw.connect(forbidding) as client:
        operand = np.ones((8, 8), np.float32)
        gone = weakref.ref(operand)
        client.gemm(operand, operand)
        with pytest.raises(tw.AccessError):
            client.gemm(operand, operand, launch="caller")
        del operand
        gc.collect()
        assert gone() is None
