"""Calls like earlier ones that the server launches take the way of a prepared plan, and mean what they meant."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from client_helpers import close, random

import tilewright as tw


def settled(client: tw.Client | tw.aio.Client) -> int:
    """Number of calls that are remembered."""
    return len(client._subject.direct)


def test_a_repeated_call_is_remembered_by_its_layouts(served: tw.Client) -> None:
    pairs = [(random(8, 12), random(12, 4)) for _ in range(6)]
    for a, b in pairs:
        close(served.gemm(a, b), a @ b)
    assert settled(served) == 1
    out = served.empty((8, 4))
    for a, b in pairs:
        x, y = served.asarray(a), served.asarray(b)
        assert served.gemm(x, y, out=out) is out
        close(out, a @ b)
        assert served.report is not None and served.report.placement == "server" and served.report.kernels
    assert settled(served) == 2


def test_arrays_in_shared_memory_and_elsewhere_are_one_call(served: tw.Client) -> None:
    a, b = random(8, 12), random(12, 4)
    mine, theirs = np.zeros((8, 4), np.float32), served.zeros((8, 4))
    for given in ((a, b), (served.asarray(a), b), (served.asarray(a), served.asarray(b)), (a, b)):
        for out in (mine, theirs):
            out[...] = np.nan
            assert served.gemm(*given, out=out) is out
            close(out, a @ b)
    assert settled(served) == 1


def test_one_array_given_twice_is_not_taken_for_two(served: tw.Client) -> None:
    a, b = random(8, 8), random(8, 8)
    for _ in range(2):
        close(served.gemm(a, a), a @ a)
        close(served.gemm(a, b), a @ b)
        close(served.gemm(b, a), b @ a)
        close(served.gemm(a, b, c=a), a @ b + a)
        close(served.gemm(a, b, c=b), a @ b + b)


def test_views_and_options_are_other_calls(served: tw.Client) -> None:
    a, b, c = random(8, 8), random(8, 8), random(8, 8)
    for _ in range(2):
        close(served.gemm(a, b), a @ b)
        close(served.gemm(a, b.T), a @ b.T)
        close(served.gemm(a, b[:, ::2]), a @ b[:, ::2])
        close(served.gemm(a, b, alpha=2.0), 2 * (a @ b))
        close(served.gemm(a, b, c=c, beta=0.5), a @ b + 0.5 * c)
        close(served.gemm(a, b, c=c, alpha=-0.0, beta=1), c)


def test_a_remembered_call_refuses_what_the_first_would(served: tw.Client) -> None:
    a, b, out = random(8, 12), random(12, 4), np.zeros((8, 4), np.float32)
    served.gemm(a, b, out=out)
    assert settled(served) == 1
    out.flags.writeable = False
    with pytest.raises(tw.InvalidArgumentError) as caught:
        served.gemm(a, b, out=out)
    assert caught.value.field == "out"
    with pytest.raises(tw.InvalidArgumentError):
        served.gemm(a, random(4, 12), out=np.zeros((8, 4), np.float32))
    close(served.gemm(a, b, out=np.zeros((8, 4), np.float32)), a @ b)


def test_lists_of_products_keep_their_order(served: tw.Client) -> None:
    groups = [[random(4, 8), random(6, 8)], [random(8, 3), random(8, 5)]]
    for _ in range(3):
        a, b = [[random(*item.shape) for item in group] for group in groups]
        results = served.grouped_gemm(a, b)
        assert isinstance(results, list)
        for have, x, y in zip(results, a, b, strict=True):
            close(have, x @ y)
    assert settled(served) == 1


def test_remembered_calls_go_on_in_another_session(served: tw.Client) -> None:
    a, b = served.asarray(random(8, 12)), served.asarray(random(12, 4))
    for _ in range(2):
        close(served.gemm(a, b), a @ b)
        served.reconnect()
    close(served.gemm(a, b), a @ b)
    served.close()
    with pytest.raises(tw.UnavailableError):
        served.gemm(a, b)


def test_limits_of_time_and_better_kernels_are_looked_at_each_time(served: tw.Client) -> None:
    a, b = random(8, 12), random(12, 4)
    for _ in range(2):
        close(served.gemm(a, b, timeout=60.0), a @ b)
    assert settled(served) == 0


def test_the_asyncio_client_remembers_too(real_server) -> None:
    async def main() -> None:
        async with tw.aio.connect(real_server.target, launch="server") as client:
            for _ in range(3):
                a, b = random(8, 12), random(12, 4)
                close(await client.gemm(a, b), a @ b)
            assert settled(client) == 1
            pairs = [(random(8, 12), random(12, 4)) for _ in range(20)]
            for result, (a, b) in zip(
                await asyncio.gather(*(client.gemm(*pair) for pair in pairs)), pairs, strict=True
            ):
                close(result, a @ b)

    asyncio.run(main())
