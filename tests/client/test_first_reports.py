"""Reports of first calls: whether the plan was there, and what building took, on every way to the kernels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from client_helpers import random

import tilewright as tw

WAYS = ("in place", "local socket", "grpc")


@pytest.fixture(scope="module")
def targets(empty_server: Any) -> dict[str, str]:
    """The ways in of a server that has no kernels yet."""
    tcp = next(word for word in empty_server.ready.split() if word.startswith("127.0.0.1:"))
    return {"in place": empty_server.target, "local socket": empty_server.target, "grpc": tcp}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, targets: dict[str, str]) -> Iterator[tuple[tw.Client, int]]:
    """A client on one of the ways, and a number of its own: no two ask for the same kernels."""
    placement: Any = "auto" if request.param == "in place" else "server"
    with tw.connect(targets[request.param], launch=placement) as opened:
        yield opened, WAYS.index(request.param)


def built(client: tw.Client) -> tuple[bool, bool]:
    """Two facts of the last call: its plan was there, and something was built for it."""
    report = client.report
    assert report is not None and report.kernels and report.timing.device_ns > 0
    return report.plan_cached, report.timing.build_ns > 0


def check(client: tw.Client, call: Callable[[], Any]) -> None:
    """The first call makes the plan and builds its kernels, the second does neither; so may another session's."""
    call()
    assert built(client) == (False, True)
    assert client.report is not None
    assert client.report.timing.total_ns >= client.report.timing.build_ns + client.report.timing.plan_ns
    call()
    assert built(client) == (True, False)


@pytest.mark.some(1)
def test_a_first_product_says_that_it_was_planned_and_built(way: tuple[tw.Client, int]) -> None:
    client, number = way
    a = client.asarray(random(24, 24))
    check(client, lambda: client.gemm(a, a, activation=("gelu", "silu", "tanh")[number]))
    assert client.report is not None
    assert client.report.placement == ("caller" if number == 0 else "server")
    plain = random(24, 24)  # staged by the client
    check(client, lambda: client.gemm(plain, plain, activation=("mish", "sigmoid", "softplus")[number]))
    name = client.report.kernels[0]
    b = random(48, 48)
    client.gemm(
        b, b, kernel=name, activation=("mish", "sigmoid", "softplus")[number]
    )  # another plan, a kernel that is there
    assert built(client) == (False, False)


@pytest.mark.extended
def test_so_do_generic_calls_and_plans_of_several_stages(way: tuple[tw.Client, int]) -> None:
    client, number = way
    a = random(24, 24)
    check(
        client, lambda: client.run("gemm", {"a": a, "b": a}, attributes={"unary": ("Elu", "Relu", "HardSwish")[number]})
    )
    q = client.asarray(random(1, 2, 12, (32, 64, 96)[number]))
    words = {"softcap": 3.0, "num_splits": 2}
    check(client, lambda: client.attention(q, q, q, **words))
    images, filters = (client.asarray(random(*shape)) for shape in ((1, 8, 9, 9), (8, 8, 3, 3)))
    check(client, lambda: client.conv(images, filters, activation=("gelu", "silu", "tanh")[number]))


@pytest.mark.some(1)
def test_a_step_over_a_cache_reports_both_of_its_plans(way: tuple[tw.Client, int]) -> None:
    client, number = way
    size = (48, 80, 128)[number]
    with client.kv_cache(4, 16, 2, size, dtype="fp32", sequences=1) as cache:
        one = cache.add()
        check(client, lambda: cache.attend(one, *(random(1, heads, 1, size) for heads in (4,)),
                                           **{name: random(1, 2, 1, size) for name in "kv"}))  # fmt: skip
        assert client.report is not None
        assert len(client.report.kernels) >= 2


@pytest.mark.extended
def test_the_asyncio_client_says_the_same(targets: dict[str, str]) -> None:
    async def reports() -> list[tuple[bool, bool]]:
        found = []
        async with tw.aio.connect(targets["in place"]) as client:
            a = np.ones((24, 24), np.float16)
            for _ in range(2):
                await client.gemm(a, a)
                assert client.report is not None
                found.append((client.report.plan_cached, client.report.timing.build_ns > 0))
        return found

    assert asyncio.run(reports()) == [(False, True), (True, False)]


@pytest.mark.extended
def test_a_plan_says_how_it_was_made(targets: dict[str, str]) -> None:
    with tw.connect(targets["grpc"]) as client, tw.connect(targets["grpc"]) as other:
        a = random(24, 24)
        made = [opened.plan_gemm(a, a, activation="leaky_relu").report for opened in (client, other)]
        assert [(report.plan_cached, report.timing.build_ns > 0) for report in made] == [(False, True), (True, False)]
