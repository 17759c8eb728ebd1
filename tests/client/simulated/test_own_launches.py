"""Launches in this process on a GPU whose driver is simulated. Kernels leave their outputs as they were."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import time
import weakref
from typing import Any

import numpy as np
import pytest
from simulated_gpu import PART, Gpu

import tilewright as tw
from tilewright.launch.library import load_library

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("cuda") is None,
        reason="NVIDIA's packages are not installed: pip install 'tilewright[cuda]'",
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)"),
]


def test_this_process_launches_on_its_own_streams(target: str, gpu: Gpu, torch: Any) -> None:
    try:
        load_library()
    except tw.UnavailableError as error:
        pytest.skip(str(error))
    base = gpu.allocate(4 * PART)
    a, b, out = (torch.Tensor(base + index * PART, (64, 64), "bfloat16") for index in range(3))
    with tw.connect(target, launch="caller") as client:
        for _ in range(2):
            assert client.gemm(a, b, out=out) is out
            assert client.report is not None
            assert client.report.placement == "caller"
            assert client.report.device == "cuda:0"
        plan = client.plan_gemm(a, b, out=out)
        assert plan(a, b, out=out) is out
        made = plan(a, b)
        assert isinstance(made, torch.Tensor)
        assert made.shape == (64, 64)
        bound = plan.bind(a, b, out=out)
        release = gpu.hold(torch.current)
        launch = bound.launch()
        assert not launch.done
        side = gpu.stream()
        other = bound.launch(stream=side)
        assert other.synchronize() is out  # another stream, which nothing holds
        release()
        assert launch.synchronize() is out
        assert launch.done
        with client.pipeline() as pipeline:
            for _ in range(3):
                pipeline.launch(bound)
        assert pipeline.launches == 3
        assert not client.session.exports  # no memory was shared for any of this
        with pytest.raises(tw.InvalidArgumentError) as caught:
            plan(a, torch.Tensor(base, (64, 32), "bfloat16"), out=out)
        assert caught.value.rule == "plan_operand"
        with pytest.raises(tw.UnsupportedError) as elsewhere:
            plan(a, np.ones((64, 64), tw.DTYPES["bf16"]), out=out)
        assert elsewhere.value.rule == "caller_launch_operands"


def test_a_capture_takes_launches_in_this_process_that_need_a_workspace(libraries, target, gpu, torch) -> None:
    base = gpu.allocate(6 * PART)
    shapes = ((64, 2048), (2048, 64), (64, 64))
    a, b, out = (torch.Tensor(base + index * 2 * PART, shape, "bfloat16") for index, shape in enumerate(shapes))
    with tw.connect(target, launch="caller") as client:
        plan = client.plan_gemm(a, b, out=out, split_k=16)
        assert plan(a, b, out=out) is out
        assert client.report is not None
        assert "cluster1x1x" not in client.report.kernels[0]  # parts that meet in a cluster need none
        torch.current = captured = gpu.stream()
        gpu.call("cuStreamBeginCapture_v2", ctypes.c_uint64(captured), 2)
        for _ in range(2):
            assert plan(a, b, out=out) is out
        assert gpu.made_behind("cuStreamEndCapture", captured)
        assert plan(a, b, out=out) is out
        assert gpu.comes_to_rest(captured)


def test_calls_at_addresses_that_come_again_are_bound_and_all_are_counted(target: str, gpu: Gpu, torch: Any) -> None:
    base = gpu.allocate(9 * PART)
    a, b, *outs = (torch.Tensor(base + index * PART, (64, 64), "bfloat16") for index in range(9))
    with tw.connect(target, launch="caller") as client:
        for out in (outs[0], *outs, outs[0], outs[0]):
            assert client.gemm(a, b, out=out) is out
        (settled,) = client._subject.direct.values()
        again = settled._state.here.plan._again
        bound = {places for places, binding in again.items() if binding is not None}
        assert bound == {tuple(item.data_ptr() for item in (a, b, outs[0]))}
        assert len(again) == len(outs)
        (found,) = [item for item in client.kernels.statistics()["operations"] if item["name"] == "gemm"]
        before = found["caller_launches"]
        for _ in range(5):
            client.gemm(a, b, out=outs[0])
        (found,) = [item for item in client.kernels.statistics()["operations"] if item["name"] == "gemm"]
        assert found["caller_launches"] == before + 5


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_bound_launch_asks_the_system_for_nothing_and_knows_its_stream(
    target: str, gpu: Gpu, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = gpu.allocate(4 * PART)
    a, b, out = (torch.Tensor(base + index * PART, (64, 64), "bfloat16") for index in range(3))
    with tw.connect(target, launch="caller") as client:
        bound = client.plan_gemm(a, b, out=out).bind(a, b, out=out)
        bound.launch().synchronize()
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", None)  # in a sandbox this call takes as long as all of a launch
            first, own = torch.current, gpu.stream()
            release = gpu.hold(own)
            free, torch.current = bound.launch(), own
            held, elsewhere = bound.launch(), bound.launch(stream=first)
            assert client.report.placement == "caller"  # type: ignore[union-attr]
            assert [free.synchronize(), elsewhere.synchronize()] == [out, out]
            assert free.done and elsewhere.done and not held.done
            release()
            assert held.synchronize() is out
        assert bound._state.is_here()
        child = os.fork()
        if not child:
            os._exit(int(bound._state.is_here()))  # its parent's GPU is none of its own
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_that_have_another_context_launch_in_that_of_the_plan(target: str, gpu: Gpu, torch: Any) -> None:
    base = gpu.allocate(4 * PART)
    a, b, out = (torch.Tensor(base + index * PART, (64, 64), "bfloat16") for index in range(3))
    with tw.connect(target, launch="caller") as client:
        bound = client.plan_gemm(a, b, out=out).bind(a, b, out=out)
        primary = gpu.made("cuCtxGetCurrent")
        own = ctypes.c_void_p(gpu.made("cuCtxCreate_v2", 0, 0))
        try:
            assert bound.launch().synchronize() is out
            assert bound() is out
            gpu.call("cuCtxDestroy_v2", own)
            assert bound.launch().synchronize() is out
        finally:
            gpu.call("cuCtxSetCurrent", ctypes.c_void_p(primary))
        assert bound() is out


def test_arrays_that_are_collected_behind_a_held_stream_hold_up_nobody(target: str, gpu: Gpu, torch: Any) -> None:
    with tw.connect(target, launch="server") as client:
        base = gpu.allocate(4 * PART)
        a, b, out = (torch.Tensor(base + index * PART, (64, 64), "bfloat16") for index in range(3))
        bound = client.plan_gemm(a, b).bind(a, b, out=out)
        bound()
        array = client.device_empty((16, 16), "fp32")

        def held() -> int:
            return int(client.kernels.statistics()["buffers"])

        buffers, gone = held(), weakref.ref(array)
        release = gpu.hold(torch.current)
        del array
        assert gone() is None
        launch = bound.launch()
        assert not launch.done  # its memory is still there, for what may use it
        assert held() == buffers
        release()
        launch.synchronize()
        deadline = time.monotonic() + 20
        while held() == buffers and time.monotonic() < deadline:
            time.sleep(0.01)
        assert held() == buffers - 1
