"""The client and the service on a GPU whose driver is simulated: two processes, memory that both map, events that both
know. Kernels leave their outputs as they were; all else is as on a machine with a GPU.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from client_helpers import device_workers
from producers import Capsules, Interface
from simulated_gpu import HERE, PART, Gpu, service

import tilewright as tw

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("cuda") is None,
        reason="NVIDIA's packages are not installed: pip install 'tilewright[cuda]'",
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)"),
]


def tensors(torch: Any, base: int) -> tuple[Any, Any, Any]:
    return tuple(torch.Tensor(base + number * PART, (128, 128), "bfloat16") for number in range(3))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["legacy", "pool", "mapped"])
@pytest.mark.extended
def test_memory_of_every_kind_is_mapped_and_used(client, gpu, torch, kind: str) -> None:
    allocate = {
        "legacy": lambda: gpu.allocate(2 << 20),
        "pool": lambda: gpu.pooled(2 << 20, torch.current),
        "mapped": lambda: gpu.mapped(2 << 20),
    }
    a, b, out = tensors(torch, allocate[kind]())
    for _ in range(3):
        assert client.gemm(a, b, out=out) is out
    assert client.report.device == "cuda:0"
    assert gpu.comes_to_rest(torch.current)
    assert len(client.session.exports) == 1


def test_tensors_across_mappings_are_mapped_whole(client, gpu, torch) -> None:
    base = gpu.parts(6)
    # Ends of 16 KiB that lie behind a boundary, and one of 4 MiB and more.
    a = torch.Tensor(base + (2 << 20) - 16384, (128, 128), "bfloat16")
    b = torch.Tensor(base + (4 << 20) - 16384, (128, 128), "bfloat16")
    out = torch.Tensor(base + (6 << 20) - 16384, (128, 128), "bfloat16")
    for _ in range(3):
        assert client.gemm(a, b, out=out) is out
    assert sorted(size for _, size in client.session.exports) == [4 << 20] * 3
    large, other = (torch.Tensor(base + 4096, shape, "bfloat16") for shape in ((1024, 2048), (2048, 1024)))
    into = torch.Tensor(base + (6 << 20), (1024, 1024), "bfloat16")
    assert client.gemm(large, other, out=into) is into
    assert gpu.comes_to_rest(torch.current)
    assert max(size for _, size in client.session.exports) == 6 << 20


def test_a_launch_waits_for_the_stream_and_the_stream_for_it(client, gpu, torch) -> None:
    a, b, out = tensors(torch, gpu.allocate(1 << 20))
    bound = client.plan_gemm(a, b).bind(a, b, out=out)
    bound()
    assert gpu.comes_to_rest(torch.current)
    release = gpu.hold(torch.current)
    launch = bound.launch()
    with client.pipeline() as pipeline:
        for _ in range(200):
            pipeline.launch(bound)
    client.gemm(a, b, out=out)
    time.sleep(0.2)
    assert not launch.done
    assert not gpu.idle(torch.current)
    release()
    assert gpu.comes_to_rest(torch.current)
    assert launch.done
    assert launch.synchronize() is out


def test_streams_do_not_wait_for_each_other(client, gpu, torch) -> None:
    a, b, out = tensors(torch, gpu.allocate(1 << 20))
    bound = client.plan_gemm(a, b).bind(a, b, out=out)
    bound()
    other = gpu.stream()
    release = gpu.hold(torch.current)
    held, free = bound.launch(wait=False), bound.launch(stream=other)
    assert gpu.comes_to_rest(other)
    assert free.done
    assert not held.done
    held.wait(other)
    assert not gpu.idle(other)
    release()
    assert gpu.comes_to_rest(other)


def test_launches_are_waited_for_by_nobody_and_clients_share_memory_and_modules(client, gpu, target, torch) -> None:
    def counted() -> dict[str, int]:
        (device,) = client.kernels.statistics()["devices"]
        assert device["id"] == "cuda:0"
        return {name: int(value) for name, value in device.items() if name != "id"}

    a, b, out = tensors(torch, gpu.allocate(1 << 20))
    plan = client.plan_gemm(a, b)
    bound = plan.bind(a, b, out=out)
    bound()
    assert gpu.comes_to_rest(torch.current)
    before = counted()
    with client.pipeline() as pipeline:
        for _ in range(100):
            bound()
            pipeline.launch(bound)
    assert gpu.comes_to_rest(torch.current)
    after = counted()
    for name in ("host_synchronisations", "launch_synchronisations"):
        assert after.get(name, 0) == before.get(name, 0)
    with tw.connect(target, launch="server") as other:
        other.gemm(a, b, out=out)
        assert gpu.comes_to_rest(torch.current)
        assert counted()["modules"] == before["modules"]
        assert counted()["mappings"] >= 1


def test_a_plan_is_launched_on_any_stream(client, gpu, torch) -> None:
    a, b, out = tensors(torch, gpu.allocate(1 << 20))
    plan, other = client.plan_gemm(a, b), gpu.stream()
    for _ in range(2):  # bound by the first, known by the second
        release = gpu.hold(torch.current)
        behind, free = plan.launch(a, b, out=out), plan.launch(a, b, out=out, stream=other)
        assert gpu.comes_to_rest(other)
        assert free.done
        assert not behind.done
        assert not gpu.idle(torch.current)
        release()
        assert behind.synchronize() is out
        assert gpu.comes_to_rest(torch.current)
    release = gpu.hold(other)
    held = plan.launch(a, b, out=out, stream=other, wait=False)
    made = plan.launch(a=a, b=b)
    assert made.synchronize().shape == (128, 128)
    assert not held.done
    release()
    assert held.synchronize() is out


def test_a_launch_into_a_capture_is_refused_and_leaves_it_alone(client, gpu, torch) -> None:
    a, b, out = tensors(torch, gpu.allocate(1 << 20))
    bound = client.plan_gemm(a, b).bind(a, b, out=out)
    bound()
    assert gpu.comes_to_rest(torch.current)
    torch.current = captured = gpu.stream()
    gpu.call("cuStreamBeginCapture_v2", ctypes.c_uint64(captured), 2)
    plan = client.plan_gemm(a, b)
    for launch in (bound, bound.launch, lambda: plan.launch(a, b, out=out), lambda: client.gemm(a, b, out=out)):
        with pytest.raises(tw.UnsupportedError) as caught:
            launch()
        assert caught.value.rule == "stream_capture"
    graph = gpu.made_behind("cuStreamEndCapture", captured)
    assert graph, "the capture goes on"
    assert bound.launch().synchronize() is out


def test_arrays_of_other_libraries_and_of_the_server(client, gpu, torch) -> None:
    base, stream = gpu.allocate(1 << 20), gpu.stream()
    a = Interface(base, (64, 64), "<f4", stream=stream)
    result = client.gemm(a, Capsules(base + PART, (64, 64)))
    assert isinstance(result, tw.DeviceArray)
    result.copy_from(np.eye(64, dtype=np.float32))
    assert (result.numpy() == np.eye(64)).all()
    again = client.device_empty((64, 64), "fp32")
    assert client.gemm(result, a, out=again) is again
    assert again.numpy().shape == (64, 64)


def test_views_of_the_servers_memory_are_known_as_such(client, gpu, torch) -> None:
    """The driver does not export memory that was imported, neither by a handle nor by a descriptor."""
    mine = client.device_empty((128, 128), "bf16")
    address = mine._device_tensor().address
    view, lower = torch.Tensor(address, (128, 128), "bfloat16"), torch.Tensor(address + 64 * 256, (64, 128), "bfloat16")
    for given in (mine, view):
        out = client.gemm(lower, given)
        assert isinstance(out, torch.Tensor)
    other = client.device_empty((128, 128), "bf16")
    into = torch.Tensor(other._device_tensor().address, (128, 128), "bfloat16")
    assert client.gemm(view, mine, out=into) is into
    bound = client.plan_gemm(lower, view).bind(lower, view, out=torch.Tensor(into.data_ptr(), (64, 128), "bfloat16"))
    assert bound() is bound.out
    assert mine._stream == other._stream == torch.current
    assert gpu.comes_to_rest(torch.current)
    whole, out = client.device_empty((64, 64), "fp32"), client.device_empty((64, 64), "fp32")
    shown = Interface(whole.__cuda_array_interface__["data"][0], (64, 64), "<f4")
    assert client.gemm(Capsules(shown.__cuda_array_interface__["data"][0], (64, 64)), shown, out=out) is out
    mine._state.release()
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.gemm(view, view)
    assert caught.value.rule == "buffer_alive"


def test_memory_that_was_freed_is_noticed(client, gpu, torch) -> None:
    for _ in range(3):
        base = gpu.allocate(1 << 20)
        a, b, out = tensors(torch, base)
        client.gemm(a, b, out=out)
        assert gpu.comes_to_rest(torch.current)
        gpu.call("cuMemFree_v2", ctypes.c_uint64(base))
        with pytest.raises(tw.InvalidArgumentError) as caught:
            client.gemm(a, b, out=out)
        assert caught.value.rule == "device_memory_kind"
    client.release_exports()


def test_odd_addresses_get_kernels_that_can_cope(client, gpu, torch) -> None:
    base = gpu.allocate(1 << 20)
    a, b, out = (torch.Tensor(base + number * PART + 2, (33, 33), "float16") for number in range(3))
    client.gemm(a, b, out=out)
    odd = client.report.kernels
    a, b, out = (torch.Tensor(base + number * PART, (64, 64), "float16") for number in range(3))
    client.gemm(a, b, out=out)
    assert client.report.kernels != odd
    plan = client.plan_gemm(a, b)
    if "_ws_" in plan.kernels[0]:
        with pytest.raises(tw.InvalidArgumentError) as caught:
            plan(torch.Tensor(base + 2, (64, 64), "float16"), b, out=out)
        assert caught.value.rule == "operand_alignment"


DYING = """
import os, sys
sys.path[:0] = [{here!r}, {here!r} + '/simulated']
from pathlib import Path
import tilewright as tw
from producers import torch_like
from simulated_gpu import Gpu
from test_simulated_gpu import tensors
from tilewright.gpu import cuda
cuda.LIBRARY = {library!r}
gpu = Gpu(Path({library!r}))
sys.modules["torch"] = torch = torch_like(gpu.stream())
client = tw.connect({target!r})
a, b, out = tensors(torch, gpu.allocate(1 << 20))
bound = client.plan_gemm(a, b).bind(a, b, out=out)
bound()
gpu.hold(torch.current)
bound.launch()
print("ready", flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def own_target(libraries: tuple[Path, Path], tmp_path: Path, kernel_cache: Path) -> Iterator[str]:
    """A service whose device may be lost: seconds after the death of a client whose launch waits, it is replaced."""
    with service(libraries, tmp_path, kernel_cache) as address:
        yield address


@pytest.mark.extended
def test_the_death_of_a_client_leaves_nothing(own_target, gpu, torch, libraries) -> None:
    with tw.connect(own_target) as client:
        check_that_death_leaves_nothing(client, own_target, gpu, torch, libraries[1])


def check_that_death_leaves_nothing(client: tw.Client, target: str, gpu: Gpu, torch: Any, library: Path) -> None:
    a, b, out = tensors(torch, gpu.allocate(1 << 20))
    client.gemm(a, b, out=out)
    before = client.kernels.statistics()
    code = DYING.format(here=str(HERE), library=str(library), target=target)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-9, "ready\n"), done.stderr
    deadline = time.monotonic() + 30
    names = ("sessions", "regions", "bindings", "attached_connections")
    while time.monotonic() < deadline:
        after = client.kernels.statistics()
        if all(after[name] == before[name] for name in names):
            break
        time.sleep(0.02)
    assert {name: after[name] for name in names} == {name: before[name] for name in names}
    client.gemm(a, b, out=out)
    assert gpu.comes_to_rest(torch.current)


@pytest.mark.parametrize("how", ["bound", "called"])
@pytest.mark.extended
def test_a_device_that_is_replaced_is_used_again_by_itself(own_target, gpu, torch, how: str) -> None:
    with tw.connect(own_target, launch="server") as client:
        a, b, out = tensors(torch, gpu.allocate(1 << 20))
        plan = client.plan_gemm(a, b, out=out)
        bound = plan.bind(a, b, out=out)
        kept = client.device_empty((128, 128), "bf16")
        calls = [bound, lambda: bound.launch().out, lambda: plan(a, b, out=out), lambda: client.gemm(a, b, out=out)]
        for call in calls:
            assert call() is out
        assert gpu.comes_to_rest(torch.current)
        end_worker()
        for call in calls if how == "bound" else reversed(calls):
            assert call() is out
        assert gpu.comes_to_rest(torch.current)
        with pytest.raises(tw.TilewrightError) as caught:
            client.gemm(kept, b, out=out)
        assert "make" in caught.value.fix
        assert client.gemm(client.device_empty((128, 128), "bf16"), b, out=out) is out
        assert gpu.comes_to_rest(torch.current)


@pytest.mark.extended
def test_a_binding_that_was_never_launched_outlives_its_device(own_target, gpu, torch) -> None:
    """No connection to the process that ended tells its client: the first launch meets the new one."""
    with tw.connect(own_target, launch="server") as client, tw.connect(own_target, launch="server") as other:
        a, b, out = tensors(torch, gpu.allocate(1 << 20))
        bound = client.plan_gemm(a, b, out=out).bind(a, b, out=out)
        end_worker()
        assert other.gemm(a, b, out=out) is out  # by the new one
        assert bound() is out
        assert gpu.comes_to_rest(torch.current)


@pytest.mark.extended
def test_a_connection_to_the_new_process_of_a_device_binds_again(own_target, gpu, torch) -> None:
    """A session's first connection to it, for one more stream, knows nothing of what the old one had bound."""
    a, b, out = tensors(torch, gpu.allocate(1 << 20))

    async def main(stack: contextlib.AsyncExitStack) -> None:
        def opened() -> tw.Client:
            return stack.enter_context(tw.connect(own_target, launch="server"))

        async def opened_too() -> tw.aio.Client:
            return await stack.enter_async_context(tw.aio.connect(own_target, launch="server"))

        # Each of its own session: what one call finds lost, its session forgets at once.
        bound, launched, piped = (opened().plan_gemm(a, b, out=out).bind(a, b, out=out) for _ in range(3))
        plan, named, other = opened().plan_gemm(a, b, out=out), opened(), opened()
        bound_too = await (await (await opened_too()).plan_gemm(a, b, out=out)).bind(a, b, out=out)
        plan_too, named_too = await (await opened_too()).plan_gemm(a, b, out=out), await opened_too()
        calls: list[Callable[[], Any]] = [
            bound,
            lambda: launched.launch().out,
            lambda: plan(a, b, out=out),
            lambda: named.gemm(a, b, out=out),
            bound_too,
            lambda: plan_too(a, b, out=out),
            lambda: named_too.gemm(a, b, out=out),
        ]
        for call in (*calls, piped):
            found = call()
            assert (await found if inspect.isawaitable(found) else found) is out
        assert gpu.comes_to_rest(torch.current)
        end_worker()
        assert other.gemm(a, b, out=out) is out  # by the new one
        torch.current = gpu.stream()
        for call in calls:
            found = call()
            assert (await found if inspect.isawaitable(found) else found) is out
        pipeline = piped._client.pipeline()  # type: ignore[attr-defined]
        pipeline.launch(piped)
        with pytest.raises(tw.NotFoundError) as caught:  # nobody waits for the launches of a pipeline one by one
            pipeline.join()
        assert caught.value.rule == "binding_id"
        pipeline.launch(piped)
        pipeline.join()
        assert gpu.comes_to_rest(torch.current)

    async def within() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await main(stack)

    asyncio.run(within())


def end_worker() -> None:
    """Kill the processes of devices that servers of this process run, and wait until they are gone."""
    found = device_workers(os.getpid())
    assert found
    for worker in found:
        worker.kill()
    psutil.wait_procs(found, 10)


def test_the_asyncio_client_is_ordered_too(target, gpu, torch) -> None:
    async def main() -> None:
        async with tw.aio.connect(target, launch="server") as client:
            a, b, out = tensors(torch, gpu.allocate(1 << 20))
            bound = await (await client.plan_gemm(a, b)).bind(a, b, out=out)
            await bound()
            release = gpu.hold(torch.current)
            launch = await bound.launch()
            assert not launch.done
            release()
            assert await launch.synchronize() is out

    asyncio.run(main())


def test_results_of_convolutions_lie_as_the_images_on_the_device(client, gpu, torch, monkeypatch) -> None:
    base = gpu.allocate(1 << 20)
    shape, last = (2, 32, 9, 8), (9 * 8 * 32, 1, 8 * 32, 32)
    x = Interface(base, shape, "<f2", strides=tuple(2 * step for step in last), stream=gpu.stream())
    w = Interface(base + PART, (64, 32, 3, 3), "<f2", strides=(2 * 9 * 32, 2, 2 * 3 * 32, 2 * 32))
    y = client.conv(x, w, padding=1)
    assert isinstance(y, tw.DeviceArray)
    steps = (9 * 8 * 64, 1, 8 * 64, 64)
    assert y.spec == tw.Spec.of((2, 64, 9, 8), "fp16", steps)
    values = np.random.default_rng(0).standard_normal(y.shape).astype(np.float16)
    y.copy_from(values)
    found = y.numpy()
    assert found.strides == tuple(2 * step for step in steps)
    np.testing.assert_array_equal(found, values)
    assert y.__cuda_array_interface__["strides"] == found.strides
    assert client.conv(x, w, padding=1, channels_last=False).spec.strides is None
    grad = client.conv_backward_weight(x, y, filter_size=3, padding=1)
    assert client.conv_backward_weight(x, y, out=grad, accumulate=True, padding=1) is grad
    made = []

    def empty_strided(shape, strides, dtype, device):
        made.append((shape, strides, dtype, device))
        return torch.Tensor(gpu.allocate(PART), shape, dtype, strides)

    monkeypatch.setattr(torch, "empty_strided", empty_strided, raising=False)
    image = torch.Tensor(base, shape, "float16", last)
    result = client.conv(image, w, padding=1)
    assert isinstance(result, torch.Tensor)
    assert made == [((2, 64, 9, 8), steps, "float16", "cuda:0")]
