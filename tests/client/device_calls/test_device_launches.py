"""Plans and bound plans with arrays on a GPU, pipelines of launches, and what goes another way than over the local
socket; see ``test_device_calls``."""

import asyncio
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_operands import STREAM, operands, settled
from device_server import DeviceServer
from fake_cuda import FakeCuda
from producers import Capsules

import tilewright as tw
from tilewright.dispatch.plans import pipeline as pipelines
from tilewright.gpu import cuda
from tilewright.transport import frames as packets


def test_plans_take_device_arrays_that_lie_as_planned(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    plan = client.plan_gemm(a, b)
    assert plan(a, b, out=c) is c
    assert plan(a=a, b=b, out=c) is c
    assert len(server.bound) == 1
    with pytest.raises(tw.InvalidArgumentError, match="strides") as caught:
        plan(torch.Tensor(a.address, (8, 8), "float32", (1, 8)), b, out=c)
    assert caught.value.rule == "plan_operand"


def test_a_bound_plan_launches_on_the_stream_that_is_current_then(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    bound = client.plan_gemm(a, b).bind(a, b, out=c)
    assert bound() is c
    torch.current = 77
    assert bound() is c
    assert [stream for _, stream in fake.calls("record")] == [STREAM, 77]
    assert [stream for stream, _ in fake.calls("wait")] == [STREAM, 77]
    assert len(server.bound) == 1
    assert len(server.peer.attached) == 2  # a connection for each stream


def test_a_launch_can_be_left_alone_and_waited_for_later(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    bound = client.plan_gemm(a, b).bind(a, b, out=c)
    launch = bound.launch(stream=55, wait=False)
    assert launch.out is c
    assert not fake.calls("wait")
    assert [stream for _, stream in fake.calls("record")] == [55]
    launch.wait(56)
    assert fake.calls("wait")[0][0] == 56
    assert not launch.done
    fake.busy = False
    assert launch.done
    fake.busy = True
    other = bound.launch(55)
    assert fake.calls("wait")[-1][0] == 55
    assert other.synchronize() is c
    assert fake.calls("event synchronize")


def test_bound_plans_are_unbound_when_they_go(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    bound = client.plan_gemm(a, b).bind(a, b, out=c)
    bound()
    del bound
    assert settled(client, lambda: server.unbound == [9001])


def test_a_binding_that_went_with_its_memory_is_made_again(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    bound = client.plan_gemm(a, b).bind(a, b, out=c)
    bound()
    client.release_exports()
    assert bound() is c
    assert [launch[0] for launch in server.peer.launches] == [9001, 9002]
    server.peer.failing.add(9002)  # the server knows more than the client
    assert bound() is c
    assert [launch[0] for launch in server.peer.launches] == [9001, 9002, 9002, 9003]
    client.release_exports()
    with client.pipeline() as pipeline:
        pipeline.launch(bound)
    assert server.peer.launches[-1][0] == 9004


def test_a_pipeline_sends_many_launches_in_few_packets_and_joins_once(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    plan = client.plan_gemm(a, b)
    first, second = plan.bind(a, b, out=c), plan.bind(b, a, out=c)
    with client.pipeline() as pipeline:
        for _ in range(500):
            pipeline.launch(first)
            pipeline.launch(second)
        assert pipeline.launches == 1000
    launches = server.peer.launches
    assert [launch[0] for launch in launches] == [9001, 9002] * 500
    assert len(server.peer.packets) < 500
    assert max(server.peer.packets) <= 64
    assert launches[0][1] & packets.WAIT
    assert sum(bool(launch[1] & packets.WAIT) for launch in launches) == 1
    assert launches[-1][1] & packets.RECORD
    assert [stream for _, stream in fake.calls("record")] == [STREAM]
    assert [stream for stream, _ in fake.calls("wait")] == [STREAM]
    assert not fake.calls("synchronize")


def test_a_pipeline_orders_itself_behind_new_work_on_request(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    bound = client.plan_gemm(a, b).bind(a, b, out=c)
    with client.pipeline(stream=STREAM) as pipeline:
        pipeline.launch(bound)
        pipeline.order()
        pipeline.launch(bound)
        pipeline.join()
        pipeline.launch(bound)
    flags = [launch[1] for launch in server.peer.launches]
    assert [bool(flag & packets.WAIT) for flag in flags] == [True, True, False]
    assert len(fake.calls("record")) == 2
    assert len(fake.calls("wait")) == 2


def test_errors_of_a_pipeline_are_raised_when_it_joins(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    plan = client.plan_gemm(a, b)
    good, bad = plan.bind(a, b, out=c), plan.bind(b, a, out=c)
    good(), bad()
    server.peer.failing.add(9002)
    pipeline = client.pipeline()
    with pytest.raises(tw.NotFoundError, match="asked to fail"), pipeline:
        for number in range(200):
            pipeline.launch(bad if number in (3, 150, 199) else good)
    assert [number for number, _ in pipeline.failures] == [3, 150, 199]
    pipeline.launch(good)
    pipeline.join()
    assert pipeline.failures == []


def test_a_stream_waits_for_launches_of_a_pipeline_whose_last_one_failed(
    client, server, torch, fake, monkeypatch
) -> None:
    monkeypatch.setattr(pipelines, "SEND_AFTER_NS", 1 << 62)  # one packet
    a, b, c = operands(torch, fake)
    plan = client.plan_gemm(a, b)
    good, bad = plan.bind(a, b, out=c), plan.bind(b, a, out=c)
    good(), bad()
    server.peer.failing |= {9002, 9004}  # bad, and bad bound again
    for ties in (False, True):
        server.peer.ties = ties
        before = len(fake.calls("wait"))
        with pytest.raises(tw.NotFoundError), client.pipeline() as pipeline:
            pipeline.launch(good)
            pipeline.launch(bad)
        assert len(fake.calls("wait")) - before == (1 if ties else 0)


def test_a_pipeline_whose_server_dies_says_so(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    bound = client.plan_gemm(a, b).bind(a, b, out=c)
    with pytest.raises(tw.UnavailableError), client.pipeline() as pipeline:
        pipeline.launch(bound)
        pipeline.flush()
        server.peer.hang_up()
        for _ in range(1000):
            pipeline.launch(bound)


def test_without_a_local_socket_calls_wait_on_the_host(tmp_path: Path, torch: Any, fake: FakeCuda) -> None:
    with DeviceServer.running(tmp_path, local=False) as (server, target), tw.connect(target) as client:
        a, b, c = operands(torch, fake)
        assert client.gemm(a, b, out=c) is c
        bound = client.plan_gemm(a, b).bind(a, b, out=c)
        assert bound() is c
        assert bound.launch().done
        assert fake.calls("synchronize") == [(STREAM,)] * 3
        assert len(server.executed) == 3
        assert server.bound == []
        with pytest.raises(tw.InvalidArgumentError) as caught:
            client.pipeline().launch(bound)
        assert caught.value.rule == "pipeline_local"
        mapped = fake.allocate(1 << 16, "mapped")
        with pytest.raises(tw.UnsupportedError) as refused:
            client.gemm(torch.Tensor(mapped, (8, 8)), b)
        assert refused.value.rule == "local_socket"


def test_repeats_and_streams_of_requests_wait_on_the_host_too(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    plan = client.plan_gemm(a, b)
    plan(a, b, out=c, repeat=3)
    with plan.stream() as stream:
        stream.submit(a, b, out=c).result(10)
    assert fake.calls("synchronize") == [(STREAM,)] * 2


def test_arrays_of_the_host_may_be_mixed_in(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    bias = np.ones(8, np.float32)
    assert client.gemm(a, b, bias=bias, out=c) is c
    assert server.bound == []
    assert len(server.executed) == 1
    assert fake.calls("synchronize")


def test_scales_that_are_numbers_go_into_alpha(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake, 8, "float8_e4m3fn")
    client.gemm(a, b, alpha=3.0, scale_a=0.5, scale_b=0.25, out=torch.Tensor(c.address, (8, 8), "bfloat16"))
    assert server.planned[0].attributes["alpha"].number == 0.375
    assert len(server.planned[0].inputs) == 2
    assert server.executed == []


def test_a_device_without_a_worker_is_waited_for(client, server, torch, fake) -> None:
    server.attach = False
    a, b, c = operands(torch, fake)
    bound = client.plan_gemm(a, b).bind(a, b, out=c)
    assert bound.launch().device_ns == 1234
    assert fake.calls("synchronize") == [(STREAM,)]
    assert server.peer.attached == []


def test_tensors_of_the_server_alone_need_no_driver_here(server: DeviceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libno-such-driver.so.1")
    monkeypatch.setattr(cuda, "_loaded", None)
    with tw.connect(server.target) as client:
        tensors = [client.buffer(256, "cuda:0").tensor((8, 8), "fp32") for _ in range(3)]
        bound = client.plan_gemm(*tensors[:2]).bind(*tensors[:2], out=tensors[2])
        assert bound() is tensors[2]
        assert client.report.timing.device_ns == 1234
        with client.pipeline() as pipeline:
            for _ in range(10):
                pipeline.launch(bound)
        assert server.peer.launches[-1][1] == packets.TIME


def test_empty_tensors_do_not_reach_the_driver(client, server, torch, fake) -> None:
    out = torch.Tensor(0, (0, 8))
    assert client.gemm(torch.Tensor(0, (0, 8)), operands(torch, fake)[0], out=out) is out


def test_memory_of_the_host_travels_by_descriptor(client, server) -> None:
    array = client.zeros((8, 8))
    assert client.gemm(array, array).shape == (8, 8)
    assert [request.WhichOneof("source") for request in server.registered] == ["attached"]


def test_the_asyncio_client_does_the_same(server, torch, fake) -> None:
    async def main() -> None:
        async with tw.aio.connect(server.target) as client:
            a, b, c = operands(torch, fake)
            assert await client.gemm(a, b, out=c) is c
            bound = await (await client.plan_gemm(a, b)).bind(a, b, out=c)
            assert await bound() is c
            launch = await bound.launch(stream=55, wait=False)
            assert await launch.synchronize() is c
            async with client.pipeline() as pipeline:
                for _ in range(200):
                    await pipeline.launch(bound)
            server.peer.failing.add(9002)
            with pytest.raises(tw.NotFoundError):
                async with client.pipeline() as pipeline:
                    await pipeline.launch(bound)
            await client.release_exports()

    asyncio.run(main())
    assert len(server.peer.launches) == 204


def test_bf16_goes_by_dlpack(client, server, fake) -> None:
    base = fake.allocate(1 << 16)
    a = Capsules(base, (4, 4), ml_dtypes.bfloat16)
    result = client.gemm(a, a)
    assert result.dtype == ml_dtypes.bfloat16
    with pytest.raises(AttributeError, match="__dlpack__"):
        result.__cuda_array_interface__  # noqa: B018
