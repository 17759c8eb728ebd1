"""The server reads and writes with the plan's strides, whatever the arrays' are: nothing may lie otherwise."""

import asyncio

import numpy as np
import pytest
from client_helpers import close, random

import tilewright as tw

SIZES = {"inline": 8, "staged": 150}
"""Of square matrices: below and above what goes inside a message."""


def private(layout: str, size: int) -> np.ndarray:
    """A matrix of ordinary memory in a layout."""
    if layout == "dense":
        return random(size, size)
    if layout == "padded rows":
        return random(size, size + 5)[:, :size]
    if layout == "padded columns":
        return random(size, size + 5)[:, :size].T
    if layout == "columns":
        return random(size, size).T
    assert layout == "reversed"
    return random(size, size)[::-1]


LAYOUTS = ("dense", "padded rows", "padded columns", "columns", "reversed")


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("planned", LAYOUTS)
@pytest.mark.parametrize("given", LAYOUTS)
@pytest.mark.some(16)
def test_private_operands_of_any_layout(served: tw.Client, given: str, planned: str, size: int) -> None:
    b = served.asarray(random(size, size))
    with served.plan_gemm(private(planned, size), b) as plan:
        a, other = private(given, size), private(given, size)
        close(plan(a, b), a @ b, 1e-3)
        close(plan(a, b, repeat=2), a @ b, 1e-3)
        for result, value in zip(plan.run_many([(a, b), (other, b), {"a": a, "b": b}]), (a, other, a), strict=True):
            close(result, value @ b, 1e-3)
        with plan.stream() as stream:
            futures = [stream.submit(value, b) for value in (a, other, a)]
            for future, value in zip(futures, (a, other, a), strict=True):
                close(future.result(30), value @ b, 1e-3)
        with pytest.raises(tw.InvalidArgumentError, match="copied for every call"):
            plan.bind(a, b)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_shared_operands_of_any_layout_are_bound_as_they_lie(client: tw.Client, layout: str, size: int) -> None:
    base = client.asarray(random(size, size + 5))
    square = client.asarray(random(size, size))
    a = {
        "dense": square,
        "padded rows": base[:, :size],
        "padded columns": base[:, :size].T,
        "columns": square.T,
    }[layout]
    bound = client.plan_gemm(a, square).bind(a, square)
    close(bound(), np.array(a) @ np.array(square), 1e-3)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("planned", LAYOUTS[:2])
@pytest.mark.parametrize("given", ["fresh", "shared", *LAYOUTS])
@pytest.mark.some(28)
def test_outputs_of_any_layout(client: tw.Client, given: str, planned: str, size: int) -> None:
    a = random(size, size)
    plan = client.plan_gemm(a, a, out=private(planned, size))
    beside = client.zeros((size, size))  # what a write too far would hit
    out = None if given == "fresh" else client.zeros((size, size)) if given == "shared" else private(given, size)
    result = plan(a, a, out=out)
    assert out is None or result is out
    close(result, a @ a, 1e-3)
    for result in plan.run_many([(a, a)] * 2):
        close(result, a @ a, 1e-3)
    with plan.stream() as stream:
        close(stream.submit(a, a, out=out).result(30), a @ a, 1e-3)
    assert not beside.any()


def test_a_read_only_output_of_other_strides_is_refused(client: tw.Client) -> None:
    a = random(8, 8)
    frozen = np.zeros((8, 8), np.float32).T
    frozen.flags.writeable = False
    with pytest.raises(tw.InvalidArgumentError, match="read-only"):
        client.plan_gemm(a, a)(a, a, out=frozen)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_what_was_planned_broadcast_is_not_taken_from_an_array_that_is_not(client: tw.Client, size: int) -> None:
    a, b = random(3, size, size), random(size, size)
    shared = np.broadcast_to(b, (3, size, size))
    plan = client.plan_gemm(a, shared)
    close(plan(a, shared), a @ b, 1e-3)
    close(plan(a, np.broadcast_to(b.T, (3, size, size))), a @ b.T, 1e-3)
    with pytest.raises(tw.InvalidArgumentError, match="share memory"):
        plan(a, a)


def test_strides_without_shared_memory(tcp_server) -> None:
    with tw.connect(tcp_server.target) as client:
        for size in (8, 520):  # inside the message, and through a buffer
            a = random(size, size + 5)[:, :size]
            plan = client.plan_gemm(a, a, out=np.zeros((size, size + 3), np.float32)[:, :size])
            close(plan(a, a), a @ a, 1e-2)
            out = np.zeros((size, size), np.float32).T
            assert plan(a.copy(), a, out=out) is out
            close(out, a @ a, 1e-2)
        spec = tw.Spec.of((4, 4), "fp32", (8, 1))
        close(client.run("gemm", {"a": a[:4, :4], "b": a[:4, :4]}, {"out": spec})["out"], a[:4, :4] @ a[:4, :4])


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_private_operands_of_the_asyncio_client(real_server, layout: str, size: int) -> None:
    async def main() -> None:
        async with tw.aio.connect(real_server.target, launch="server") as client:
            a, b = private(layout, size), await client.asarray(random(size, size))
            plan = await client.plan_gemm(private(layout, size), b)
            close(await plan(a, b), a @ b, 1e-3)
            for result in await plan.run_many([(a, b)] * 3):
                close(result, a @ b, 1e-3)
            async with plan.stream() as stream:
                close(await (await stream.submit(a, b)), a @ b, 1e-3)
            with pytest.raises(tw.InvalidArgumentError, match="copied for every call"):
                await plan.bind(a, b)

    asyncio.run(main())
