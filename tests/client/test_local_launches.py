"""Launches over the local socket of the service itself, on a CPU."""

import asyncio
import gc
import os
import threading
import time

import numpy as np
import pytest
from client_helpers import close, device_workers, objects, random

import tilewright as tw
from tilewright.dispatch.plans.bound import BoundState
from tilewright.session.state import Core
from tilewright.transport import rpc as steps
from tilewright_proto.v1 import memory_pb2


@pytest.fixture
def client(real_server):
    with tw.connect(real_server.target, launch="server") as opened:
        if opened.session.control is None:
            pytest.skip("the service has no local socket here")
        yield opened


def bound_product(client: tw.Client, size: int = 16):
    a, b = client.asarray(random(size, size)), client.asarray(random(size, size))
    return client.plan_gemm(a, b).bind(a, b, out=client.empty((size, size))), a, b


def has_bindings(client: tw.Client, wanted: int) -> bool:
    """Whether the session comes to have so many, when releases that nobody waits for are through."""
    gc.collect()

    def ask():
        return (yield steps.Rpc(steps.STATUS, memory_pb2.StatusRequest(session=client.session.token)))

    deadline = time.monotonic() + 30
    while (count := len(client._drive(ask).bindings)) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return count == wanted


@pytest.mark.extended
def test_a_bound_plan_is_launched_over_the_local_socket(client: tw.Client) -> None:
    bound, a, b = bound_product(client)
    for _ in range(3):
        assert bound() is bound.out
        close(bound.out, a @ b)
        a *= 1.5
    assert bound._state.binding is not None
    assert has_bindings(client, 1)
    report = client.report
    assert report is not None
    assert report.timing.device_ns > 0
    assert report.kernels == bound._state.plan.report.kernels
    assert report.bytes_copied == 0
    bound(timeout=30.0)
    close(bound.out, a @ b)
    del bound
    assert has_bindings(client, 0)


@pytest.mark.extended
def test_a_plan_that_is_called_again_and_again_is_bound_by_itself(client: tw.Client) -> None:
    a, b, c = client.asarray(random(16, 16)), client.asarray(random(16, 16)), client.empty((16, 16))
    plan = client.plan_gemm(a, b)
    for number in range(10):
        a[...] = number
        assert plan(a, b, out=c) is c
        close(c, a @ b)
    assert has_bindings(client, 1)
    assert client.report is not None
    assert client.report.timing.device_ns > 0
    plan(a, b, out=c, timeout=10.0, repeat=2)
    for _ in range(10):  # fresh outputs come to lie in the same places again and again
        close(plan(a, b), a @ b)
        close(plan(np.array(a), b, out=c), a @ b)
    with pytest.raises(tw.InvalidArgumentError, match="overlaps"):
        plan(a, b, out=a)
    c.flags.writeable = False
    with pytest.raises(tw.InvalidArgumentError, match="read-only"):
        plan(a, b, out=c)
    plan.close()
    assert has_bindings(client, 0)


def test_a_launch_on_a_cpu_is_over_when_it_returns(client: tw.Client) -> None:
    bound, a, b = bound_product(client)
    launch = bound.launch()
    close(launch.out, a @ b)
    assert launch.done
    assert launch.device_ns
    launch.wait()
    assert launch.synchronize() is bound.out
    assert bound.launch(stream=3, wait=False).done


def test_a_pipeline_runs_in_order(client: tw.Client) -> None:
    x = client.asarray(np.eye(4, dtype=np.float32))
    two = client.asarray(np.eye(4, dtype=np.float32) * 2)
    y = client.empty((4, 4))
    there, back = client.plan_gemm(x, two).bind(x, two, out=y), client.plan_gemm(y, two).bind(y, two, out=x)
    with client.pipeline() as pipeline:
        for _ in range(5):
            pipeline.launch(there)
            pipeline.launch(back)
    assert (x == np.eye(4) * 4**5).all()
    assert pipeline.launches == 10


def test_a_pipeline_takes_more_launches_than_a_packet_or_a_socket_holds(client: tw.Client) -> None:
    bound, a, b = bound_product(client, 4)
    with client.pipeline() as pipeline:
        for _ in range(20_000):
            pipeline.launch(bound)
    close(bound.out, a @ b)


def test_a_closed_binding_fails_its_launch_and_the_pipeline_goes_on(client: tw.Client) -> None:
    bound, a, b = bound_product(client)
    stale, *_ = bound_product(client)
    stale()
    assert stale._state.binding is not None
    stale._state.binding._finalizer()
    assert has_bindings(client, 0)
    with pytest.raises(tw.NotFoundError), client.pipeline() as pipeline:
        for number in range(100):
            pipeline.launch(stale if number == 7 else bound)
    assert [number for number, _ in pipeline.failures] == [7]
    close(bound.out, a @ b)
    with client.pipeline() as pipeline:
        pipeline.launch(stale)  # is bound again by itself


def test_calls_whose_bindings_are_gone_bind_again(client: tw.Client, real_server) -> None:
    a, out = client.asarray(random(8, 8)), client.empty((8, 8))
    plan = client.plan_gemm(a, a)
    bound = plan.bind(a, a, out=out)
    for call in (bound, lambda: plan(a, a, out=out), lambda: bound.launch().synchronize()):
        for _ in range(6):  # some by requests, then by a binding
            call()
        drop_bindings(client._subject, bound._state)
        assert has_bindings(client, 0)
        out[:] = 0
        close(call(), a @ a)

    async def main() -> None:
        async with tw.aio.connect(real_server.target, launch="server") as other:
            a, out = await other.asarray(random(8, 8)), await other.empty((8, 8))
            plan = await other.plan_gemm(a, a)
            bound = await plan.bind(a, a, out=out)
            for call in (bound, lambda: plan(a, a, out=out)):
                for _ in range(6):
                    await call()
                drop_bindings(other._subject, bound._state)
                out[:] = 0
                close(await call(), a @ a)

    asyncio.run(main())


def drop_bindings(core: Core, bound: BoundState) -> None:
    """Give back what a plan and one that is bound have settled, behind their backs."""
    held = [*bound.plan.short._bindings.values(), *([bound.binding] if bound.binding is not None else [])]
    assert held
    for binding in held:
        core.release_binding(binding.session, binding.id)


def test_threads_launch_at_the_same_time(client: tw.Client) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            bound, a, b = bound_product(client)
            for _ in range(100):
                bound()
            close(bound.out, a @ b)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_forked_child_has_connections_of_its_own(client: tw.Client) -> None:
    bound, a, b = bound_product(client)
    bound()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            mine, c, d = bound_product(client)
            close(mine(), c @ d)
            close(client.plan_gemm(a, b)(a, b), a @ b)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    bound.out[...] = 0
    close(bound(), a @ b)


def test_the_end_of_a_session_ends_its_bindings_and_regions(real_server) -> None:
    with tw.connect(real_server.target, launch="server") as client:
        bound, *_ = bound_product(client)
        bound()
        before = len(client.kernels.statistics()["operations"])
    with pytest.raises(tw.UnavailableError):
        bound()
    with tw.connect(real_server.target, launch="server") as other:
        assert len(other.kernels.statistics()["operations"]) == before
        assert objects(other) == (0, 0, 0)


@pytest.mark.extended
def test_after_a_restart_bound_plans_are_bound_again(own_real_server) -> None:
    with tw.connect(own_real_server.target, launch="server", reconnect=False) as client:
        bound, a, b = bound_product(client)
        bound()
        own_real_server.kill()
        time.sleep(0.2)
        for _ in range(2):
            with pytest.raises(tw.UnavailableError, match="reconnect"):
                bound()
        own_real_server.start()
        client.reconnect()
        bound.out[...] = 0
        close(bound(), a @ b)
        with client.pipeline() as pipeline:
            pipeline.launch(bound)


def test_a_plan_is_launched_with_its_arrays(client: tw.Client) -> None:
    a, out = client.asarray(random(8, 8)), client.empty((8, 8))
    plan = client.plan_gemm(a, a)
    for _ in range(6):  # some by requests, then by a binding
        out[:] = 0
        launch = plan.launch(a, a, out=out)
        assert launch.done
        assert launch.device_ns
        assert launch.out is launch.synchronize() is out
        close(out, a @ a)
    close(plan.launch(a=a, b=a, stream=3, wait=False).out, a @ a)
    mine = random(8, 8)  # is copied
    close(plan.launch(mine, mine).synchronize(), mine @ mine)
    with pytest.raises(tw.InvalidArgumentError) as caught:
        plan.launch(a)
    assert caught.value.rule == "plan_operands"


def test_the_asyncio_client_launches_too(real_server) -> None:
    async def main() -> None:
        async with tw.aio.connect(real_server.target, launch="server") as client:
            a = await client.asarray(random(8, 8))
            bound = await (await client.plan_gemm(a, a)).bind(a, a, out=await client.empty((8, 8)))
            close(await bound(), a @ a)
            launch = await bound.launch()
            plan = await client.plan_gemm(a, a)
            close((await plan.launch(a, a)).out, a @ a)
            close(await launch.synchronize(), a @ a)
            results = await asyncio.gather(*(bound() for _ in range(50)))
            assert all(result is bound.out for result in results)
            async with client.pipeline() as pipeline:
                for _ in range(300):
                    await pipeline.launch(bound)
            assert pipeline.launches == 300

    asyncio.run(main())


def test_shared_memory_needs_no_common_process_table(client: tw.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 999_999_999)  # what /proc would be asked about
    a = client.asarray(random(300, 300))
    close(client.gemm(a, a), a @ a, 1e-3)
    assert client.report is not None
    assert client.report.bytes_copied == 0


def test_a_server_without_a_local_socket_is_served_over_grpc(real_server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.session.state.open_control", lambda *_: None)
    with tw.connect(real_server.target, launch="server") as client:
        assert client.session.control is None
        bound, a, b = bound_product(client)
        close(bound(), a @ b)
        assert bound._state.binding is None
        assert bound.launch().done
        with pytest.raises(tw.InvalidArgumentError) as caught:
            client.pipeline().launch(bound)
        assert caught.value.rule == "pipeline_local"


def end_worker(server) -> None:
    """Kill the process that runs the server's device."""
    found = device_workers(server.process.pid)
    assert len(found) == 1
    found[0].kill()


@pytest.mark.extended
def test_launches_go_to_the_process_of_a_device_and_survive_it(isolating_server) -> None:
    with tw.connect(isolating_server.target) as client:
        a = random(32, 32)
        buffers = [client.buffer(4096) for _ in range(2)]
        buffers[0].write(a)
        x, y = (buffer.tensor((32, 32), "fp32") for buffer in buffers)
        plan = client.plan_gemm(x, x)
        bound = plan.bind(x, x, out=y)
        assert bound() is y
        assert bound._state.binding is not None
        assert bound._state.binding.attach
        close(buffers[1].read().view(np.float32).reshape(32, 32), a @ a, 1e-3)
        with client.pipeline() as pipeline:
            for _ in range(500):
                pipeline.launch(bound)
        assert bound.launch().done

        # Arrays of this process are no memory of that device: they go as requests, and are copied.
        shared, out = client.asarray(a), client.empty((32, 32))
        other = plan.bind(shared, shared, out=out)
        for _ in range(5):
            close(other(), a @ a, 1e-3)
            close(plan(shared, shared, out=out), a @ a, 1e-3)
        assert other._state.binding is None

        end_worker(isolating_server)
        with pytest.raises(tw.UnavailableError):
            bound()
        with pytest.raises(tw.UnavailableError) as caught:  # its buffers went with the device
            bound()
        assert caught.value.rule == "device_lost"
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                out[...] = 0
                close(other(), a @ a, 1e-3)
                break
            except tw.UnavailableError:
                time.sleep(0.05)
        fresh = [client.buffer(4096) for _ in range(2)]
        fresh[0].write(a)
        x, y = (buffer.tensor((32, 32), "fp32") for buffer in fresh)
        plan.bind(x, x, out=y)()
        close(fresh[1].read().view(np.float32).reshape(32, 32), a @ a, 1e-3)
