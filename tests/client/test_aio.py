"""The asyncio client has the blocking one's methods, and shares their logic."""

import asyncio
import inspect
import socket

import numpy as np
import pytest
from client_helpers import close, random

import tilewright as tw
from tilewright.sync import client as sync_client


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_both_clients_have_the_same_methods() -> None:
    for name in ("Client", "Plan", "Bound", "Buffer", "Kernels"):
        blocking, asynchronous = getattr(sync_client, name, None) or getattr(tw, name), getattr(tw.aio, name)
        assert public(blocking) <= public(asynchronous), name
        for method in public(blocking) - {"close", "pipeline", "reconnect", "stream"}:
            one, other = getattr(blocking, method), getattr(asynchronous, method)
            if callable(one):
                assert [*inspect.signature(one).parameters.values()] == [*inspect.signature(other).parameters.values()]
                assert one.__doc__, f"{name}.{method}"
    assert inspect.signature(tw.connect).parameters == inspect.signature(tw.aio.connect).parameters


def test_a_server_that_is_silent_is_told_in_the_same_words_by_both_clients() -> None:
    async def main(target: str) -> None:
        await tw.aio.connect(target, timeout=0.2)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        told = []
        for connecting in (lambda: tw.connect(target, timeout=0.2), lambda: asyncio.run(main(target))):
            with pytest.raises(tw.UnavailableError) as caught:
                connecting()
            told.append((str(caught.value), caught.value.rule, caught.value.field, caught.value.fix))
    assert told[0] == told[1]
    assert told[0][3], "it says what to do"


def test_calls_plans_and_streams(server) -> None:
    async def main() -> None:
        async with tw.aio.connect(server.target) as client:
            a = await client.asarray(random(16, 16))
            close(await client.gemm(a, a.T), a @ a.T)
            assert client.report is not None
            assert client.report.staged_bytes == 0
            results = await asyncio.gather(*(client.gemm(a, a) for _ in range(20)))
            for result in results:
                close(result, a @ a)
            plan = await client.plan_gemm(a, a)
            close(await plan(a, a), a @ a)
            bound = await plan.bind(a, a, out=await client.zeros((16, 16)))
            close(await bound(), a @ a)
            assert len(await plan.run_many([bound] * 8)) == 8
            async with plan.stream() as stream:
                futures = [await stream.submit(a, a) for _ in range(100)]
                for result in await asyncio.gather(*futures):
                    close(result, a @ a)
                await stream.drain()
            async with await client.buffer(64) as buffer:
                await buffer.write(np.arange(16, dtype=np.float32))
                assert (await buffer.read(8)).view(np.float32).tolist() == [0, 1]
            packed = await client.pack_b(a)
            close(await client.gemm(a, packed), a @ a)
            assert len(await client.kernels.list()) == 5
            with pytest.raises(tw.InvalidArgumentError):
                await client.gemm(a, random(3, 3))

    asyncio.run(main())


def test_cancelling_a_call_leaves_the_client_usable(server) -> None:
    async def main() -> None:
        async with tw.aio.connect(server.target) as client:
            out = await client.zeros((1,))
            call = asyncio.create_task(client.run("sleep", {}, {"out": out}, {"seconds": 1.0}))
            await asyncio.sleep(0.1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            a = await client.zeros((2, 2))
            assert (await client.gemm(a, a)).sum() == 0

    asyncio.run(main())


@pytest.mark.extended
def test_a_killed_server_is_a_typed_error(own_server) -> None:
    async def main() -> None:
        async with tw.aio.connect(own_server.target) as client:
            a = await client.zeros((2, 2))
            plan = await client.plan("sleep", {}, attributes={"seconds": 5.0})
            async with plan.stream() as stream:
                future = await stream.submit()
                call = asyncio.create_task(plan())
                await asyncio.sleep(0.2)
                own_server.kill()
                with pytest.raises(tw.UnavailableError):
                    await future
                with pytest.raises(tw.UnavailableError):
                    await call
            with pytest.raises(tw.UnavailableError):
                await client.gemm(a, a)

    asyncio.run(main())


def test_no_server_is_said_at_once(tmp_path) -> None:
    async def main() -> None:
        with pytest.raises(tw.UnavailableError, match="no Tilewright server"):
            await tw.aio.connect(f"unix:{tmp_path}/none")

    asyncio.run(main())


@pytest.mark.parametrize("name", ["gemm", "conv", "conv_transpose", "attention", "attention_backward", "kv_append"])
def test_help_names_every_argument_of_both_clients_and_of_plans(name: str) -> None:
    calls = [getattr(kind, prefix + name) for kind in (tw.Client, tw.aio.Client) for prefix in ("", "plan_")]
    one, *others = ([*inspect.signature(call).parameters.values()] for call in calls)
    assert all(other == one for other in others)
    assert {"kernel", "strategy", "build", "device", "timeout"} <= {item.name for item in one}
    assert all(item.kind is not inspect.Parameter.VAR_KEYWORD for item in one)
    assert all(item.annotation is not inspect.Parameter.empty for item in one)
